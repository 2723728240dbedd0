"""A headless Chromium that a test talks to over the DevTools protocol: clicks, values, and what the console says."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any


class Page:
    """One page in a browser of its own."""

    def __init__(self, chromium: Path, profile: Path, address: str, width: int) -> None:
        self.chromium, self.profile, self.address, self.width = chromium, profile, address, width
        self.said: list[str] = []
        self.number = 0

    async def __aenter__(self) -> Page:
        from websockets.asyncio.client import connect

        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        sizes = (f"--window-size={self.width},1400", f"--user-data-dir={self.profile}", "--remote-debugging-port=0")
        self.process = subprocess.Popen(
            [str(self.chromium), *options, *sizes, "about:blank"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        found = next(m for line in self.process.stderr if (m := re.search(r"listening on (ws://\S+)", line)))
        self.socket = await connect(found[1], max_size=None)
        target = await self.ask("Target.createTarget", {"url": "about:blank"}, session=False)
        attached = await self.ask("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}, session=False)
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.ask(f"{domain}.enable")
        metrics = {"width": self.width, "height": 1400, "deviceScaleFactor": 1, "mobile": self.width < 600}
        await self.ask("Emulation.setDeviceMetricsOverride", metrics)  # the window of a browser has a least width
        await self.ask("Page.navigate", {"url": self.address})
        await self.until("document.readyState === 'complete'")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.socket.close()
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stderr is not None
        self.process.stderr.close()

    async def ask(self, what: str, parameters: dict[str, Any] | None = None, session: bool = True) -> dict[str, Any]:
        """One command of the protocol, and its result; events on the way are noted."""
        self.number += 1
        message = {"id": self.number, "method": what, "params": parameters or {}}
        await self.socket.send(json.dumps(message | ({"sessionId": self.session} if session else {})))
        while True:
            answer = json.loads(await asyncio.wait_for(self.socket.recv(), 60))
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.said.append(json.dumps(answer["params"]))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    async def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        found = await self.ask("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        for _ in range(300):
            if await self.value(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}")


async def use_report(chromium: Path, profile: Path, page: Path, width: int, labels: list[str]) -> None:
    """Use a report of a leave-one-out comparison: hide a line, sort a table, switch the measure and the domain; nothing may go wrong."""
    hidden = "document.querySelectorAll('.u-legend .u-series')[1].classList.contains('u-off')"
    names = "[...document.querySelectorAll('.measured:not([hidden]) table.scores tbody tr')].map(r => r.cells[0].innerText.split('\\n')[0])"
    head = "document.querySelector('.measured:not([hidden]) table.scores thead th')"

    def choose(select: str, change: str) -> str:
        return f"(() => {{ const s = document.querySelector('{select}'); {change}; s.dispatchEvent(new Event('change')) }})()"

    async with Page(chromium, profile, page.as_uri(), width) as shown:
        await shown.until(f"document.querySelectorAll('.u-legend .u-series').length === {len(labels) + 1}")
        assert await shown.value("getComputedStyle(document.querySelector('.static')).display") == "none"
        assert await shown.value("document.documentElement.scrollWidth <= window.innerWidth"), "the page scrolls sideways"
        await shown.value("document.querySelectorAll('.u-legend .u-series th')[1].click()")
        await shown.until(hidden)
        await shown.value(f"{head}.click()")
        down = await shown.value(names)
        await shown.value(f"{head}.click()")
        up = await shown.value(names)
        assert sorted(up) == sorted(labels) and up == down[::-1] and up != down
        await shown.value(choose("select.measure", "s.value = 'balanced_accuracy'"))
        titles = await shown.value("[...document.querySelectorAll('.measured:not([hidden]) h3')].map(h => h.innerText)")
        assert titles == ["Leave-one-out: balanced accuracy, %"]
        assert "balanced accuracy" in await shown.value("document.querySelector('.of').textContent")
        assert await shown.value(hidden), "a hidden line stays hidden"
        await shown.value(choose("select.domain", "s.selectedIndex = 2"))
        assert await shown.value("document.querySelectorAll('.plot canvas').length") == 1
        breaking = "c => ['anywhere', 'break-word'].includes(getComputedStyle(c).overflowWrap) || getComputedStyle(c).wordBreak === 'break-all'"
        assert await shown.value(f"[...document.querySelectorAll('table.scores th')].filter({breaking}).length") == 0
        assert shown.said == [], shown.said
