
"use strict";
// Chooses what of the page is shown. All words are in the page already; from the data it takes numbers alone.
(() => {
  const explorer = document.getElementById("explorer");
  if (!explorer) return;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("attention").textContent);
  const examples = [...explorer.querySelectorAll(".example")];
  const pick = byId("pick"), slider = byId("head"), readout = byId("readout");
  const views = [...explorer.querySelectorAll("input[name=view]")];
  const runs = [...explorer.querySelectorAll("input[name=runs]")];
  const state = { example: 1, view: "overall", head: 1, runs: [] };  // no runs: all of them

  const within = (text, most) => Math.min(most, Math.max(1, Math.trunc(Number(text)) || 1));
  const level = (weight, top) => (top > 0 ? Math.floor(9.5 * Math.sqrt(Math.min(1, weight / top))) : 0);
  const methodName = (card) => card.querySelector("h3").textContent;

  function readHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    state.example = within(given.get("example"), examples.length);
    state.head = within(given.get("head"), Number(slider.max));
    state.view = views.some((view) => view.value === given.get("view")) ? given.get("view") : "overall";
    state.runs = (given.get("runs") || "").split(",").filter((run) => runs.some((one) => one.value === run));
  }

  function writeHash() {
    const head = state.view === "head" ? `&head=${state.head}` : "";
    const chosen = state.runs.length ? `&runs=${state.runs.join(",")}` : "";
    history.replaceState(null, "", `#example=${state.example}&view=${state.view}${head}${chosen}`);
  }

  // Words of a card in the colours of one head, or in those they came with: the mean over heads.
  function paint(card, rows, top) {
    const words = [...card.querySelectorAll(".w")], peaks = card.querySelector(".peaks");
    peaks.dataset.overall ??= peaks.textContent;
    const row = state.view === "head" ? rows[state.head - 1] || [] : null;
    words.forEach((word, place) => {
      word.dataset.step ??= word.className.match(/\bh\d\b/)[0];
      const step = row ? `h${level((row[place] || 0) / 1000, top)}` : word.dataset.step;
      word.className = word.className.replace(/\bh\d\b/, step);
    });
    peaks.textContent = row ? describeHead(row, rows.length, words) : peaks.dataset.overall;
  }

  function describeHead(row, count, words) {
    if (!row.length) return `no head ${state.head}: this method has ${count}`;
    const peak = Math.max(...row);
    if (!peak) return `head ${state.head} of ${count} gives no attention`;
    const word = words[row.indexOf(peak)].textContent;
    return `head ${state.head} of ${count}, peak on “${word}” (${(peak / 1000).toFixed(3)})`;
  }

  function show() {
    examples.forEach((example, place) => { example.open = place + 1 === state.example; });
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
    examples[state.example - 1].querySelectorAll(".card").forEach((card, place) => paint(card, maps[place], top));
  }

  function change(news) {
    Object.assign(state, news);
    show();
    writeHash();
  }

  // The cell of the grid under the pointer: method, head, word.
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
    readout.textContent = `${methodName(card)} · head ${cell.head + 1} · “${word}” · ${(cell.weight / 1000).toFixed(3)}`;
  }

  function readWord(event) {
    const card = event.target.closest(".card");
    if (!card || !event.target.classList.contains("w")) return;
    const rows = data[state.example - 1].maps[[...card.parentNode.children].indexOf(card)];
    const place = [...card.querySelectorAll(".w")].indexOf(event.target);
    const overall = rows.reduce((sum, row) => sum + row[place], 0) / rows.length;
    const one = state.view === "head" && rows[state.head - 1];
    const [name, weight] = one ? [`head ${state.head}`, one[place]] : ["overall", overall];
    readout.textContent = `${methodName(card)} · ${name} · “${event.target.textContent}” · ${(weight / 1000).toFixed(3)}`;
  }

  pick.addEventListener("change", () => change({ example: Number(pick.value) }));
  byId("previous").addEventListener("click", () => change({ example: within(state.example - 1, examples.length) }));
  byId("next").addEventListener("click", () => change({ example: within(state.example + 1, examples.length) }));
  views.forEach((view) => view.addEventListener("change", () => change({ view: view.value })));
  runs.forEach((run) => run.addEventListener("change", () => {
    const chosen = runs.filter((one) => one.checked).map((one) => one.value);
    change({ runs: chosen.length === runs.length ? [] : chosen });
  }));
  slider.addEventListener("input", () => change({ head: Number(slider.value) }));
  explorer.addEventListener("pointermove", readCell);
  explorer.addEventListener("pointerover", readWord);
  explorer.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) change({ view: "head", head: cell.head + 1 });
  });
  window.addEventListener("hashchange", () => { readHash(); show(); });

  document.documentElement.classList.add("js");
  byId("controls").hidden = false;
  readout.hidden = false;
  readHash();
  show();
})();
