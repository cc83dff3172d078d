// The playground of the start page: particles that follow a rule, drawn on a canvas.
"use strict";

(() => {
  const root = document.getElementById("playground");
  if (!root) return;
  const { MODES, WIDTH, mixtureGradient, svgd, kernelFree } = repulsiveRules;
  const RATE = 0.25; // learning rate
  const STEPS = 1200; // the particles rest by then
  const PER_FRAME = 2;
  const EDGE = 4.7; // the canvas shows the plane from -EDGE to EDGE
  const TRAIL = 1200; // positions of a particle that are drawn
  const START = [
    [-2.62, 2.71], [-2.95, 2.32], [-2.3, 2.48], [-2.71, 2.13], [-2.18, 2.86],
    [-3.06, 2.64], [-2.44, 2.2], [-2.83, 2.95], [-2.05, 2.35], [-3.2, 2.4],
  ];

  root.hidden = false;
  const canvas = root.querySelector("canvas");
  const context = canvas.getContext("2d");
  const alpha = root.querySelector("input[name=alpha]");
  const play = root.querySelector("button[name=play]");
  const result = root.querySelector("output[name=result]");
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
  let particles, trails, step, timer, isVisible = true;

  const chosen = (name) => root.querySelector(`input[name=${name}]:checked`).value;

  function advance() {
    const grad = mixtureGradient(particles);
    const settings = { stepsize: 1, alpha: Number(alpha.value), space: chosen("space") };
    const rule = chosen("rule");
    const moves = rule === "plain" ? grad : rule === "svgd" ? svgd(particles, grad, settings) : kernelFree(particles, grad, settings);
    particles = particles.map((point, i) => point.map((value, k) => value - RATE * moves[i][k]));
    particles.forEach((point, i) => {
      trails[i].push(point);
      if (trails[i].length > TRAIL) trails[i].shift();
    });
    step += 1;
  }

  function draw() {
    const style = getComputedStyle(root);
    const ratio = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const scale = height / 2 / EDGE;
    const place = ([x, y]) => [width / 2 + scale * x, height / 2 - scale * y];
    const circle = (center, radius) => { context.beginPath(); context.arc(...place(center), radius, 0, 2 * Math.PI); };
    context.lineWidth = 1;
    context.strokeStyle = style.getPropertyValue("--ring");
    for (const mode of MODES) for (const times of [1, 2]) { circle(mode, times * WIDTH * scale); context.stroke(); }
    if (chosen("space") === "sphere") {
      for (const point of particles) { context.beginPath(); context.moveTo(...place([0, 0])); context.lineTo(...place(point)); context.stroke(); }
      circle([0, 0], 3);
      context.stroke();
    }
    context.strokeStyle = style.getPropertyValue("--trail");
    context.lineWidth = 1.5;
    for (const trail of trails) {
      context.beginPath();
      trail.forEach((point, i) => (i ? context.lineTo(...place(point)) : context.moveTo(...place(point))));
      context.stroke();
    }
    context.fillStyle = style.getPropertyValue("--head");
    context.strokeStyle = style.getPropertyValue("--edge");
    for (const point of particles) { circle(point, 6); context.fill(); context.stroke(); }
    report();
  }

  function report() {
    let distance = 0, cosine = 0, pairs = 0;
    const norm = ([x, y]) => Math.hypot(x, y) || 1;
    particles.forEach((a, i) => particles.slice(0, i).forEach((b) => {
      distance += Math.hypot(a[0] - b[0], a[1] - b[1]);
      cosine += (a[0] * b[0] + a[1] * b[1]) / (norm(a) * norm(b));
      pairs += 1;
    }));
    const found = MODES.filter((mode) => particles.some((p) => Math.hypot(p[0] - mode[0], p[1] - mode[1]) < 2 * WIDTH)).length;
    result.textContent = `step ${step}: mean distance ${(distance / pairs).toFixed(2)}, mean cosine ${(cosine / pairs).toFixed(2)}, modes found ${found} of 3`;
    root.querySelector("output[name=weight]").textContent = Number(alpha.value).toFixed(1);
  }

  function restart() {
    particles = START.map((point) => [...point]);
    trails = START.map((point) => [point]);
    step = 0;
    move();
  }

  /** Start to move; with reduced motion, show where the particles are after many steps. */
  function move() {
    if (!calm.matches) return start();
    stop();
    for (let i = 0; i < STEPS / 3; i++) advance();
    draw();
  }

  function frame() {
    timer = undefined;
    if (!isVisible || document.hidden) return;
    for (let i = 0; i < PER_FRAME && step < STEPS; i++) advance();
    draw();
    if (step < STEPS) timer = requestAnimationFrame(frame); else stop();
  }

  function start() {
    if (step >= STEPS) step = 0; // continue from where the particles are
    play.textContent = "Pause";
    if (timer === undefined) timer = requestAnimationFrame(frame);
  }

  function stop() {
    cancelAnimationFrame(timer);
    timer = undefined;
    play.textContent = "Play";
  }

  const isRunning = () => play.textContent === "Pause";

  root.addEventListener("input", (event) => {
    const free = chosen("rule") !== "svgd";
    for (const input of root.querySelectorAll("input[name=space]")) input.disabled = free && input.value === "sphere";
    if (free) root.querySelector("input[name=space][value=weights]").checked = true;
    alpha.disabled = chosen("rule") === "plain";
    if (event.target === alpha) move();
    else restart();
  });
  play.addEventListener("click", () => (isRunning() ? stop() : start()));
  root.querySelector("button[name=restart]").addEventListener("click", restart);
  new ResizeObserver(draw).observe(canvas);
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
  new IntersectionObserver((entries) => {
    isVisible = entries[entries.length - 1].isIntersecting;
    if (isVisible && isRunning() && timer === undefined) timer = requestAnimationFrame(frame);
  }).observe(canvas);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && isRunning() && timer === undefined) timer = requestAnimationFrame(frame);
  });
  restart();
})();
