"use strict";
// Draws the head atlas, one canvas per row and only for rows near the screen, and opens the drawer of a head.
(() => {
  const grid = document.getElementById("atlas-grid");
  if (!grid) return;
  const byId = (id) => document.getElementById(id);
  const { layers, sides, badges, columnsOf, own, status, describe, onImages } = atlasData, { element } = attentionMap;
  const KINDS = Object.keys(badges), SMALLEST = 15, READABLE = 44, LARGEST = 84;  // pixels of a cell
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const drawer = byId("drawer"), most = Math.max(...layers.map((_, layer) => columnsOf(layer))), rows = [];
  let open = null, focused = [0, 0];

  const has = ([layer, head]) => layer >= 0 && layer < layers.length && head >= 0 && head < columnsOf(layer);
  const cellOf = ([layer, head]) => filled(layer).cells[head];
  const rowName = (label) => label.replace(/layer (\d+)$/, "$1").trim();
  const all = (layer) => [...Array(columnsOf(layer)).keys()];

  // -- the grid ------------------------------------------------------------------------------------------------

  function build() {
    const numbers = [...Array(most).keys()].map((head) => element("span", { role: "columnheader" }, String(head)));
    grid.append(element("div", { role: "row", class: "atlas-row numbers" },
      element("span", { role: "columnheader", class: "corner" }, "layer"), ...numbers));
    layers.forEach((layer, at) => {
      const node = element("div", { role: "row", class: "atlas-row" },
        element("span", { role: "rowheader", title: layer.label }, rowName(layer.label)));
      node.style.setProperty("--heads", columnsOf(at));
      rows.push({ node, cells: null, canvases: [], drawn: false });
      grid.append(node);
    });
  }

  // A row with its cells, which are made when the row is first needed.
  function filled(layer) {
    const row = rows[layer];
    if (!row.cells) {
      row.cells = all(layer).map((head) => cell(layer, head));
      row.node.append(...row.cells);
    }
    return row;
  }

  function cell(layer, head) {
    const name = describe([layer, head]);
    const node = element("button", { type: "button", role: "gridcell", class: `head ${status(layer, head)}`.trim(), tabindex: -1,
      "aria-label": name, title: name, "aria-selected": "false", "data-layer": layer, "data-head": head });
    sides.forEach((side, at) => {
      const index = own(at, layer, head), { kinds, redundant, similar } = side[layer], of = sides.length > 1 ? ` side${at}` : "";
      if (index === null) return;
      if (kinds[index]) node.append(element("b", { class: `badge k${KINDS.indexOf(kinds[index]) + 1}${of}` }, badges[kinds[index]]));
      if (redundant.includes(index)) node.append(element("b", { class: `mark redundant${of}` }));
      if (index in similar) node.append(element("b", { class: `mark similar${of}` }));
    });
    return node;
  }

  function resize() {
    const label = 8 + Math.min(110, 7 * Math.max(5, ...layers.map((layer) => rowName(layer.label).length)));
    const wide = (grid.clientWidth - label - 8) / most, high = Math.max(0.5 * window.innerHeight, window.innerHeight - 420) / layers.length;
    const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(wide), Math.max(READABLE, Math.floor(high))));
    grid.style.setProperty("--cell", `${size}px`);
    grid.style.setProperty("--label", `${label}px`);
    grid.classList.toggle("tiny", size < 28);
  }

  function draw(layer) {
    const row = filled(layer);
    sides.forEach((_, side) => {
      if (!atlasData.tiles(side, layer)) return;
      if (!row.canvases[side]) {
        row.canvases[side] = element("canvas", { class: `tiles side${side}`, "aria-hidden": "true" });
        row.node.append(row.canvases[side]);
      }
      atlasData.paint(row.canvases[side], side, layer, all(layer));
    });
    row.drawn = true;
  }

  // Free the pixels of a row that left the screen.
  function erase(layer) {
    rows[layer].canvases.forEach((canvas) => canvas && canvas.remove());
    Object.assign(rows[layer], { canvases: [], drawn: false });
  }

  const drawMissing = () => rows.forEach((row, layer) => { if (!row.drawn) draw(layer); });
  const drawAgain = () => rows.forEach((row, layer) => { if (row.drawn) draw(layer); });

  function focusCell(place) {
    cellOf(focused).tabIndex = -1;
    focused = place;
    cellOf(focused).tabIndex = 0;
  }

  const moved = ([layer, head], [down, right]) => {
    const at = [layer + down, head + right];
    return has(at) ? at : down && has([layer + down, 0]) ? [layer + down, columnsOf(layer + down) - 1] : [layer, head];
  };

  // The head before or after this one in reading order.
  function beside([layer, head], step) {
    const at = [layer, head + step];
    if (has(at)) return at;
    const next = layer + step;
    return next < 0 || next >= layers.length ? [layer, head] : [next, step > 0 ? 0 : columnsOf(next) - 1];
  }

  // -- the drawer ----------------------------------------------------------------------------------------------

  function show(place, { focus = false } = {}) {
    if (open) cellOf(open).setAttribute("aria-selected", "false");
    open = place;
    focusCell(place);
    cellOf(place).setAttribute("aria-selected", "true");
    drawer.hidden = false;
    document.body.classList.add("with-drawer");
    drawerContent.fill(open, (other) => show(other, { focus: true }));
    resize();
    cellOf(place).scrollIntoView({ block: "nearest", inline: "nearest" });
    if (focus) drawer.focus({ preventScroll: true });
    history.replaceState(null, "", `#L${place[0]}H${place[1]}`);
  }

  function close() {
    if (!open) return;
    const last = open;
    cellOf(last).setAttribute("aria-selected", "false");
    open = null;
    drawer.hidden = true;
    document.body.classList.remove("with-drawer");
    resize();
    if (/^#L\d+H\d+$/.test(location.hash)) history.replaceState(null, "", location.pathname + location.search);
    cellOf(last).focus({ preventScroll: true });
  }

  // -- events --------------------------------------------------------------------------------------------------

  function readHash() {
    const match = /^#L(\d+)H(\d+)$/.exec(location.hash);
    if (match && has([Number(match[1]), Number(match[2])])) show([Number(match[1]), Number(match[2])], { focus: true });
    else close();
  }

  grid.addEventListener("click", (event) => {
    const node = event.target.closest(".head");
    if (node) show([Number(node.dataset.layer), Number(node.dataset.head)], { focus: true });
  });
  grid.addEventListener("keydown", (event) => {
    const ends = { Home: [focused[0], 0], End: [focused[0], columnsOf(focused[0]) - 1] };
    const target = event.key in MOVES ? moved(focused, MOVES[event.key]) : ends[event.key];
    if (!target || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    focusCell(target);
    cellOf(target).focus();
    if (open) show(target);
  });
  drawer.addEventListener("keydown", (event) => {
    const scrolls = event.target.closest(".maps, .picture, input, select");
    if (!(event.key in MOVES) || scrolls || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const control = event.target.id;
    show(moved(open, MOVES[event.key]), { focus: !control });
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  byId("drawer-close").addEventListener("click", close);
  byId("drawer-previous").addEventListener("click", () => show(beside(open, -1)));
  byId("drawer-next").addEventListener("click", () => show(beside(open, 1)));
  window.addEventListener("hashchange", readHash);
  window.addEventListener("resize", resize);
  window.addEventListener("beforeprint", drawMissing);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    atlasData.forgetColours();
    drawAgain();
    if (open) drawerContent.fill(open);
  });
  if (onImages) {
    onImages.listen((changes) => {
      if ("image" in changes || "query" in changes) {
        atlasData.forgetTiles();
        drawAgain();
      }
      if (open) drawerContent.update();
    });
  }

  const fade = byId("fade");
  if (fade) {
    const follow = () => grid.style.setProperty("--fade", String(Number(fade.value) / 100));
    fade.addEventListener("input", follow);
    ["before", "after"].forEach((name, at) => byId(`fade-${name}`).addEventListener("click", () => {
      fade.value = String(100 * at);
      follow();
    }));
    byId("fade-controls").hidden = false;
    follow();
  }

  build();
  resize();
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const layer = rows.findIndex(({ node }) => node === entry.target);
    if (entry.isIntersecting === rows[layer].drawn) return;
    if (entry.isIntersecting) draw(layer);
    else erase(layer);
  }), { rootMargin: "300px" });
  rows.forEach(({ node }) => watcher.observe(node));
  cellOf(focused).tabIndex = 0;
  readHash();
})();
