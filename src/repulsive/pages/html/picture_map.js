"use strict";
// Draws attention over pictures. Names are inserted as text, never as markup.
const pictureMap = (() => {
  const stored = document.getElementById("picture-data");
  if (!stored) return null;
  const byId = (id) => document.getElementById(id);
  const { rows, columns, special, lowest, block, images } = JSON.parse(stored.textContent);
  const { element } = attentionMap;
  const patches = rows * columns, keys = special.length + patches, highest = Math.log2(Math.max(2, keys));
  const across = block ? Math.ceil(columns / block) : 0, down = block ? Math.ceil(rows / block) : 0;
  const queries = 1 + special.length + across * down, MEAN = 0;
  // Dark to bright, easy to see on photographs: [share of the peak, red, green, blue].
  const RAMP = [[0, 0, 0, 0], [0.25, 95, 15, 120], [0.5, 215, 50, 90], [0.75, 250, 145, 40], [1, 255, 250, 150]];
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const state = { image: 0, query: special[0] === "class" ? 1 : MEAN, strength: 75 };
  const listeners = [], bytes = new Map();

  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const exponent = (byte) => lowest + ((byte - 1) / 254) * (highest - lowest);  // log2 of the ratio to uniform
  const weight = (byte) => (byte ? 2 ** exponent(byte) / keys : 0);
  const tokenName = (name) => (/\d$/.test(name) ? name : `${name} token`);
  const isBlock = (query) => query > special.length;
  const blockAt = (query) => [Math.floor((query - 1 - special.length) / across), (query - 1 - special.length) % across];

  // Bytes of one head for the chosen picture and query: special tokens, then patches. Layer -1 is the rollout.
  function row(side, layer, head) {
    const name = `${side} ${state.image} ${layer}`, image = images[state.image].sides[side];
    const text = layer < 0 ? image.rollout : image.layers[layer];
    if (!text) return null;
    if (!bytes.has(name)) bytes.set(name, decode(text));
    const start = (head * queries + state.query) * keys;
    return bytes.get(name).subarray(start, start + keys);
  }

  function queryName(query = state.query) {
    if (query === MEAN) return "mean over patches";
    if (!isBlock(query)) return tokenName(special[query - 1]);
    const [r, c] = blockAt(query), side = (at, size) => {
      const first = at * block, last = Math.min(first + block, size) - 1;
      return first === last ? `${first}` : `${first} to ${last}`;
    };
    return `patch in row ${side(r, rows)}, column ${side(c, columns)}`;
  }

  function colour(share) {
    const at = Math.max(1, RAMP.findIndex(([stop]) => stop >= share)), [low, ...from] = RAMP[at - 1], [high, ...to] = RAMP[at];
    return from.map((value, i) => value + ((share - low) / (high - low)) * (to[i] - value));
  }

  function paint(canvas, weights) {
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    const top = Math.max(...weights.subarray(special.length)) || 1;
    weights.subarray(special.length).forEach((value, at) => {
      const share = Math.sqrt(value / top);
      image.data.set([...colour(share), 255 * (0.45 + 0.55 * share) * (state.strength / 100)], 4 * at);
    });
    context.putImageData(image, 0, 0);
    return top;
  }

  const short = (value) => (value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toPrecision(2));

  function choose(changes) {
    Object.assign(state, changes);
    listeners.forEach((listener) => listener(changes));
  }

  // A picture with a map over it. `read` returns the bytes of the map; `describe` names it; `changed` gets its peak.
  function view(read, describe, changed = () => {}) {
    const picture = element("img", { alt: "", width: 16 * columns, height: 16 * rows });
    const canvas = element("canvas", { width: columns, height: rows, "aria-hidden": "true" });
    const mark = element("span", { class: "query", "aria-hidden": "true" });
    const frame = element("div", { class: "picture", tabindex: 0, role: "application",
      "aria-roledescription": "picture with attention" }, picture, canvas, mark);
    const readout = element("p", { class: "drawer-readout" }), tokens = element("p", { class: "key" });
    frame.style.setProperty("aspect-ratio", `${columns} / ${rows}`);
    let values = null;

    function update() {
      const stored = read();
      values = stored ? Float64Array.from(stored, weight) : new Float64Array(keys);
      picture.src = images[state.image].source;
      const top = paint(canvas, values), held = values.subarray(special.length).reduce((sum, value) => sum + value, 0);
      changed(top);
      frame.setAttribute("aria-label", `${describe()} over ${images[state.image].name}, query: ${queryName()}. Arrow keys choose a patch.`);
      readout.textContent = `Query: ${queryName()}. The full colour is ${short(top)}.`;
      const shares = special.map((name, at) => `${tokenName(name)} ${short(values[at])}`);
      tokens.textContent = special.length ? `Attention to all patches ${short(held)}, ${shares.join(", ")}.` : "";
      mark.hidden = !isBlock(state.query);
      if (isBlock(state.query)) {
        const [r, c] = blockAt(state.query), percent = (value, size) => `${(100 * value) / size}%`;
        mark.style.setProperty("top", percent(r * block, rows));
        mark.style.setProperty("left", percent(c * block, columns));
        mark.style.setProperty("height", percent(Math.min(block, rows - r * block), rows));
        mark.style.setProperty("width", percent(Math.min(block, columns - c * block), columns));
      }
    }

    function patchAt(event) {
      const box = frame.getBoundingClientRect(), inside = (share, size) => Math.min(size - 1, Math.max(0, Math.floor(share * size)));
      return [inside((event.clientY - box.top) / box.height, rows), inside((event.clientX - box.left) / box.width, columns)];
    }

    frame.addEventListener("click", (event) => {
      if (!block) return;
      const [r, c] = patchAt(event);
      choose({ query: 1 + special.length + Math.floor(r / block) * across + Math.floor(c / block) });
    });
    frame.addEventListener("pointermove", (event) => {
      const [r, c] = patchAt(event);
      readout.textContent = `${queryName()} → patch in row ${r}, column ${c} · ${short(values[special.length + r * columns + c])}`;
    });
    frame.addEventListener("keydown", (event) => {
      if (!(event.key in MOVES) || !block || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      const [r, c] = isBlock(state.query) ? blockAt(state.query) : [Math.floor(down / 2), Math.floor(across / 2)];
      const step = isBlock(state.query) ? MOVES[event.key] : [0, 0];
      const to = [Math.min(down - 1, Math.max(0, r + step[0])), Math.min(across - 1, Math.max(0, c + step[1]))];
      choose({ query: 1 + special.length + to[0] * across + to[1] });
    });
    update();
    return { node: element("figure", { class: "on-picture" }, frame, readout, tokens), update };
  }

  function controls() {
    const parts = [];
    if (images.length > 1) {
      const menu = element("select", { id: "picture-pick" }, ...images.map(({ name }, at) => element("option", { value: at }, name)));
      menu.addEventListener("change", () => choose({ image: Number(menu.value) }));
      parts.push(element("div", { class: "pick one" }, element("label", { for: "picture-pick" }, "Picture"), menu));
    }
    const names = [...special.map((name, at) => [tokenName(name), at + 1]), ["mean over patches", MEAN]];
    const buttons = names.map(([name, query]) => {
      const input = element("input", { type: "radio", name: "query", value: query });
      input.addEventListener("change", () => choose({ query }));
      return element("label", {}, input, element("span", {}, name));
    });
    parts.push(element("fieldset", { class: "chips" }, element("legend", {}, "Query"), ...buttons));
    const strength = element("input", { type: "range", id: "picture-strength", min: 0, max: 100, value: state.strength });
    strength.addEventListener("input", () => choose({ strength: Number(strength.value) }));
    parts.push(element("div", { class: "choose" }, element("label", { for: "picture-strength" }, "Strength of the colours"), strength));
    listeners.push(() => document.querySelectorAll("input[name=query]").forEach((input) => {
      input.checked = Number(input.value) === state.query;
    }));
    return parts;
  }

  // Bytes of all heads of a layer in the colours of the atlas, for the chosen picture and query; null without a map.
  function tiles(side, layer, heads) {
    const result = new Uint8Array(heads * patches);
    for (let head = 0; head < heads; head += 1) {
      const stored = row(side, layer, head);
      if (!stored) return null;
      stored.subarray(special.length).forEach((byte, at) => {
        const steps = byte ? Math.min(4, Math.max(-4, exponent(byte))) : -4;
        result[head * patches + at] = Math.max(1, Math.round(128 + steps * 31.75));
      });
    }
    return result;
  }

  function start() {
    const peaks = [];
    images[0].sides.forEach((_, side, all) => {
      const rollout = view(() => row(side, -1, 0), () => "Attention rollout", (top) => {
        peaks[side] = short(top);
        byId("picture-top").textContent = peaks.join(" and ");
      });
      if (all.length > 1) byId("picture-stage").append(element("h3", {}, ["Before", "After"][side]));
      byId("picture-stage").append(rollout.node);
      listeners.push(rollout.update);
    });
    byId("picture-controls").append(...controls());
    ["picture-controls", "picture-stage"].forEach((id) => { byId(id).hidden = false; });
    choose({});
  }

  start();
  return { rows, columns, row, tiles, view, queryName, listen: (listener) => listeners.push(listener) };
})();
