
"use strict";
// Selects which part of the page is visible. All words are already in the page; the data contains numbers only.
(() => {
  const explorer = document.getElementById("explorer");
  if (!explorer) return;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("attention").textContent);
  const examples = [...explorer.querySelectorAll(".example")];
  const pick = byId("pick"), slider = byId("head"), readout = byId("readout");
  const views = [...explorer.querySelectorAll("input[name=view]")];
  const runs = [...explorer.querySelectorAll("input[name=runs]")];
  const state = { example: 1, view: "overall", head: 0, runs: [] };  // empty: all methods

  const clamp = (text, max, min = 1) => Math.min(max, Math.max(min, Math.trunc(Number(text)) || min));
  const level = (weight, top) => (top > 0 ? Math.floor(9.5 * Math.sqrt(Math.min(1, weight / top))) : 0);
  const methodName = (card) => card.querySelector("h3").textContent;

  function readHash() {
    const hash = new URLSearchParams(location.hash.slice(1));
    state.example = clamp(hash.get("example"), examples.length);
    state.head = clamp(hash.get("head"), Number(slider.max), 0);
    state.view = views.some((view) => view.value === hash.get("view")) ? hash.get("view") : "overall";
    state.runs = (hash.get("runs") || "").split(",").filter((run) => runs.some((box) => box.value === run));
  }

  function writeHash() {
    const head = state.view === "head" ? `&head=${state.head}` : "";
    const selected = state.runs.length ? `&runs=${state.runs.join(",")}` : "";
    history.replaceState(null, "", `#example=${state.example}&view=${state.view}${head}${selected}`);
  }

  // Colour the words of a card by the attention of the selected head, or by their initial colours: the mean over heads.
  function paint(card, rows, top) {
    const words = [...card.querySelectorAll(".w")], peaks = card.querySelector(".peaks");
    peaks.dataset.overall ??= peaks.textContent;
    const row = state.view === "head" ? rows[state.head] || [] : null;
    words.forEach((word, index) => {
      word.dataset.step ??= word.className.match(/\bh\d\b/)[0];
      const step = row ? `h${level((row[index] || 0) / 1000, top)}` : word.dataset.step;
      word.className = word.className.replace(/\bh\d\b/, step);
    });
    peaks.textContent = row ? describeHead(row, rows.length, words) : peaks.dataset.overall;
  }

  function describeHead(row, count, words) {
    if (!row.length) return `no head ${state.head}: this method has ${count} head${count === 1 ? "" : "s"}`;
    const peak = Math.max(...row);
    if (!peak) return `head ${state.head} has no attention`;
    const word = words[row.indexOf(peak)].textContent;
    return `head ${state.head}, peak on “${word}” (${(peak / 1000).toFixed(3)})`;
  }

  function show() {
    examples.forEach((example, index) => { example.open = index + 1 === state.example; });
    explorer.dataset.view = state.view;
    pick.value = String(state.example);
    byId("previous").disabled = state.example === 1;
    byId("next").disabled = state.example === examples.length;
    views.forEach((view) => { view.checked = view.value === state.view; });
    byId("choose").hidden = state.view !== "head";
    slider.value = String(state.head);
    byId("chosen").textContent = String(state.head);
    const { maps, top } = data[state.example - 1], shown = (run) => !state.runs.length || state.runs.includes(run);
    runs.forEach((run) => { run.checked = shown(run.value); });
    examples[state.example - 1].querySelectorAll("[data-run]").forEach((part) => { part.hidden = !shown(part.dataset.run); });
    examples[state.example - 1].querySelectorAll(".card").forEach((card, index) => paint(card, maps[index], top));
  }

  function update(changes) {
    Object.assign(state, changes);
    show();
    writeHash();
  }

  // Find the map cell under the pointer: method, head, word.
  function cellAt(event) {
    const grid = event.target.closest(".cells[data-order]");
    if (!grid) return null;
    const box = grid.querySelector(".touch").getBoundingClientRect();
    const order = grid.dataset.order.split(","), method = Number(grid.dataset.method);
    const row = Math.floor(((event.clientY - box.top) / box.height) * order.length);
    const { maps } = data[state.example - 1], head = Number(order[Math.min(row, order.length - 1)]);
    const count = maps[method][head].length;
    const word = Math.min(count - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * count)));
    return { method, head, word, weight: maps[method][head][word] };
  }

  function readCell(event) {
    const cell = cellAt(event);
    if (!cell) return;
    const card = examples[state.example - 1].querySelectorAll(".card")[cell.method];
    const word = card.querySelectorAll(".w")[cell.word].textContent;
    readout.textContent = `${methodName(card)} · head ${cell.head} · “${word}” · ${(cell.weight / 1000).toFixed(3)}`;
  }

  function readWord(event) {
    const card = event.target.closest(".card");
    if (!card || !event.target.classList.contains("w")) return;
    const rows = data[state.example - 1].maps[[...card.parentNode.children].indexOf(card)];
    const index = [...card.querySelectorAll(".w")].indexOf(event.target);
    const mean = rows.reduce((sum, row) => sum + row[index], 0) / rows.length;
    const head = state.view === "head" && rows[state.head];
    const [name, weight] = head ? [`head ${state.head}`, head[index]] : ["mean over heads", mean];
    readout.textContent = `${methodName(card)} · ${name} · “${event.target.textContent}” · ${(weight / 1000).toFixed(3)}`;
  }

  pick.addEventListener("change", () => update({ example: Number(pick.value) }));
  byId("previous").addEventListener("click", () => update({ example: clamp(state.example - 1, examples.length) }));
  byId("next").addEventListener("click", () => update({ example: clamp(state.example + 1, examples.length) }));
  views.forEach((view) => view.addEventListener("change", () => update({ view: view.value })));
  runs.forEach((run) => run.addEventListener("change", () => {
    const selected = runs.filter((box) => box.checked).map((box) => box.value);
    update({ runs: selected.length === runs.length ? [] : selected });
  }));
  slider.addEventListener("input", () => update({ head: Number(slider.value) }));
  explorer.addEventListener("pointermove", readCell);
  explorer.addEventListener("pointerover", readWord);
  explorer.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) update({ view: "head", head: cell.head });
  });
  window.addEventListener("hashchange", () => { readHash(); show(); });

  document.documentElement.classList.add("js");
  byId("controls").hidden = false;
  readout.hidden = false;
  readHash();
  show();
})();
