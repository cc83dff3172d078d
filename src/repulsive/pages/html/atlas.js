"use strict";
// Draws the head atlas and the drawer of one head. Names and words are inserted as text, never as markup.
(() => {
  const grid = document.getElementById("atlas-grid");
  if (!grid) return;
  const byId = (id) => document.getElementById(id);
  const { layers, badges, thresholds, metric } = JSON.parse(byId("atlas-data").textContent);
  const { element } = attentionMap;
  const onImages = typeof pictureMap === "undefined" ? null : pictureMap;  // pages of models that read text have none
  const KINDS = Object.keys(badges), UNIFORM = 128;
  const SMALLEST = 15, LARGEST = 84, GAP = 2;  // pixels of a cell
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const drawer = byId("drawer"), most = Math.max(...layers.map((layer) => layer.heads));
  const rows = [], bytes = new Map();  // layer -> bytes of its pictures
  let palette = null, open = null, focused = [0, 0], example = 0, attention = null, onPicture = null;

  const has = ([layer, head]) => layer >= 0 && layer < layers.length && head >= 0 && head < layers[layer].heads;
  const cellOf = ([layer, head]) => rows[layer].cells[head];
  const rowName = (label) => label.replace(/layer (\d+)$/, "$1").trim();
  const number = (value) => (value === null || value === undefined ? "n/a"
    : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3)).replace("-", "−");

  function describe([layer, head]) {
    const { label, kinds, redundant, similar } = layers[layer], parts = [label, `head ${head}`];
    if (kinds[head]) parts.push(kinds[head]);
    if (redundant.includes(head)) parts.push("redundant");
    if (head in similar) parts.push(`similar to head ${similar[head]}`);
    return parts.join(", ");
  }

  // -- the grid ------------------------------------------------------------------------------------------------

  function build() {
    const numbers = [...Array(most).keys()].map((head) => element("span", { role: "columnheader" }, String(head)));
    grid.append(element("div", { role: "row", class: "atlas-row numbers" },
      element("span", { role: "columnheader", class: "corner" }, "layer"), ...numbers));
    layers.forEach((layer, at) => {
      const cells = [...Array(layer.heads).keys()].map((head) => cell(at, head));
      const node = element("div", { role: "row", class: "atlas-row" },
        element("span", { role: "rowheader", title: layer.label }, rowName(layer.label)), ...cells);
      rows.push({ node, cells, drawn: false });
      grid.append(node);
    });
    cellOf(focused).tabIndex = 0;
  }

  function cell(layer, head) {
    const { kinds, redundant, similar } = layers[layer], name = describe([layer, head]);
    const node = element("button", { type: "button", role: "gridcell", class: "head", tabindex: -1,
      "aria-label": name, title: name, "aria-selected": "false" });
    Object.assign(node.dataset, { layer, head });
    if (kinds[head]) node.append(element("b", { class: `badge k${KINDS.indexOf(kinds[head]) + 1}` }, badges[kinds[head]]));
    if (redundant.includes(head)) node.append(element("b", { class: "mark redundant" }));
    if (head in similar) node.append(element("b", { class: "mark similar" }));
    return node;
  }

  function resize() {
    const label = 8 + Math.min(110, 7 * Math.max(5, ...layers.map((layer) => rowName(layer.label).length)));
    const wide = (grid.clientWidth - label - 8) / most - GAP, high = Math.max(0.5 * window.innerHeight, window.innerHeight - 420) / layers.length - GAP;
    const size = Math.max(SMALLEST, Math.min(LARGEST, Math.floor(wide), Math.floor(high)));
    grid.style.setProperty("--cell", `${size}px`);
    grid.style.setProperty("--label", `${label}px`);
    grid.classList.toggle("tiny", size < 26);
  }

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => {
      const hex = style.getPropertyValue(name).trim().slice(1);
      return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
    };
    const pixels = new Uint8ClampedArray(4 * 256);  // byte 0, not visible, stays transparent
    for (let byte = 1; byte < 256; byte += 1) {
      const less = Math.round((3 * (UNIFORM - byte)) / 127), more = Math.round((9 * (byte - UNIFORM)) / 127);
      pixels.set([...read(byte < UNIFORM && less ? `--l${less}` : `--h${Math.max(0, more)}`), 255], 4 * byte);
    }
    return new Uint32Array(pixels.buffer);  // one number per pixel
  }

  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  // Bytes of all heads of a layer, and the number of rows and columns of each; null without pictures.
  function tilesOf(layer) {
    const { maps, heads } = layers[layer];
    if (!bytes.has(layer)) {
      bytes.set(layer, onImages ? onImages.tiles(layer, heads) : maps ? decode(maps) : null);
    }
    return bytes.get(layer);
  }

  function picture(layer, head, canvas) {
    const { rows: down, columns: across } = onImages || layers[layer], size = down * across, tiles = tilesOf(layer);
    palette ??= colours();
    Object.assign(canvas, { width: across, height: down });
    const context = canvas.getContext("2d"), image = context.createImageData(across, down);
    const pixels = new Uint32Array(image.data.buffer), start = head * size;
    for (let at = 0; at < size; at += 1) pixels[at] = palette[tiles[start + at]];
    context.putImageData(image, 0, 0);
    return canvas;
  }

  function draw(layer) {
    if (!tilesOf(layer)) return;
    rows[layer].cells.forEach((node, head) => {
      if (!node.canvas) node.prepend(node.canvas = element("canvas", { "aria-hidden": "true" }));
      picture(layer, head, node.canvas);
    });
    rows[layer].drawn = true;
  }

  const drawMissing = () => rows.forEach((row, layer) => { if (!row.drawn) draw(layer); });

  function redraw() {
    palette = null;
    rows.forEach((row, layer) => { if (row.drawn) draw(layer); });
    if (open) fill();
  }

  function focusCell(place) {
    cellOf(focused).tabIndex = -1;
    focused = place;
    cellOf(focused).tabIndex = 0;
  }

  const moved = ([layer, head], [down, right]) => {
    const at = [layer + down, head + right];
    return has(at) ? at : down && has([layer + down, 0]) ? [layer + down, layers[layer + down].heads - 1] : [layer, head];
  };

  // The head before or after this one in reading order.
  function beside([layer, head], step) {
    const at = [layer, head + step];
    if (has(at)) return at;
    const next = layer + step;
    return next < 0 || next >= layers.length ? [layer, head] : [next, step > 0 ? 0 : layers[next].heads - 1];
  }

  // -- the drawer ----------------------------------------------------------------------------------------------

  function show(place, { focus = false } = {}) {
    if (open) cellOf(open).setAttribute("aria-selected", "false");
    open = place;
    focusCell(place);
    cellOf(place).setAttribute("aria-selected", "true");
    drawer.hidden = false;
    document.body.classList.add("with-drawer");
    fill();
    resize();
    cellOf(place).scrollIntoView({ block: "nearest", inline: "nearest" });
    if (focus) drawer.focus({ preventScroll: true });
    history.replaceState(null, "", `#L${place[0]}H${place[1]}`);
  }

  function close() {
    if (!open) return;
    const last = open;
    cellOf(last).setAttribute("aria-selected", "false");
    open = onPicture = null;
    drawer.hidden = true;
    document.body.classList.remove("with-drawer");
    resize();
    if (/^#L\d+H\d+$/.test(location.hash)) history.replaceState(null, "", location.pathname + location.search);
    cellOf(last).focus({ preventScroll: true });
  }

  // The chosen picture or query changed: draw all visible tiles again.
  function follow() {
    bytes.clear();
    rows.forEach((row, layer) => { if (row.drawn) draw(layer); });
    if (onPicture) onPicture.update();
  }

  function fill() {
    byId("drawer-title").textContent = `${layers[open[0]].label} · head ${open[1]}`;
    const parts = [facts(), onImages ? overPicture() : onTokens(), similarities(), scores()].filter(Boolean);
    byId("drawer-body").replaceChildren(...parts);
    drawer.scrollTop = 0;
  }

  function facts() {
    const [layer, head] = open, { kinds, importance, ablation, redundant, similar, heads } = layers[layer], list = [];
    const rank = (values) => 1 + values.filter((value) => value > values[head]).length;
    if (kinds.length) list.push(["Kind", kinds[head] || "none of the known kinds"]);
    if (importance.length) {
      list.push(["Importance, first order", `${number(importance[head])}, rank ${rank(importance)} of ${heads} in its layer`]);
    }
    if (ablation.length) {
      list.push(["Output change without it", `${number(ablation[head])}, rank ${rank(ablation)} of ${heads} in its layer (${metric})`]);
    }
    if (redundant.includes(head)) {
      list.push(["Mark", ablation.length ? "redundant: the output hardly changes without it" : "looks unimportant"]);
    }
    if (head in similar) list.push(["Most similar head", `head ${similar[head]}, which attends nearly the same way`]);
    if (!list.length) return null;
    return element("dl", { class: "drawer-facts" }, ...list.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  function enlarged() {
    const label = { class: "enlarged", role: "img", "aria-label": `Attention of ${describe(open)}` };
    return picture(...open, element("canvas", label));
  }

  function overPicture() {
    const place = open;
    if (!tilesOf(place[0])) return null;
    onPicture = onImages.view(() => onImages.row(...place), () => `Attention of ${describe(place)}`);
    return element("section", {}, element("h3", {}, "Attention on the picture"), onPicture.node);
  }

  function onTokens() {
    const [layer, head] = open, stored = byId("attention");
    attention ??= stored ? JSON.parse(stored.textContent) : { layers: [], examples: [] };
    const at = attention.layers.indexOf(layers[layer].key);
    const present = attention.examples.map((each, index) => [index, each.maps[0][at]]).filter(([, maps]) => maps);
    const title = element("h3", {}, "Attention");
    if (!present.length) {
      return tilesOf(layer) ? element("section", {}, title, enlarged()) : null;
    }
    const [index, maps] = present.find(([each]) => each === example) || present[0], shown = attention.examples[index];
    const weights = attentionMap.rowsOf(shown, maps, head), top = attentionMap.peak(weights);
    const readout = element("p", { class: "drawer-readout" }, `The full colour is ${top.toFixed(3)}. Point at a cell to read it.`);
    const figure = attentionMap.onWords(shown, maps, weights, top,
      { name: `Attention of ${describe(open)}`, caption: "Rows attend to columns", data: { head } });
    figure.addEventListener("pointermove", (event) => {
      const cells = event.target.closest(".cells");
      if (!cells) return;
      const [row, column] = attentionMap.cellAt(event, cells, weights);
      readout.textContent = `“${shown.texts[maps.rows][row]}” attends to “${shown.texts[maps.columns][column]}” · ` +
        weights[row][column].toFixed(3);
    });
    const parts = [title];
    if (weights.length < layers[layer].rows) parts.push(enlarged());  // the file has only the mean over query tokens
    if (present.length > 1) parts.push(examplePicker(present.map(([each]) => each), index));
    return element("section", {}, ...parts, figure, readout);
  }

  function examplePicker(indices, selected) {
    const menu = element("select", { id: "drawer-example" }, ...indices.map((index) => {
      const words = Object.values(attention.examples[index].texts)[0].slice(0, 8).join(" ");
      return element("option", { value: index }, `${index + 1} · ${words}`);
    }));
    menu.value = String(selected);
    menu.addEventListener("change", () => {
      example = Number(menu.value);
      fill();
      byId("drawer-example").focus();
    });
    return element("p", { class: "pick" }, element("label", { for: "drawer-example" }, "Example"), menu);
  }

  function similarities() {
    const [layer, head] = open, { similarity, heads } = layers[layer];
    if (!similarity || heads < 2) return null;
    const cosine = (other) => 2 * attentionMap.unpack(similarity, head * heads + other) - 1;
    const others = [...Array(heads).keys()].filter((other) => other !== head).map((other) => [other, cosine(other)]);
    const items = others.sort((a, b) => b[1] - a[1]).map(([other, value]) => {
      const fill = element("i", { class: value < 0 ? "fill negative" : "fill" });
      fill.style.setProperty("--share", `${50 * Math.abs(value)}%`);
      const row = element("button", { type: "button", class: "bar" }, element("span", {}, `head ${other}`),
        element("span", { class: "track", "aria-hidden": "true" }, fill), element("span", { class: "value" }, value.toFixed(2).replace("-", "−")));
      row.addEventListener("click", () => show([layer, other], { focus: true }));
      return element("li", {}, row);
    });
    return element("section", {}, element("h3", {}, "Similarity to the other heads of the layer"),
      element("p", { class: "key" }, "Cosine of attention logits: 1 the same function, 0 unrelated, −1 opposite."),
      element("ul", { class: "cosines" }, ...items));
  }

  function scores() {
    const [layer, head] = open, all = Object.entries(layers[layer].scores);
    if (!all.length) return null;
    const cells = all.map(([kind, values]) => element("tr", {}, element("th", { scope: "row" }, kind),
      element("td", {}, number(values[head])), element("td", {}, number(thresholds[kind]))));
    const titles = ["kind", "score", "needed"].map((name) => element("th", { scope: "col" }, name));
    return element("section", {}, element("h3", {}, "Kinds of heads"),
      element("p", { class: "key" }, "Share of attention on generated tokens that follows the pattern of each kind."),
      element("table", { class: "sheet" }, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...cells)));
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
    const ends = { Home: [focused[0], 0], End: [focused[0], layers[focused[0]].heads - 1] };
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
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  if (onImages) onImages.listen(follow);
  build();
  resize();
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
    const layer = rows.findIndex(({ node }) => node === entry.target);
    if (entry.isIntersecting && !rows[layer].drawn) draw(layer);
  }), { rootMargin: "200px" });
  rows.forEach(({ node }) => watcher.observe(node));
  readHash();
})();
