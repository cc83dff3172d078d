"use strict";
// Navigates between pairs and stores answers. The page contains all texts, but not which system is on which side.
(() => {
  const byId = (id) => document.getElementById(id);
  const sheet = byId("sheet"), page = sheet.dataset.page, seal = sheet.dataset.seal;
  const FORMAT = "repulsive-judge-answers", STORAGE_KEY = `repulsive-judge-${page}`;
  const pairs = [...document.querySelectorAll(".pair")], total = pairs.length;
  const groups = pairs.map((pair) => [...pair.querySelectorAll("fieldset")]);
  const criteria = groups[0].map((group) => group.dataset.criterion), choices = ["left", "tie", "right"];
  const jumps = [...document.querySelectorAll("[data-pair]")];
  let current = 1, saved = true, canStore = true;  // saved: as a file; canStore: the browser keeps answers

  const radio = (group, choice) => group.querySelector(`input[value=${choice}]`);
  const answer = (group) => { const input = group.querySelector("input:checked"); return input ? input.value : null; };
  const answered = (number) => groups[number - 1].filter(answer).length;
  const isComplete = (number) => answered(number) === criteria.length;
  const numbers = () => pairs.map((_, index) => index + 1);
  const showStatus = (text) => { byId("status").textContent = text; };

  function answers() {
    return numbers().filter(answered).map((number) => {
      const entries = groups[number - 1].filter(answer).map((group) => [group.dataset.criterion, answer(group)]);
      return { item: number, ...Object.fromEntries(entries) };
    });
  }

  // Check answers from a file or from storage; "" if they belong to this page and are valid.
  function errorIn(data) {
    if (!data || data.format !== FORMAT || !Array.isArray(data.answers)) return "This is not a file of answers.";
    if (data.page !== page || data.seal !== seal) return "This file has answers to another page.";
    const valid = data.answers.every((one) => one && Number.isInteger(one.item) && one.item >= 1 && one.item <= total &&
      Object.entries(one).every(([name, value]) => name === "item" || (criteria.includes(name) && choices.includes(value))));
    return valid && typeof data.judge === "string" ? "" : "This file of answers is damaged.";
  }

  function fill(data) {
    byId("judge").value = data.judge;
    document.querySelectorAll(".questions input").forEach((input) => { input.checked = false; });
    data.answers.forEach((one) => groups[one.item - 1].forEach((group) => {
      const choice = one[group.dataset.criterion];
      if (choice) radio(group, choice).checked = true;
    }));
  }

  const record = () => ({ format: FORMAT, version: 1, page, seal, judge: byId("judge").value.trim(), items: total, answers: answers() });

  function store() {
    saved = false;
    try {
      localStorage.setItem(STORAGE_KEY, JSON.stringify({ ...record(), at: current, letters: byId("letters").checked }));
      canStore = true;
    } catch {
      canStore = false;
    }
    warnAboutStorage();
  }

  function warnAboutStorage() {
    byId("trouble").hidden = canStore;
    byId("trouble").textContent = canStore ? "" :
      "This browser does not store answers for this page. Save them as a file before you close it.";
  }

  function restore() {
    let data = null;
    try {
      data = JSON.parse(localStorage.getItem(STORAGE_KEY));
      localStorage.setItem(`${STORAGE_KEY}-try`, "1");
      localStorage.removeItem(`${STORAGE_KEY}-try`);
    } catch (error) {
      canStore = error instanceof SyntaxError;  // the stored answers are damaged, but storage works
    }
    warnAboutStorage();
    if (!data || errorIn(data)) return;
    fill(data);
    current = Math.min(total, Math.max(1, Math.trunc(data.at) || 1));
    byId("letters").checked = data.letters !== false;
    if (data.answers.length) byId("about").open = false;
  }

  function showProgress() {
    const done = numbers().filter(isComplete).length;
    byId("done").value = done;
    byId("count").textContent = `${done} of ${total} pairs judged`;
    byId("open").disabled = done === total;
    byId("save").classList.toggle("ready", done === total);
    jumps.forEach((jump, index) => {
      const state = isComplete(index + 1) ? "judged" : answered(index + 1) ? "started" : "not judged";
      jump.className = state.replace(" ", "-");
      jump.setAttribute("aria-label", `Pair ${index + 1}, ${state}`);
      if (index + 1 === current) jump.setAttribute("aria-current", "true"); else jump.removeAttribute("aria-current");
    });
    return done;
  }

  function show() {
    pairs.forEach((pair, index) => { pair.hidden = index + 1 !== current; });
    byId("where").textContent = `Pair ${current} of ${total}`;
    byId("previous").disabled = current === 1;
    byId("next").disabled = current === total;
    byId("onward").disabled = current === total;
    showProgress();
  }

  function goTo(number) {
    if (number < 1 || number > total || number === current) return;
    current = number;
    showStatus("");
    byId("about").open = false;
    show();
    byId("where").focus({ preventScroll: true });
    document.querySelector(".steps").scrollIntoView();
    const { judge, answers } = record();
    const before = saved;
    if (judge || answers.length) store();
    saved = before;  // the current pair is not an answer
  }

  function changed() {
    const done = showProgress();
    store();
    showStatus(done === total ? `All ${total} pairs are judged. Save your answers as a file.` : "");
  }

  // The criterion that keyboard shortcuts answer: the focused one, else the first without an answer, else undefined.
  function activeGroup() {
    const here = groups[current - 1];
    return here.find((group) => group.contains(document.activeElement)) || here.find((group) => !answer(group));
  }

  function choose(choice) {
    const here = groups[current - 1], group = activeGroup(), following = here[here.indexOf(group) + 1];
    if (!group) {
      showStatus("This pair is judged. Press N for the next pair. To change an answer, click it.");
      return;
    }
    radio(group, choice).checked = true;
    changed();
    if (following) (following.querySelector("input:checked") || following.querySelector("input")).focus();
    else if (current < total) byId("onward").focus();
    else byId("save").focus();
  }

  function pressed(event) {
    if (!byId("letters").checked || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (event.target.matches("input:not([type=radio]):not([type=checkbox])")) return;
    const key = (event.key || "").toLowerCase(), choice = { l: "left", t: "tie", r: "right" }[key];
    if (choice) choose(choice);
    else if (key === "n") goTo(current + 1);
    else if (key === "p") goTo(current - 1);
    else return;
    event.preventDefault();
  }

  function save() {
    const data = { ...record(), saved: new Date().toISOString() };
    if (!data.judge) {
      showStatus("Enter your name first, at the top of the page.");
      byId("judge").focus();
      return;
    }
    const link = document.createElement("a"), name = data.judge.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
    link.download = `answers-${page.slice(0, 6)}-${name}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    saved = true;
    const missing = total - numbers().filter(isComplete).length;
    showStatus(`Saved as ${link.download}.` + (missing ? ` ${missing} of ${total} pairs are not judged yet.` : ""));
  }

  async function load() {
    const [file] = byId("load").files;
    byId("load").value = "";
    if (!file) return;
    let data = null;
    try { data = JSON.parse(await file.text()); } catch { /* errorIn(null) reports it */ }
    const error = errorIn(data);
    if (error) { showStatus(error); return; }
    if (answers().length && !confirm("Replace the answers on this page with those from the file?")) return;
    fill(data);
    current = numbers().find((number) => !isComplete(number)) || 1;
    show();
    store();
    showStatus(`Loaded ${file.name}: ${data.answers.length} of ${total} pairs have answers.`);
  }

  function startOver() {
    if (!confirm("Delete the name and all answers on this page?")) return;
    fill({ judge: "", answers: [] });
    current = 1;
    show();
    store();
    saved = true;
    showStatus("All answers are deleted.");
  }

  document.querySelectorAll(".questions").forEach((form) => {
    form.addEventListener("change", changed);
    form.addEventListener("submit", (event) => event.preventDefault());
  });
  byId("judge").addEventListener("input", store);
  byId("letters").addEventListener("change", store);
  byId("previous").addEventListener("click", () => goTo(current - 1));
  byId("next").addEventListener("click", () => goTo(current + 1));
  byId("onward").addEventListener("click", () => goTo(current + 1));
  byId("open").addEventListener("click", () =>
    goTo(numbers().find((number) => !isComplete(number) && number !== current) || current));
  jumps.forEach((jump) => jump.addEventListener("click", () => goTo(Number(jump.dataset.pair))));
  byId("save").addEventListener("click", save);
  byId("load").addEventListener("change", load);
  byId("fresh").addEventListener("click", startOver);
  document.addEventListener("keydown", pressed);
  window.addEventListener("beforeunload", (event) => { if (!canStore && !saved) event.preventDefault(); });
  window.addEventListener("storage", (event) => { if (event.key === STORAGE_KEY) { restore(); show(); } });

  document.documentElement.classList.add("js");
  restore();
  show();
})();
