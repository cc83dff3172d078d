"use strict";
// Draws the attention of the selected heads. Words are inserted as text, never as markup.
(() => {
  const root = document.getElementById("layers");
  if (!root) return;
  const byId = (id) => document.getElementById(id);
  const { layers, methods, examples } = JSON.parse(byId("attention").textContent);
  const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const CODE = Object.fromEntries([...ALPHABET].map((letter, index) => [letter, index]));
  const MAX_LARGE = 2, MAX_COLUMNS = 40;  // up to 2 maps, or up to 40 columns in all maps, are drawn large with words
  const MAX_LETTERS = 16;  // of a word
  const pick = byId("pick"), layer = byId("layer"), left = byId("left"), right = byId("right");
  const chips = [...root.querySelectorAll("input[name=heads]")], stage = byId("stage"), readout = byId("readout");
  const state = { example: 1, layer: 1, left: 1, right: Math.min(2, methods.length), heads: [] };

  const clamp = (text, max) => Math.min(max, Math.max(1, Math.trunc(Number(text)) || 1));
  const level = (weight, top) => (top > 0 ? Math.floor(9.5 * Math.sqrt(Math.min(1, weight / top))) : 0);
  const widthOf = (word) => [...word].reduce((sum, letter) => sum + (letter >= "\u1100" ? 12.5 : 7.5), 0);  // pixels, upper bound
  const short = (word) => ([...word].length > MAX_LETTERS ? `${[...word].slice(0, MAX_LETTERS - 1).join("")}…` : word);
  const MEAN = "mean";
  const headName = (head) => (head === MEAN ? "mean over heads" : `head ${head}`);
  const asHead = (text) => (text === MEAN ? MEAN : Number(text));
  const has = (maps, head) => head === MEAN || head < maps.heads;
  const mapsOf = (method) => examples[state.example - 1].maps[method - 1][state.layer - 1];

  function element(name, attributes = {}, ...children) {
    const isSvg = ["svg", "g", "path", "rect", "text"].includes(name);
    const node = isSvg ? document.createElementNS(byId("empty").namespaceURI, name) : document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, String(value)));
    node.append(...children);
    return node;
  }

  // Decode the attention of one head, or the mean over all heads, as rows of weights.
  function rowsOf(maps, head) {
    const texts = examples[state.example - 1].texts, rows = texts[maps.rows].length, columns = texts[maps.columns].length;
    const at = (index) => (64 * CODE[maps.weights[2 * index]] + CODE[maps.weights[2 * index + 1]]) / 4095;
    const heads = head === MEAN ? [...Array(maps.heads).keys()] : [head];
    return [...Array(rows).keys()].map((row) => [...Array(columns).keys()].map((column) =>
      heads.reduce((sum, one) => sum + at((one * rows + row) * columns + column), 0) / heads.length));
  }

  function cells(rows, top) {
    const paths = Array(10).fill("");
    rows.forEach((row, r) => row.forEach((weight, c) => { paths[level(weight, top)] += `M${c} ${r}.5h.9`; }));
    return paths.flatMap((d, step) => (step && d ? [element("path", { class: `h${step}`, d })] : []));
  }

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
    const texts = examples[state.example - 1].texts, maps = mapsOf(method);
    const down = texts[maps.rows].map(short), across = texts[maps.columns].map(short);
    const cell = Math.min(16, Math.max(11, 460 / across.length));
    const side = 12 + Math.max(...down.map(widthOf)), above = 10 + Math.max(...across.map(widthOf));
    const height = above + down.length * cell + 2, width = across.length * cell + 2;
    const words = across.map((word, c) => element("text", { class: "word",
      transform: `translate(${(c + 0.5) * cell + 3.5} ${above - 6}) rotate(-90)` }, word));
    const queries = down.map((word, r) => element("text", { class: "row", x: side - 6,
      y: above + (r + 0.5) * cell + 3.5 }, word));
    const grid = element("g", { class: "cells", transform: `translate(.5 ${above}) scale(${cell})` },
      element("rect", { class: "touch", width: across.length, height: down.length }), ...cells(rows, top));
    Object.assign(grid.dataset, { method, head });
    const peaks = rows.slice(0, 40).map((row, r) => `${down[r]} → ${across[row.indexOf(Math.max(...row))]}`).join(", ");
    const box = (wide) => ({ width: wide.toFixed(0), height: height.toFixed(0), viewBox: `0 0 ${wide} ${height}` });
    const region = { class: "maps", role: "region", tabindex: 0, "aria-label": `Map of ${headName(head)}, ${methods[method - 1]}` };
    return element("figure", { class: "alone" },
      element("figcaption", {}, headName(head) + (maps.rows === maps.columns ? "" : `: ${maps.rows} attends to ${maps.columns}`)),
      element("div", region,
        element("svg", { class: "side", ...box(side), "aria-hidden": "true" }, ...queries),
        element("svg", { ...box(width), role: "img", "aria-label": `Each token attends most to: ${peaks}` },
          element("rect", { class: "ground", x: 0, y: above, width: width - 2, height: down.length * cell }),
          ...words, grid)));
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
    const peak = (rows) => rows.reduce((max, row) => Math.max(max, ...row), 0);
    const top = Math.max(0, ...shown.flatMap((maps) =>
      heads.filter((head) => has(maps, head)).map((head) => peak(rowsOf(maps, head)))));
    byId("top").textContent = top.toFixed(3);
    stage.replaceChildren(...[...new Set(sides)].map((method) => column(method, heads, top)));
  }

  function readHash() {
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
    const box = grid.querySelector(".touch").getBoundingClientRect(), rows = rowsOf(maps, head);
    const inside = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const row = inside((event.clientY - box.top) / box.height, rows.length);
    const col = inside((event.clientX - box.left) / box.width, rows[0].length);
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
  window.addEventListener("hashchange", () => { readHash(); show(); });

  ["controls", "readout", "drawn"].forEach((id) => { byId(id).hidden = false; });
  readHash();
  show();
})();
