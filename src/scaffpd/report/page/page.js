(() => {
  "use strict";
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const all = (query, within = document) => Array.from(within.querySelectorAll(query));
  const drawn = new Map(); // the finished views by the figure's name
  let drawing = Promise.resolve();

  // The width that a figure will have once its section is unfolded.
  function hiddenWidth(place) {
    const main = document.getElementById("main"), look = getComputedStyle(main);
    const whole = main.clientWidth - parseFloat(look.paddingLeft) - parseFloat(look.paddingRight);
    const rem = parseFloat(getComputedStyle(root).fontSize);
    if (place.closest(".small")) { // as many columns of 17 rem as fit
      const columns = Math.max(1, Math.floor((whole + 2 * rem) / (19 * rem)));
      return Math.floor((whole - 2 * rem * (columns - 1)) / columns);
    }
    const gap = 3.5 * rem;
    const half = !place.closest("figure").classList.contains("full") && matchMedia("(min-width: 48.01rem)").matches;
    return Math.floor(half ? (whole - gap) / 2 : whole);
  }

  async function draw(figure) {
    const place = document.querySelector(`#figure-${figure.name} .chart`);
    const width = place.clientWidth || hiddenWidth(place);
    const spec = {
      ...figure.spec,
      width,
      params: figure.spec.params.map((one) => (one.name === "whole" ? { ...one, value: width } : one)),
      datasets: Object.fromEntries(figure.tables.map((name) => [name, report.data[name]])),
    };
    drawn.get(figure.name)?.finalize();
    const { view } = await window.vegaEmbed(place, spec, {
      actions: false, ast: true, config: report.config, defaultStyle: false, hover: false, logLevel: 1, mode: "vega-lite",
      renderer: "svg", tooltip: { disableDefaultStyle: true, theme: "page" },
    });
    drawn.set(figure.name, view);
    all("svg", place).forEach((picture) => {
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", figure.alt);
    });
  }

  // One after the other, the first first; a redraw that is asked for meanwhile waits its turn.
  function drawAll() {
    root.dataset.ready = "no";
    drawing = drawing.then(async () => {
      for (const figure of report.figures) await draw(figure);
    }).catch((error) => console.error(error)).then(() => { root.dataset.ready = "yes"; });
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
      if (left === "" || right === "") return (left === "") - (right === ""); // empty cells come last, either way
      return down ? order(right, left) : order(left, right);
    });
    body.append(...rows);
  }

  async function copy(button) {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected";
    }
  }

  document.getElementById("copy")?.addEventListener("click", (event) => copy(event.currentTarget));
  all(".sortable th[aria-sort]").forEach((head) => head.querySelector("button").addEventListener("click", () => sort(head)));
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
  drawAll();
})();
