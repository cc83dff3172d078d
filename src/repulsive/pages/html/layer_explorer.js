"use strict";
// Draws the attention of the selected heads. Words are inserted as text, never as markup.
(() => {
  const root = document.getElementById("layers");
  if (!root) return;
  const byId = (id) => document.getElementById(id);
  const { layers, methods, examples } = JSON.parse(byId("attention").textContent);
  const MAX_LARGE = 2, MAX_COLUMNS = 40;  // up to 2 maps, or up to 40 columns in all maps, are drawn large with words
  const { MEAN, headName, element, peak, cells } = attentionMap;
  const pick = byId("pick"), layer = byId("layer"), left = byId("left"), right = byId("right");
  const chips = [...root.querySelectorAll("input[name=heads]")], stage = byId("stage"), readout = byId("readout");
  const state = { example: 1, layer: 1, left: 1, right: Math.min(2, methods.length), heads: [] };

  const clamp = (text, max) => Math.min(max, Math.max(1, Math.trunc(Number(text)) || 1));
  const asHead = (text) => (text === MEAN ? MEAN : Number(text));
  const has = (maps, head) => head === MEAN || head < maps.heads;
  const mapsOf = (method) => examples[state.example - 1].maps[method - 1][state.layer - 1];

  const rowsOf = (maps, head) => attentionMap.rowsOf(examples[state.example - 1], maps, head);

  function small(method, head, rows, top) {
    const down = rows.length, across = rows[0].length, width = Math.min(150, Math.max(60, 12 * across));
    const height = Math.min(300, Math.max(12, (width * down) / across));
    const label = `Show ${headName(head)} of ${methods[method - 1]} alone`;
    const map = element("svg", { viewBox: `-.1 0 ${across + 0.1} ${down}`, width, height, preserveAspectRatio: "none",
      "aria-hidden": "true" }, element("g", { class: "cells" }, ...cells(rows, top)));
    const button = element("button", { type: "button", class: "thumb", "aria-label": label }, map,
      element("span", {}, String(head)));
    button.addEventListener("click", () => update({ heads: [head] }));
    return button;
  }

  function large(method, head, rows, top) {
    return attentionMap.onWords(examples[state.example - 1], mapsOf(method), rows, top,
      { name: `Map of ${headName(head)}, ${methods[method - 1]}`, caption: headName(head), data: { method, head } });
  }

  function column(method, heads, top) {
    const maps = mapsOf(method), node = element("div", { class: "column" });
    if (methods.length > 1) node.append(element("h3", {}, methods[method - 1]));
    if (!maps) {
      node.append(element("p", {}, `${methods[method - 1]} has no ${layers[state.layer - 1]}.`));
      return node;
    }
    const shown = heads.filter((head) => has(maps, head));
    const columns = examples[state.example - 1].texts[maps.columns].length;
    const draw = shown.length > MAX_LARGE && shown.length * columns > MAX_COLUMNS ? small : large;
    const drawings = shown.map((head) => draw(method, head, rowsOf(maps, head), top));
    node.append(element("div", { class: draw === small ? "thumbs" : "large" }, ...drawings));
    return node;
  }

  function show() {
    const sides = methods.length > 1 ? [state.left, state.right] : [1];
    const shown = sides.map(mapsOf).filter(Boolean), count = Math.max(0, ...shown.map((maps) => maps.heads));
    const selected = state.heads.filter((head) => has({ heads: count }, head));
    const heads = selected.length ? selected : [...Array(count).keys()];
    pick.value = String(state.example);
    layer.value = String(state.layer);
    byId("previous").disabled = state.example === 1;
    byId("next").disabled = state.example === examples.length;
    if (left) [left.value, right.value] = [String(state.left), String(state.right)];
    chips.forEach((chip) => {
      chip.checked = heads.includes(asHead(chip.value));
      chip.parentNode.hidden = !has({ heads: count }, asHead(chip.value));
    });
    const top = Math.max(0, ...shown.flatMap((maps) =>
      heads.filter((head) => has(maps, head)).map((head) => peak(rowsOf(maps, head)))));
    byId("top").textContent = top.toFixed(3);
    stage.replaceChildren(...[...new Set(sides)].map((method) => column(method, heads, top)));
  }

  const ofAtlas = () => /^#L\d+H\d+$/.test(location.hash);

  function readHash() {
    const folded = root.closest("details");
    if (folded && location.hash.length > 1 && !ofAtlas()) folded.open = true;
    const hash = new URLSearchParams(location.hash.slice(1));
    state.example = clamp(hash.get("example"), examples.length);
    state.layer = clamp(hash.get("layer"), layers.length);
    state.left = clamp(hash.get("left"), methods.length);
    state.right = hash.has("right") ? clamp(hash.get("right"), methods.length) : Math.min(2, methods.length);
    state.heads = (hash.get("heads") || "").split(",").filter((text) => /^(mean|\d+)$/.test(text)).map(asHead);
  }

  function update(changes) {
    const focused = document.activeElement && document.activeElement.id;
    Object.assign(state, changes);
    show();
    const sides = methods.length > 1 ? `&left=${state.left}&right=${state.right}` : "";
    const heads = state.heads.length ? `&heads=${state.heads.join(",")}` : "";
    history.replaceState(null, "", `#example=${state.example}&layer=${state.layer}${heads}${sides}`);
    if (!focused && document.activeElement === document.body) byId("every").focus({ preventScroll: true });
  }

  function readCell(event) {
    const grid = event.target.closest("#stage .cells[data-head]");
    if (!grid) return;
    const method = Number(grid.dataset.method), head = asHead(grid.dataset.head), maps = mapsOf(method);
    const rows = rowsOf(maps, head), [row, col] = attentionMap.cellAt(event, grid, rows);
    const texts = examples[state.example - 1].texts;
    const name = methods.length > 1 ? `${methods[method - 1]} · ` : "";
    readout.textContent = `${name}${layers[state.layer - 1]} · ${headName(head)} · “${texts[maps.rows][row]}” attends to ` +
      `“${texts[maps.columns][col]}” · ${rows[row][col].toFixed(3)}`;
  }

  pick.addEventListener("change", () => update({ example: Number(pick.value) }));
  layer.addEventListener("change", () => update({ layer: Number(layer.value) }));
  byId("previous").addEventListener("click", () => update({ example: clamp(state.example - 1, examples.length) }));
  byId("next").addEventListener("click", () => update({ example: clamp(state.example + 1, examples.length) }));
  byId("every").addEventListener("click", () => update({ heads: [] }));
  [left, right].forEach((side) => side && side.addEventListener("change", () => update({ [side.id]: Number(side.value) })));
  chips.forEach((chip) => chip.addEventListener("change", () =>
    update({ heads: chips.filter((chip) => chip.checked).map((chip) => asHead(chip.value)) })));
  stage.addEventListener("pointermove", readCell);
  window.addEventListener("hashchange", () => { if (!ofAtlas()) { readHash(); show(); } });

  ["controls", "readout", "drawn"].forEach((id) => { byId(id).hidden = false; });
  readHash();
  const fold = root.closest("details");
  if (fold && !fold.open) fold.addEventListener("toggle", show, { once: true });
  else show();
})();
