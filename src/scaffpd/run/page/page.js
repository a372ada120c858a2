(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const all = (query, within = document) => Array.from(within.querySelectorAll(query));
  const shown = new Set(report.shown);
  const drawn = new Map(); // the finished views by the figure's name
  const chosen = new Map(report.figures.map((figure) => [figure.name, Object.keys(figure.views)[0]]));
  const preferred = new Map();
  const system = matchMedia("(prefers-color-scheme: dark)");
  let drawing = Promise.resolve();

  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const onlyShown = () => report.models.filter((name) => shown.has(name));

  function focus(figure) {
    const wanted = preferred.get(figure.name) || figure.focus[0];
    return shown.has(wanted) ? wanted : figure.focus.find((name) => shown.has(name)) || wanted;
  }

  // A specification for a certain width: every `room` becomes a number of columns.
  function settled(spec, width) {
    if (spec === null || typeof spec !== "object") return spec;
    if (Array.isArray(spec)) return spec.map((part) => settled(part, width));
    if (typeof spec.room === "number") return Math.max(1, Math.floor(width / spec.room));
    return Object.fromEntries(Object.entries(spec).map(([name, part]) => [name, settled(part, width)]));
  }

  function signals(figure, view) {
    view.signal("shown", onlyShown());
    if (!figure.focus.length) return view;
    const select = document.querySelector(`#figure-${figure.name} select`);
    if (select) select.value = focus(figure);
    return view.signal("focus", focus(figure));
  }

  // The width that a figure will have once its section is unfolded.
  function hiddenWidth(place) {
    const main = document.getElementById("main"), look = getComputedStyle(main);
    const whole = main.clientWidth - parseFloat(look.paddingLeft) - parseFloat(look.paddingRight);
    const gap = 3.5 * parseFloat(getComputedStyle(root).fontSize);
    const half = !place.closest("figure").classList.contains("full") && matchMedia("(min-width: 48.01rem)").matches;
    return Math.floor(half ? (whole - gap) / 2 : whole);
  }

  async function draw(figure) {
    const place = document.querySelector(`#figure-${figure.name} .chart`);
    const width = place.clientWidth || hiddenWidth(place);
    const spec = settled(figure.views[chosen.get(figure.name)], Math.min(width - report.margin, report.paper));
    spec.width = width;
    spec.datasets = Object.fromEntries(figure.tables.map((name) => [name, report.data[name]]));
    for (const param of spec.params) {
      if (param.name === "shown") param.value = onlyShown();
      if (param.name === "focus") param.value = focus(figure);
    }
    drawn.get(figure.name)?.finalize();
    const { view } = await window.vegaEmbed(place, spec, {
      actions: false, ast: true, config: report.themes[theme()], defaultStyle: false, hover: false, logLevel: 1, mode: "vega-lite",
      renderer: figure.heavy ? "canvas" : "svg", tooltip: { disableDefaultStyle: true, theme: "page" },
    });
    drawn.set(figure.name, view);
    signals(figure, view);
    await view.runAsync();
    label(place, figure);
  }

  function label(place, figure) {
    place.querySelectorAll("svg, canvas").forEach((picture) => {
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", figure.alt);
    });
  }

  // One after the other, the first first; what is asked for meanwhile waits its turn.
  function later(work) {
    root.dataset.ready = "no";
    drawing = drawing.then(work).catch((error) => console.error(error)).then(() => { root.dataset.ready = "yes"; });
    return drawing;
  }

  const drawAll = () => later(async () => {
    root.dataset.drawn = theme();
    for (const figure of report.figures) await draw(figure);
  });

  const update = () => later(async () => {
    for (const figure of report.figures) await signals(figure, drawn.get(figure.name)).runAsync();
  });

  function showModels() {
    all(".chip").forEach((chip) => chip.setAttribute("aria-pressed", shown.has(report.models[chip.dataset.index])));
    all("[data-model]").forEach((cell) => { cell.hidden = !shown.has(report.models[cell.dataset.model]); });
    const every = document.getElementById("every");
    if (every) every.textContent = shown.size < report.models.length ? "Show all" : "Show fewer";
  }

  function toggle(name) {
    if (shown.size === 1 && shown.has(name)) return; // charts of nothing say nothing: the last one stays
    if (!shown.delete(name)) shown.add(name);
    showModels();
    update();
  }

  function toggleEvery() {
    const wanted = shown.size < report.models.length ? report.models : report.main;
    shown.clear();
    wanted.forEach((name) => shown.add(name));
    showModels();
    update();
  }

  function sort(head) {
    const table = head.closest("table");
    const down = head.getAttribute("aria-sort") === "ascending";
    all("th[aria-sort]", table).forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const column = Array.from(head.parentNode.children).indexOf(head);
    const words = new Intl.Collator(undefined, { numeric: true });
    const key = (row) => row.children[column].dataset.v;
    const order = (a, b) => (head.dataset.kind === "text" ? words.compare(a, b) : Number(a) - Number(b));
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      if (left === "" || right === "") return (left === "") - (right === ""); // what there is not comes last, either way
      return down ? order(right, left) : order(left, right);
    });
    body.append(...rows);
  }

  function filter(input) {
    const rows = Array.from(document.getElementById(input.dataset.table).tBodies[0].rows);
    const wanted = input.value.trim().toLowerCase();
    rows.forEach((row) => { row.hidden = !row.cells[0].dataset.v.toLowerCase().includes(wanted); });
    const left = rows.filter((row) => !row.hidden).length;
    input.closest("p").querySelector("[role=status]").textContent = wanted ? `${left} of ${rows.length}` : "";
  }

  async function copy(button) {
    const text = document.getElementById("command").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById("command"));
      button.textContent = "Selected";
    }
  }

  all(".chip").forEach((chip) => chip.addEventListener("click", () => toggle(report.models[chip.dataset.index])));
  document.getElementById("every")?.addEventListener("click", toggleEvery);
  document.getElementById("copy")?.addEventListener("click", (event) => copy(event.currentTarget));
  all(".sortable th[aria-sort]").forEach((head) => head.querySelector("button").addEventListener("click", () => sort(head)));
  all("input[data-table]").forEach((input) => input.addEventListener("input", () => filter(input)));
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    drawAll();
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) drawAll(); });
  for (const figure of report.figures) {
    const frame = document.getElementById(`figure-${figure.name}`);
    all(".views button", frame).forEach((button) => button.addEventListener("click", () => {
      all(".views button", frame).forEach((other) => other.setAttribute("aria-pressed", other === button));
      chosen.set(figure.name, button.dataset.view);
      later(() => draw(figure));
    }));
    frame.querySelector("select")?.addEventListener("change", (event) => {
      preferred.set(figure.name, event.target.value);
      if (report.models.includes(event.target.value)) shown.add(event.target.value);
      showModels();
      update();
    });
  }
  let wide = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (innerWidth !== wide) { wide = innerWidth; drawAll(); } }, 200);
  });
  let folded = [];
  addEventListener("beforeprint", () => { // paper cannot be unfolded
    folded = all("details.trained:not([open])");
    folded.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((part) => { part.open = false; }));
  showModels();
  drawAll();
})();
