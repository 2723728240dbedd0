/* Makes tables sortable and charts interactive. Without this script, the report shows the same numbers in static tables and charts. */
(() => {
  "use strict";
  const root = document.documentElement;
  const groups = JSON.parse(document.getElementById("curves").textContent);
  const DASHES = [[], [7, 3], [2, 3], [9, 3, 2, 3], [12, 4], [5, 2, 1, 2], [1, 2]];
  root.classList.add("js");

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const option = (select, value, text) => select.append(new Option(text, value));

  function sortable(table) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      head.setAttribute("role", "columnheader");
      const sort = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const value = (row) => {
          const text = row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
          const number = parseFloat(text.replace(/\u2212/g, "-").replace(/,/g, ""));
          return Number.isNaN(number) ? text : number;
        };
        const order = (a, b) => {
          const x = value(a), y = value(b);
          const less = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
          return down ? -less : less;
        };
        body.append(...[...body.rows].sort(order));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }

  function aligned(lines) {
    const rounds = [...new Set(lines.flatMap((line) => line.rounds))].sort((a, b) => a - b);
    const values = lines.map((line) => {
      const known = new Map(line.rounds.map((round, place) => [round, line.mean[place]]));
      return rounds.map((round) => known.get(round) ?? null);
    });
    return [rounds, ...values];
  }

  function chart(home, group, view, measure, domain) {
    const lines = group.views[view][measure][domain];
    const spreads = lines.map((line) => new Map(line.rounds.map((round, place) => [round, line.spread[place]])));
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule"), width: 1 } };
    const series = group.labels.map((label, place) => ({
      label,
      stroke: colour(`--c${group.styles[place] % 8}`),
      dash: DASHES[(group.styles[place] + Math.floor(group.styles[place] / 8)) % DASHES.length],
      width: 2,
      spanGaps: true,
      points: { show: true, size: 5 },
      value: (plot, value, _, index) => {
        if (value === null || value === undefined) return "–";
        const spread = index === null || index === undefined ? null : spreads[place].get(plot.data[0][index]);
        return value.toFixed(1) + (spread === null || spread === undefined ? "" : ` ± ${spread.toFixed(1)}`);
      },
    }));
    home.replaceChildren();
    const plot = new uPlot({
      width: home.clientWidth || 320,
      height: Math.max(240, Math.min(420, Math.round((home.clientWidth || 320) * 0.5))),
      scales: { x: { time: false } },
      axes: [{ ...axis, label: "round", labelSize: 18, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }, { ...axis, label: `${group.words[measure]}, %`, labelSize: 18 }],
      series: [{ label: "round" }, ...series],
      legend: { live: true },
      cursor: { drag: { x: true, y: true, uni: 20 } },
    }, aligned(lines), home);
    new ResizeObserver(() => home.clientWidth && plot.setSize({ width: home.clientWidth, height: plot.height })).observe(home);
    return plot;
  }

  function group(section, place) {
    const facts = groups[place];
    const measures = section.querySelector("select.measure");
    const tables = [...section.querySelectorAll(".measured")];
    const others = section.querySelector(".other-measures");
    if (others) {
      others.before(...others.querySelectorAll(".measured"));
      others.remove();
    }
    const explorer = section.querySelector(".explorer");
    const view = section.querySelector("select.view"), domain = section.querySelector("select.domain");
    const words = { seen: "seen domains", unseen: "unseen domains" };
    const shown = { hidden: new Set() };
    if (explorer) Object.keys(facts.views).forEach((name) => option(view, name, words[name]));

    function fillDomains() {
      const [first] = Object.values(facts.views[view.value]);
      const before = domain.value;
      domain.replaceChildren();
      Object.keys(first).forEach((name) => option(domain, name, name === "mean" ? "mean over domains" : name.slice(7)));
      if (before in first) domain.value = before;
    }
    function draw() {
      tables.forEach((block) => { block.hidden = block.dataset.measure !== measures.value; });
      if (!explorer) return;
      const curves = facts.views[view.value];
      const measure = measures.value in curves ? measures.value : Object.keys(curves)[0];
      const plot = chart(explorer.querySelector(".plot"), facts, view.value, measure, domain.value);
      explorer.querySelector(".of").textContent = `${facts.words[measure]}, ${domain.selectedOptions[0].textContent}`;
      shown.hidden.forEach((label) => {
        const at = facts.labels.indexOf(label);
        if (at >= 0) plot.setSeries(at + 1, { show: false });
      });
      plot.hooks.setSeries = [(one, at, change) => {
        if (at && change && change.show !== undefined) shown.hidden[change.show ? "delete" : "add"](facts.labels[at - 1]);
      }];
    }
    if (explorer) {
      fillDomains();
      view.addEventListener("change", () => { fillDomains(); draw(); });
      domain.addEventListener("change", draw);
    }
    if (measures) {
      measures.addEventListener("change", draw);
      draw();
    }
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("section.group-of-runs").forEach(group);
})();
