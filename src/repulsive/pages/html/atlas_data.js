"use strict";
// Data of the head atlas, and the colours of its pictures. A page that compares two models has two sides.
const atlasData = (() => {
  const stored = document.getElementById("atlas-data");
  if (!stored) return null;
  const { layers, after, columns, badges, thresholds, metric } = JSON.parse(stored.textContent);
  const onImages = typeof pictureMap === "undefined" ? null : pictureMap;  // only pages about pictures have it
  const sides = after ? [layers, after] : [layers], SIDES = ["before", "after"], UNIFORM = 128;
  const bytes = new Map();  // "side layer" -> bytes of all heads
  let palette = null;

  // Head of one side in a column of the atlas; null if that model does not have this head.
  const own = (side, layer, column) => (columns ? columns[layer][column][side] : column);
  const columnsOf = (layer) => (columns ? columns[layer].length : layers[layer].heads);
  const columnOf = (side, layer, head) => (columns ? columns[layer].findIndex((each) => each[side] === head) : head);
  const number = (value) => (value === null || value === undefined ? "n/a"
    : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3)).replace("-", "−");

  // "removed", "added" or "": whether only one of two models has the head of a column.
  function status(layer, column) {
    if (!columns) return "";
    const [first, second] = columns[layer][column];
    return second === null ? "removed" : first === null ? "added" : "";
  }

  function marks(side, layer, column) {
    const head = own(side, layer, column), { kinds, redundant, similar } = sides[side][layer];
    if (head === null) return [];
    const parts = kinds[head] ? [kinds[head]] : [];
    if (redundant.includes(head)) parts.push("redundant");
    if (head in similar) parts.push(`similar to head ${similar[head]}`);
    return parts;
  }

  function describe([layer, column]) {
    const parts = [layers[layer].label, `head ${column}`], state = status(layer, column);
    if (state) parts.push(state);
    sides.forEach((_, side) => {
      const own = marks(side, layer, column);
      if (own.length) parts.push(after ? `${SIDES[side]}: ${own.join(", ")}` : own.join(", "));
    });
    return parts.join(", ");
  }

  function readPalette() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => {
      const hex = style.getPropertyValue(name).trim().slice(1);
      return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
    };
    const shades = new Map(), pixels = new Uint8ClampedArray(4 * 256);  // byte 0, not visible, stays transparent
    const shade = (name) => shades.get(name) || shades.set(name, read(name)).get(name);
    for (let byte = 1; byte < 256; byte += 1) {
      const less = Math.round((3 * (UNIFORM - byte)) / 127), more = Math.round((9 * (byte - UNIFORM)) / 127);
      pixels.set([...shade(byte < UNIFORM && less ? `--l${less}` : `--h${Math.max(0, more)}`), 255], 4 * byte);
    }
    const [ground] = new Uint32Array(new Uint8ClampedArray([...read("--ground"), 255]).buffer);
    return { shades: new Uint32Array(pixels.buffer), ground };  // one number per pixel
  }

  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

  // Bytes of all heads of a layer; null without pictures.
  function tiles(side, layer) {
    const key = `${side} ${layer}`, { maps, heads } = sides[side][layer];
    if (!bytes.has(key)) bytes.set(key, onImages ? onImages.tiles(side, layer, heads) : maps ? decode(maps) : null);
    return bytes.get(key);
  }

  // Draw the heads of some columns of a layer side by side, without gaps. A missing head becomes a plain tile.
  function paint(canvas, side, layer, shown) {
    const { rows: down, columns: across } = onImages || sides[side][layer], stored = tiles(side, layer);
    palette ??= readPalette();
    const { shades, ground } = palette, width = across * shown.length;
    Object.assign(canvas, { width, height: down });
    const context = canvas.getContext("2d"), image = context.createImageData(width, down);
    const pixels = new Uint32Array(image.data.buffer);
    shown.forEach((column, place) => {
      const head = own(side, layer, column), start = head * down * across;
      for (let r = 0; r < down; r += 1) {
        const to = r * width + place * across, from = start + r * across;
        if (head === null) pixels.fill(ground, to, to + across);
        else for (let c = 0; c < across; c += 1) pixels[to + c] = shades[stored[from + c]];
      }
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }

  return { layers, sides, SIDES, columns, columnsOf, columnOf, badges, thresholds, metric, onImages, own, status, marks, describe, number,
    tiles, paint, forgetColours: () => { palette = null; }, forgetTiles: () => bytes.clear() };
})();
