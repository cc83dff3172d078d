"use strict";
// Fills the drawer with the details of one head. Names and words are inserted as text, never as markup.
const drawerContent = (() => {
  if (!atlasData) return null;
  const { layers, sides, SIDES, columnOf, own, status, describe, number, thresholds, metric, onImages } = atlasData;
  const byId = (id) => document.getElementById(id), { element } = attentionMap, compares = sides.length > 1;
  let place = null, select = () => {}, example = 0, attention = null, views = [];

  // Sides that have the head of a column, as [side, head].
  const present = () => sides.map((_, side) => [side, own(side, ...place)]).filter(([, head]) => head !== null);
  const arrow = (values) => [...new Set(values)].join(" → ");
  const inSides = (read) => sides.map((side, at) => {
    const head = own(at, ...place);
    return head === null ? "none" : read(side[place[0]], head, at);
  });

  function facts() {
    const [layer, column] = place, list = [], state = status(layer, column);
    const some = (name) => sides.some((side) => side[layer][name].length);
    const rank = (values, head) => `${number(values[head])}, rank ${1 + values.filter((value) => value > values[head]).length} of ${values.length}`;
    if (state) list.push(["Change", state === "removed" ? "this head is removed" : "this head is new"]);
    if (compares && !state && own(1, layer, column) !== own(0, layer, column)) {
      list.push(["Number of the head", arrow(inSides((_, head) => String(head)))]);
    }
    if (some("kinds")) list.push(["Kind", arrow(inSides(({ kinds }, head) => kinds[head] || "none of the known kinds"))]);
    if (some("importance")) {
      list.push(["Importance, first order", `${arrow(inSides(({ importance }, head) => rank(importance, head)))} in its layer`]);
    }
    if (some("ablation")) {
      list.push(["Output change without it", `${arrow(inSides(({ ablation }, head) => rank(ablation, head)))} in its layer (${metric})`]);
    }
    if (sides.some((side, at) => side[layer].redundant.includes(own(at, layer, column)))) {
      const meaning = some("ablation") ? "redundant: the output hardly changes without it" : "looks unimportant";
      list.push(["Mark", arrow(inSides(({ redundant }, head) => (redundant.includes(head) ? meaning : "none")))]);
    }
    if (sides.some((side, at) => own(at, layer, column) in side[layer].similar)) {
      list.push(["Most similar head", arrow(inSides(({ similar }, head) =>
        (head in similar ? `head ${similar[head]}, which attends nearly the same way` : "none attends nearly the same way")))]);
    }
    if (!list.length) return null;
    return element("dl", { class: "drawer-facts" }, ...list.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  const sideTitle = (side) => (compares ? [element("h4", {}, SIDES[side])] : []);

  function enlarged(side) {
    const label = { class: "enlarged", role: "img", "aria-label": `Attention of ${describe(place)}` };
    return atlasData.paint(element("canvas", label), side, place[0], [place[1]]);
  }

  function overPicture() {
    const [layer] = place, shown = present().filter(([side]) => atlasData.tiles(side, layer));
    views = shown.map(([side, head]) => onImages.view(() => onImages.row(side, layer, head), () => `Attention of ${describe(place)}`));
    if (!shown.length) return null;
    return element("section", {}, element("h3", {}, "Attention on the picture"),
      ...views.flatMap((view, at) => [...sideTitle(shown[at][0]), view.node]));
  }

  function onTokens() {
    const [layer] = place, stored = byId("attention"), title = element("h3", {}, "Attention");
    attention ??= stored ? JSON.parse(stored.textContent) : { layers: [], examples: [] };
    const at = attention.layers.indexOf(layers[layer].key);
    const usable = attention.examples.map((each, index) => [index, each.maps.map((maps) => maps[at])]).filter(([, maps]) => maps.some(Boolean));
    if (!usable.length) {
      const drawn = present().filter(([side]) => atlasData.tiles(side, layer)).flatMap(([side]) => [...sideTitle(side), enlarged(side)]);
      return drawn.length ? element("section", {}, title, ...drawn) : null;
    }
    const [index, ofSides] = usable.find(([each]) => each === example) || usable[0], shown = attention.examples[index];
    const parts = [title];
    if (usable.length > 1) parts.push(examplePicker(usable.map(([each]) => each), index));
    present().forEach(([side, head]) => {
      if (ofSides[side]) parts.push(...sideTitle(side), ...map(shown, ofSides[side], side, head));
    });
    return element("section", {}, ...parts);
  }

  function map(shown, maps, side, head) {
    const weights = attentionMap.rowsOf(shown, maps, head), top = attentionMap.peak(weights);
    const readout = element("p", { class: "drawer-readout" }, `The full colour is ${top.toFixed(3)}. Point at a cell to read it.`);
    const name = `Attention of ${describe(place)}${compares ? `, ${SIDES[side]}` : ""}`;
    const figure = attentionMap.onWords(shown, maps, weights, top, { name, caption: "Rows attend to columns", data: { head } });
    figure.addEventListener("pointermove", (event) => {
      const cells = event.target.closest(".cells");
      if (!cells) return;
      const [row, column] = attentionMap.cellAt(event, cells, weights);
      readout.textContent = `“${shown.texts[maps.rows][row]}” attends to “${shown.texts[maps.columns][column]}” · ` +
        weights[row][column].toFixed(3);
    });
    const coarse = weights.length < sides[side][place[0]].rows;  // the file has only the mean over query tokens
    return coarse ? [enlarged(side), figure, readout] : [figure, readout];
  }

  function examplePicker(indices, selected) {
    const menu = element("select", { id: "drawer-example" }, ...indices.map((index) => {
      const words = Object.values(attention.examples[index].texts)[0].slice(0, 8).join(" ");
      return element("option", { value: index }, `${index + 1} · ${words}`);
    }));
    menu.value = String(selected);
    menu.addEventListener("change", () => {
      example = Number(menu.value);
      fill(place);
      byId("drawer-example").focus();
    });
    return element("p", { class: "pick" }, element("label", { for: "drawer-example" }, "Example"), menu);
  }

  function similarities() {
    const [layer] = place, cosines = new Map();  // column of another head -> its cosine on each side
    present().forEach(([side, head]) => {
      const { similarity, heads } = sides[side][layer];
      if (!similarity) return;
      [...Array(heads).keys()].filter((other) => other !== head).forEach((other) => {
        const column = columnOf(side, layer, other);
        if (!cosines.has(column)) cosines.set(column, [null, null]);
        cosines.get(column)[side] = 2 * attentionMap.unpack(similarity, head * heads + other) - 1;
      });
    });
    if (!cosines.size) return null;
    const largest = (values) => Math.max(...values.filter((value) => value !== null));
    const bar = (value, side) => {
      const fill = element("i", { class: `fill${value < 0 ? " negative" : ""}${compares ? ` half${side}` : ""}` });
      fill.style.setProperty("--share", `${50 * Math.abs(value)}%`);
      return fill;
    };
    const text = (value) => (value === null ? "none" : value.toFixed(2).replace("-", "−"));
    const items = [...cosines].sort((a, b) => largest(b[1]) - largest(a[1])).map(([column, values]) => {
      const shown = compares ? values : values.slice(0, 1);
      const row = element("button", { type: "button", class: compares ? "bar two" : "bar" }, element("span", {}, `head ${column}`),
        element("span", { class: "track", "aria-hidden": "true" }, ...shown.flatMap((value, side) => (value === null ? [] : [bar(value, side)]))),
        element("span", { class: "value" }, arrow(shown.map(text))));
      row.addEventListener("click", () => select([layer, column]));
      return element("li", {}, row);
    });
    return element("section", {}, element("h3", {}, "Similarity to the other heads of the layer"),
      element("p", { class: "key" }, "Cosine of attention logits: 1 the same function, 0 unrelated, −1 opposite.",
        ...(compares ? [" Upper bar: before. Lower bar: after."] : [])),
      element("ul", { class: "cosines" }, ...items));
  }

  function scores() {
    const kinds = Object.keys(layers[place[0]].scores);
    if (!kinds.length) return null;
    const cells = kinds.map((kind) => element("tr", {}, element("th", { scope: "row" }, kind),
      element("td", {}, arrow(inSides(({ scores: own }, head) => number((own[kind] || [])[head])))), element("td", {}, number(thresholds[kind]))));
    const titles = ["kind", "score", "needed"].map((name) => element("th", { scope: "col" }, name));
    return element("section", {}, element("h3", {}, "Kinds of heads"),
      element("p", { class: "key" }, "Share of attention on generated tokens that follows the pattern of each kind."),
      element("table", { class: "sheet" }, element("thead", {}, element("tr", {}, ...titles)), element("tbody", {}, ...cells)));
  }

  // Show the head at `[layer, column]`; `chosen` is called with the place of another head that the reader selects.
  function fill(at, chosen = select) {
    [place, select, views] = [at, chosen, []];
    byId("drawer-title").textContent = `${layers[at[0]].label} · head ${at[1]}`;
    const parts = [facts(), onImages ? overPicture() : onTokens(), similarities(), scores()].filter(Boolean);
    byId("drawer-body").replaceChildren(...parts);
    byId("drawer").scrollTop = 0;
  }

  return { fill, update: () => views.forEach((view) => view.update()) };
})();
