"use strict";
// Moves between pairs and keeps answers. All words are in the page already; which side is which system is not.
(() => {
  const byId = (id) => document.getElementById(id);
  const sheet = byId("sheet"), page = sheet.dataset.page, seal = sheet.dataset.seal;
  const FORMAT = "repulsive-judge-answers", PLACE = `repulsive-judge-${page}`;
  const pairs = [...document.querySelectorAll(".pair")], total = pairs.length;
  const groups = pairs.map((pair) => [...pair.querySelectorAll("fieldset")]);
  const criteria = groups[0].map((group) => group.dataset.criterion), choices = ["left", "tie", "right"];
  const jumps = [...document.querySelectorAll("[data-pair]")];
  let at = 1, saved = true, kept = true;

  const radio = (group, choice) => group.querySelector(`input[value=${choice}]`);
  const answer = (group) => { const one = group.querySelector("input:checked"); return one ? one.value : null; };
  const given = (number) => groups[number - 1].filter(answer).length;
  const whole = (number) => given(number) === criteria.length;
  const numbers = () => pairs.map((_, place) => place + 1);
  const say = (text) => { byId("status").textContent = text; };

  function answers() {
    return numbers().filter(given).map((number) => {
      const said = groups[number - 1].filter(answer).map((group) => [group.dataset.criterion, answer(group)]);
      return { item: number, ...Object.fromEntries(said) };
    });
  }

  // What is wrong with answers from outside; "" if they are those of this page.
  function wrong(data) {
    if (!data || data.format !== FORMAT || !Array.isArray(data.answers)) return "This is not a file of answers.";
    if (data.page !== page || data.seal !== seal) return "These answers are those of another page.";
    const fine = data.answers.every((one) => one && Number.isInteger(one.item) && one.item >= 1 && one.item <= total &&
      Object.entries(one).every(([name, value]) => name === "item" || (criteria.includes(name) && choices.includes(value))));
    return fine && typeof data.judge === "string" ? "" : "This file of answers is damaged.";
  }

  function fill(data) {
    byId("judge").value = data.judge;
    document.querySelectorAll(".asked input").forEach((input) => { input.checked = false; });
    data.answers.forEach((one) => groups[one.item - 1].forEach((group) => {
      const choice = one[group.dataset.criterion];
      if (choice) radio(group, choice).checked = true;
    }));
  }

  const record = () => ({ format: FORMAT, version: 1, page, seal, judge: byId("judge").value.trim(), items: total, answers: answers() });

  function keep() {
    saved = false;
    try {
      localStorage.setItem(PLACE, JSON.stringify({ ...record(), at, letters: byId("letters").checked }));
      kept = true;
    } catch {
      kept = false;
    }
    trouble();
  }

  function trouble() {
    byId("trouble").hidden = kept;
    byId("trouble").textContent = kept ? "" :
      "This browser does not keep answers for this page: save them as a file before you close it.";
  }

  function remember() {
    let data = null;
    try {
      data = JSON.parse(localStorage.getItem(PLACE));
      localStorage.setItem(`${PLACE}-try`, "1");
      localStorage.removeItem(`${PLACE}-try`);
    } catch (error) {
      kept = error instanceof SyntaxError;  // what was there is damaged; there will be better
    }
    trouble();
    if (!data || wrong(data)) return;
    fill(data);
    at = Math.min(total, Math.max(1, Math.trunc(data.at) || 1));
    byId("letters").checked = data.letters !== false;
    if (data.answers.length) byId("about").open = false;
  }

  function count() {
    const done = numbers().filter(whole).length;
    byId("done").value = done;
    byId("count").textContent = `${done} of ${total} pairs judged`;
    byId("open").disabled = done === total;
    byId("save").classList.toggle("ready", done === total);
    jumps.forEach((jump, place) => {
      const state = whole(place + 1) ? "judged" : given(place + 1) ? "begun" : "not judged";
      jump.className = state.replace(" ", "-");
      jump.setAttribute("aria-label", `Pair ${place + 1}, ${state}`);
      if (place + 1 === at) jump.setAttribute("aria-current", "true"); else jump.removeAttribute("aria-current");
    });
    return done;
  }

  function show() {
    pairs.forEach((pair, place) => { pair.hidden = place + 1 !== at; });
    byId("where").textContent = `Pair ${at} of ${total}`;
    byId("previous").disabled = at === 1;
    byId("next").disabled = at === total;
    byId("onward").disabled = at === total;
    count();
  }

  function go(number) {
    if (number < 1 || number > total || number === at) return;
    at = number;
    say("");
    byId("about").open = false;
    show();
    byId("where").focus({ preventScroll: true });
    document.querySelector(".steps").scrollIntoView();
    const { judge, answers } = record();
    const before = saved;
    if (judge || answers.length) keep();  // where one was is no answer
    saved = before;
  }

  function changed() {
    const done = count();
    keep();
    say(done === total ? `All ${total} pairs are judged: save your answers as a file.` : "");
  }

  // The criterion that letter keys answer: the one in focus, else the first without an answer; none if all have one.
  function marked() {
    const here = groups[at - 1];
    return here.find((group) => group.contains(document.activeElement)) || here.find((group) => !answer(group));
  }

  function choose(choice) {
    const here = groups[at - 1], group = marked(), following = here[here.indexOf(group) + 1];
    if (!group) {
      say("This pair is judged: N goes to the next one. To change an answer, click it.");
      return;
    }
    radio(group, choice).checked = true;
    changed();
    if (following) (following.querySelector("input:checked") || following.querySelector("input")).focus();
    else if (at < total) byId("onward").focus();
    else byId("save").focus();
  }

  function pressed(event) {
    if (!byId("letters").checked || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
    if (event.target.matches("input:not([type=radio]):not([type=checkbox])")) return;
    const key = (event.key || "").toLowerCase(), choice = { l: "left", t: "tie", r: "right" }[key];
    if (choice) choose(choice);
    else if (key === "n") go(at + 1);
    else if (key === "p") go(at - 1);
    else return;
    event.preventDefault();
  }

  function save() {
    const data = { ...record(), saved: new Date().toISOString() };
    if (!data.judge) {
      say("Write your name first, at the top of the page.");
      byId("judge").focus();
      return;
    }
    const link = document.createElement("a"), name = data.judge.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
    link.download = `answers-${page.slice(0, 6)}-${name}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    saved = true;
    const missing = total - numbers().filter(whole).length;
    say(`Saved as ${link.download}.` + (missing ? ` ${missing} of ${total} pairs are not judged yet.` : ""));
  }

  async function load() {
    const [file] = byId("load").files;
    byId("load").value = "";
    if (!file) return;
    let data = null;
    try { data = JSON.parse(await file.text()); } catch { /* `wrong` says so */ }
    const why = wrong(data);
    if (why) { say(why); return; }
    if (answers().length && !confirm("Replace the answers given here by those of the file?")) return;
    fill(data);
    at = numbers().find((number) => !whole(number)) || 1;
    show();
    keep();
    say(`Went on from ${file.name}: ${data.answers.length} of ${total} pairs have answers.`);
  }

  function startOver() {
    if (!confirm("Forget the name and all answers on this page?")) return;
    fill({ judge: "", answers: [] });
    at = 1;
    show();
    keep();
    saved = true;
    say("All answers are forgotten.");
  }

  document.querySelectorAll(".asked").forEach((form) => {
    form.addEventListener("change", changed);
    form.addEventListener("submit", (event) => event.preventDefault());
  });
  byId("judge").addEventListener("input", keep);
  byId("letters").addEventListener("change", keep);
  byId("previous").addEventListener("click", () => go(at - 1));
  byId("next").addEventListener("click", () => go(at + 1));
  byId("onward").addEventListener("click", () => go(at + 1));
  byId("open").addEventListener("click", () => go(numbers().find((number) => !whole(number) && number !== at) || at));
  jumps.forEach((jump) => jump.addEventListener("click", () => go(Number(jump.dataset.pair))));
  byId("save").addEventListener("click", save);
  byId("load").addEventListener("change", load);
  byId("fresh").addEventListener("click", startOver);
  document.addEventListener("keydown", pressed);
  window.addEventListener("beforeunload", (event) => { if (!kept && !saved) event.preventDefault(); });
  window.addEventListener("storage", (event) => { if (event.key === PLACE) { remember(); show(); } });

  document.documentElement.classList.add("js");
  remember();
  show();
})();
