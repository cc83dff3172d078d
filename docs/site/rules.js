// The rules of repulsive.particles in plain JavaScript, for the start page. Particles are arrays of [x, y].
// tests/docs/test_playground.py compares every function with the Python rule of the same name.
"use strict";

const repulsiveRules = (() => {
  const MODES = [[-2.2, -1.2], [2.1, -0.6], [0.1, 2.0]];
  const WIDTH = 0.75; // standard deviation of each mode
  const FLOOR = 1e-4; // repulsive.particles.bandwidths.FLOOR
  const SHORTEST = 3e-3; // repulsive.particles.kernels.SHORTEST

  const dot = (a, b) => a.reduce((sum, value, k) => sum + value * b[k], 0);
  const minus = (a, b) => a.map((value, k) => value - b[k]);
  const matrix = (size, entry) => Array.from({ length: size }, (_, i) => Array.from({ length: size }, (_, j) => entry(i, j)));
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  /** Gradient of U = -log p for a mixture p of three equal Gaussians. */
  function mixtureGradient(theta) {
    return theta.map((point) => {
      const offsets = MODES.map((mode) => minus(point, mode));
      const logs = offsets.map((offset) => -dot(offset, offset) / (2 * WIDTH ** 2));
      const top = Math.max(...logs);
      const weights = logs.map((log) => Math.exp(log - top));
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      return point.map((_, k) => offsets.reduce((sum, offset, i) => sum + weights[i] * offset[k], 0) / total / WIDTH ** 2);
    });
  }

  /** Bandwidth of the paper, h = med^2 / log M, with its lower bound. */
  function bandwidth(squaredDistances, scale) {
    const size = squaredDistances.length;
    const distances = [];
    for (let i = 0; i < size; i++) for (let j = i + 1; j < size; j++) distances.push(Math.sqrt(squaredDistances[i][j]));
    distances.sort((a, b) => a - b);
    const count = distances.length;
    const median = (distances[(count - 1) >> 1] + distances[count >> 1]) / 2;
    return Math.max(median ** 2 / Math.log(size), FLOOR ** 2 * scale);
  }

  /** Kernel values K and repulsion matrix R of the RBF kernel, in weights or on the sphere. */
  function interact(theta, space) {
    const size = theta.length;
    let squared = matrix(size, (i, j) => { const gap = minus(theta[i], theta[j]); return dot(gap, gap); });
    const squaredNorms = theta.map((point) => dot(point, point));
    const onSphere = space === "sphere";
    const isZero = squaredNorms.map((norm) => norm <= SHORTEST ** 2 * mean(squaredNorms));
    const norms = squaredNorms.map((norm, i) => (isZero[i] ? 1 : Math.sqrt(norm)));
    if (onSphere) {
      const between = (i, j) => Math.max(0, (squared[i][j] - (norms[i] - norms[j]) ** 2) / (norms[i] * norms[j]));
      squared = matrix(size, (i, j) => (isZero[i] || isZero[j] ? Number(isZero[i] !== isZero[j]) : between(i, j)));
    }
    const h = bandwidth(squared, onSphere ? 1 : mean(squaredNorms));
    const values = matrix(size, (i, j) => Math.exp(-squared[i][j] / h));
    const weight = matrix(size, (i, j) => (i === j || (onSphere && (isZero[i] || isZero[j])) ? 0 : values[i][j] / h));
    const repulsion = matrix(size, (i, j) => {
      if (i !== j) return (-2 * weight[i][j]) / (onSphere ? norms[i] * norms[j] : 1);
      const own = weight[i].reduce((sum, w, k) => sum + 2 * w * (onSphere ? 1 - squared[i][k] / 2 : 1), 0);
      return onSphere ? own / norms[i] ** 2 : own;
    });
    return { values, repulsion };
  }

  /** Kernel values and repulsion matrix of the control without a kernel: every pair has the value 1 / M. */
  function interactKernelFree(theta) {
    const size = theta.length;
    const squared = matrix(size, (i, j) => { const gap = minus(theta[i], theta[j]); return dot(gap, gap); });
    const h = bandwidth(squared, mean(theta.map((point) => dot(point, point))));
    return {
      values: matrix(size, (i, j) => (i === j ? 1 : 1 / size)),
      repulsion: matrix(size, (i, j) => (2 / h) * (Number(i === j) - 1 / size)),
    };
  }

  /** What an optimizer descends: stepsize / M * sum_j [(s K + (1 - s) I)_ij grad_j - alpha R_ij theta_j]. */
  function direction({ values, repulsion }, theta, grad, { stepsize, alpha, smoothing }) {
    const size = theta.length;
    return theta.map((point, i) => point.map((_, k) => {
      let sum = 0;
      for (let j = 0; j < size; j++) {
        const drive = smoothing * values[i][j] + (1 - smoothing) * Number(i === j);
        sum += drive * grad[j][k] - alpha * repulsion[i][j] * theta[j][k];
      }
      return (stepsize / size) * sum;
    }));
  }

  /** SVGD(stepsize, alpha, space=space, smoothing=smoothing).gradient(theta, grad) */
  function svgd(theta, grad, { stepsize = 0.1, alpha = 0.01, smoothing = 1, space = "weights" } = {}) {
    return direction(interact(theta, space), theta, grad, { stepsize, alpha, smoothing });
  }

  /** KernelFree(stepsize, alpha, smoothing=smoothing).gradient(theta, grad) */
  function kernelFree(theta, grad, { stepsize = 0.1, alpha = 0.01, smoothing = 1 } = {}) {
    return direction(interactKernelFree(theta), theta, grad, { stepsize, alpha, smoothing });
  }

  return { MODES, WIDTH, mixtureGradient, svgd, kernelFree };
})();

if (typeof module !== "undefined") module.exports = repulsiveRules;
