"use strict";
// Decodes packed attention and draws it on tokens, for the explorer and the atlas. Words are inserted as text.
const attentionMap = (() => {
  const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const CODE = Object.fromEntries([...ALPHABET].map((letter, index) => [letter, index]));
  const MAX_LETTERS = 16;  // of a word
  const MEAN = "mean";

  const level = (weight, top) => (top > 0 ? Math.floor(9.5 * Math.sqrt(Math.min(1, weight / top))) : 0);
  const widthOf = (word) => [...word].reduce((sum, letter) => sum + (letter >= "\u1100" ? 12.5 : 7.5), 0);  // pixels, upper bound
  const short = (word) => ([...word].length > MAX_LETTERS ? `${[...word].slice(0, MAX_LETTERS - 1).join("")}…` : word);
  const headName = (head) => (head === MEAN ? "mean over heads" : `head ${head}`);

  function element(name, attributes = {}, ...children) {
    const isSvg = ["svg", "g", "path", "rect", "text"].includes(name);
    const node = isSvg ? document.createElementNS(document.getElementById("empty").namespaceURI, name)
      : document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, String(value)));
    node.append(...children);
    return node;
  }

  // Decode one packed number between 0 and 1.
  const unpack = (text, index) => (64 * CODE[text[2 * index]] + CODE[text[2 * index + 1]]) / 4095;

  // Decode the attention of one head of an example, or the mean over all heads, as rows of weights.
  function rowsOf(example, maps, head) {
    const rows = example.texts[maps.rows].length, columns = example.texts[maps.columns].length;
    const heads = head === MEAN ? [...Array(maps.heads).keys()] : [head];
    return [...Array(rows).keys()].map((row) => [...Array(columns).keys()].map((column) =>
      heads.reduce((sum, one) => sum + unpack(maps.weights, (one * rows + row) * columns + column), 0) / heads.length));
  }

  const peak = (rows) => rows.reduce((max, row) => Math.max(max, ...row), 0);

  function cells(rows, top) {
    const paths = Array(10).fill("");
    rows.forEach((row, r) => row.forEach((weight, c) => { paths[level(weight, top)] += `M${c} ${r}.5h.9`; }));
    return paths.flatMap((d, step) => (step && d ? [element("path", { class: `h${step}`, d })] : []));
  }

  // Draw a map with the words of its rows and columns. `data` goes to the data attributes of its cells.
  function onWords(example, maps, rows, top, { name, caption, data }) {
    const down = example.texts[maps.rows].map(short), across = example.texts[maps.columns].map(short);
    const cell = Math.min(16, Math.max(11, 460 / across.length));
    const side = 12 + Math.max(...down.map(widthOf)), above = 10 + Math.max(...across.map(widthOf));
    const height = above + down.length * cell + 2, width = across.length * cell + 2;
    const words = across.map((word, c) => element("text", { class: "word",
      transform: `translate(${(c + 0.5) * cell + 3.5} ${above - 6}) rotate(-90)` }, word));
    const queries = down.map((word, r) => element("text", { class: "row", x: side - 6,
      y: above + (r + 0.5) * cell + 3.5 }, word));
    const grid = element("g", { class: "cells", transform: `translate(.5 ${above}) scale(${cell})` },
      element("rect", { class: "touch", width: across.length, height: down.length }), ...cells(rows, top));
    Object.assign(grid.dataset, data);
    const peaks = rows.slice(0, 40).map((row, r) => `${down[r]} → ${across[row.indexOf(Math.max(...row))]}`).join(", ");
    const box = (wide) => ({ width: wide.toFixed(0), height: height.toFixed(0), viewBox: `0 0 ${wide} ${height}` });
    const region = { class: "maps", role: "region", tabindex: 0, "aria-label": name };
    return element("figure", { class: "alone" },
      element("figcaption", {}, caption + (maps.rows === maps.columns ? "" : `: ${maps.rows} attends to ${maps.columns}`)),
      element("div", region,
        element("svg", { class: "side", ...box(side), "aria-hidden": "true" }, ...queries),
        element("svg", { ...box(width), role: "img", "aria-label": `Each token attends most to: ${peaks}` },
          element("rect", { class: "ground", x: 0, y: above, width: width - 2, height: down.length * cell }),
          ...words, grid)));
  }

  // Find the cell of a map under the pointer: [row, column].
  function cellAt(event, grid, rows) {
    const box = grid.querySelector(".touch").getBoundingClientRect();
    const inside = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    return [inside((event.clientY - box.top) / box.height, rows.length),
      inside((event.clientX - box.left) / box.width, rows[0].length)];
  }

  return { MEAN, headName, element, unpack, rowsOf, peak, cells, onWords, cellAt };
})();
