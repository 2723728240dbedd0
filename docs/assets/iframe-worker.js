/* Search needs a web worker, and browsers start none for pages that are opened as files. There, a hidden frame does its work. */
(function () {
  if (location.protocol !== "file:") return

  function load(frame, url) {
    return new Promise(function (done, failed) {
      const script = frame.contentDocument.createElement("script")
      script.src = url
      script.onload = done
      script.onerror = failed
      frame.contentDocument.body.appendChild(script)
    })
  }

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const frame = this.frame
      const inner = frame.contentWindow
      inner.importScripts = async function (...urls) {
        for (const each of urls) await load(frame, each)
      }
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.ready = load(frame, new URL(url, location.href).href)
    }

    postMessage(data) {
      this.ready.then(() => {
        const inner = this.frame.contentWindow
        inner.dispatchEvent(new inner.MessageEvent("message", { data }))
      })
    }

    terminate() {
      this.frame.remove()
    }
  }

  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
})()
