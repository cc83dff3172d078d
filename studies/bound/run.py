"""Error of SPOS against the number of particles and the step size, on a posterior whose moments are known.

    python -m studies.bound.run --out results/bound

Section 4.2 of the paper cites a bound on the error of M particles, O(1 / sqrt(M) + M sqrt(epsilon) + exp(-sum of
epsilon)), and explains the best number of heads by it. Here the posterior is a mixture of two Gaussians in the plane.
The error is the root mean square, over repetitions and test functions f, of (mean of f over particles - E f) / sd f;
for M independent samples it is 1 / sqrt(M). E f comes from a grid. Takes minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import math
import time
from pathlib import Path
from typing import Any

import torch
from studies.output import save
from torch import Tensor

from repulsive import SPOS
from repulsive.metrics.student import half_width
from repulsive.safety.markdown import format_table

CENTRES = torch.tensor([[-1.5, 0.0], [1.0, 1.0]], dtype=torch.float64)  # [2, 2]
LOG_SHARES = torch.tensor([0.6, 0.4], dtype=torch.float64).log()
COUNTS = (8, 16, 32, 64, 128, 256)
STEP_SIZES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
BETA, BANDWIDTH = 1.0, 1.0
DURATION = 20.0  # sum of the step sizes
LATE = 5  # states that are averaged, one time unit apart, the last at DURATION
REPETITIONS = {8: 96, 16: 64, 32: 48, 64: 32, 128: 24, 256: 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=DURATION, help="sum of the step sizes")
    parser.add_argument("--out", type=Path, default=Path("results/bound"), help="folder to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    truth = moments()
    cells = []
    for epsilon in STEP_SIZES:
        for count in COUNTS:
            cells.append(measure(count, epsilon, options.duration, truth))
            print(*cells[-1].values(), sep=", ", flush=True)
    about = {
        "command": "python -m studies.bound.run",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
    }
    decay = convergence(truth)
    save(options.out / "errors.json", {**about, "cells": cells, "decay": decay, "fit": fit(cells)})
    save(options.out / "table.md", describe(about, cells, decay))
    draw(options.out / "bound.svg", cells, decay)


def log_density(points: Tensor) -> Tensor:
    """Log of the unnormalised posterior: [..., 2] -> [...]."""
    d2 = (points.unsqueeze(-2) - CENTRES).square().sum(-1)  # [..., 2]
    return torch.logsumexp(LOG_SHARES - d2 / 2, dim=-1)


def slope(points: Tensor) -> Tensor:
    """Gradient of U = -log p: [..., 2] -> [..., 2]."""
    apart = points.unsqueeze(-2) - CENTRES  # [..., 2, 2]
    share = torch.softmax(LOG_SHARES - apart.square().sum(-1) / 2, dim=-1)  # [..., 2]
    return (share.unsqueeze(-1) * apart).sum(-2)


def test_functions(points: Tensor) -> Tensor:
    """x, y, x^2, y^2, xy and cos x: [..., 2] -> [..., 6]."""
    x, y = points.unbind(-1)
    return torch.stack([x, y, x.square(), y.square(), x * y, x.cos()], dim=-1)


def moments(edge: float = 9.0, cells: int = 901) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every test function under the posterior, by summation over a grid: [6], [6]."""
    axis = torch.linspace(-edge, edge, cells, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)  # [N, 2]
    weight = torch.softmax(log_density(points), dim=0)
    values = test_functions(points)
    mean = weight @ values
    return mean, (weight @ (values - mean).square()).sqrt()


def walk(count: int, epsilon: float, repetitions: int, steps: int, keep: set[int], seed: int = 0) -> list[Tensor]:
    """Move particles by SPOS; return their positions [R, M, 2] after the steps in `keep`."""
    source = torch.Generator().manual_seed(seed)
    theta = 3 + 0.1 * torch.randn(repetitions, count, 2, generator=source, dtype=torch.float64)
    rule = SPOS(epsilon, 1.0, BETA, bandwidth=BANDWIDTH)
    kept = []
    for step in range(1, steps + 1):
        theta = theta - rule.gradient(theta, slope(theta), source, lr=1.0)
        if step in keep:
            kept.append(theta)
    return kept


def squared_errors(theta: Tensor, truth: tuple[Tensor, Tensor]) -> Tensor:
    """Mean over test functions of ((mean of f - E f) / sd f)^2, for each repetition: [R, M, 2] -> [R]."""
    mean, deviation = truth
    return ((test_functions(theta).mean(1) - mean) / deviation).square().mean(-1)


def measure(count: int, epsilon: float, duration: float, truth: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Root mean square error with its 95 % interval over repetitions."""
    steps = round(duration / epsilon)
    keep = {steps - round(late / epsilon) for late in range(LATE)}
    states = walk(count, epsilon, REPETITIONS[count], steps, keep)
    squares = torch.stack([squared_errors(theta, truth) for theta in states]).mean(0).tolist()  # over late states
    mean, half = sum(squares) / len(squares), half_width(squares)
    mean_bias = torch.stack([test_functions(theta).mean((0, 1)) for theta in states]).mean(0) - truth[0]
    return {
        "particles": count,
        "epsilon": epsilon,
        "error": math.sqrt(mean),
        "low": math.sqrt(max(mean - half, 0)),
        "high": math.sqrt(mean + half),
        "bias": float((mean_bias / truth[1]).square().mean().sqrt()),
    }


def convergence(truth: tuple[Tensor, Tensor], count: int = 128, epsilon: float = 0.05) -> list[tuple[float, float]]:
    """(time, error) from the start on."""
    steps = round(DURATION / epsilon)
    keep = {round(t / epsilon) for t in (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)}
    states = walk(count, epsilon, 16, steps, keep, seed=1)
    return [
        (step * epsilon, float(squared_errors(theta, truth).mean().sqrt()))
        for step, theta in zip(sorted(keep), states, strict=True)
    ]


def fit(cells: list[dict[str, float]]) -> dict[str, Any]:
    """Slopes of log error against log M for each step size, and of log bias against log epsilon at the largest M."""
    slopes = {}
    for epsilon in STEP_SIZES:
        own = [cell for cell in cells if cell["epsilon"] == epsilon]
        slopes[str(epsilon)] = log_slope([c["particles"] for c in own], [c["error"] for c in own])
    largest = [cell for cell in cells if cell["particles"] == max(COUNTS)]
    return {
        "error_by_particles": slopes,
        "bias_by_epsilon": log_slope([c["epsilon"] for c in largest], [c["bias"] for c in largest]),
    }


def log_slope(x: list[float], y: list[float]) -> float:
    """Slope of log y against log x by least squares."""
    a, b = torch.tensor(x, dtype=torch.float64).log(), torch.tensor(y, dtype=torch.float64).log()
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / a.square().sum())


def describe(about: dict[str, Any], cells: list[dict[str, float]], decay: list[tuple[float, float]]) -> str:
    """Write errors, biases and slopes as tables."""
    table = {(cell["epsilon"], cell["particles"]): cell for cell in cells}
    fitted = fit(cells)
    errors, biases = [], []
    for epsilon in STEP_SIZES:
        own = [table[epsilon, count] for count in COUNTS]
        shown = [f"{c['error']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in own]
        errors.append([f"{epsilon:g}", *shown, f"{fitted['error_by_particles'][str(epsilon)]:.2f}"])
        biases.append([f"{epsilon:g}", *(f"{c['bias']:.3f}" for c in own)])
    independent = ["independent samples", *(f"{count**-0.5:.3f}" for count in COUNTS), "-0.50"]
    heads = ["epsilon", *(f"M = {count}" for count in COUNTS)]
    return "\n\n".join(
        [
            f"`{about['command']}` (one CPU core, torch {about['torch']}, {about['date']}, {about['seconds']} s).",
            "Error with its 95 % interval over repetitions; the last column is the slope of log error against log M:",
            format_table([*heads, "slope"], [*errors, independent]),
            "Bias, the error of the mean over repetitions and late states; it includes the noise of that mean:",
            format_table(heads, biases),
            f"Slope of log bias against log epsilon at M = {max(COUNTS)}: {fitted['bias_by_epsilon']:.2f}.",
            "Error after the time t, M = 128, epsilon = 0.05:",
            format_table(["t", *(f"{t:g}" for t, _ in decay)], [["error", *(f"{e:.3f}" for _, e in decay)]]),
        ]
    ) + "\n"  # fmt: skip


def draw(path: Path, cells: list[dict[str, float]], decay: list[tuple[float, float]]) -> None:
    """Draw error against M, error against epsilon, and error against time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bound", "font.size": 9, "axes.titlesize": 9})
    colours = plt.get_cmap("viridis")
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 3.3), constrained_layout=True)
    for index, epsilon in enumerate(STEP_SIZES):
        own = [cell for cell in cells if cell["epsilon"] == epsilon]
        bars = [[c["error"] - c["low"] for c in own], [c["high"] - c["error"] for c in own]]
        x, y = [c["particles"] for c in own], [c["error"] for c in own]
        colour = colours(0.9 * index / len(STEP_SIZES))
        left.errorbar(x, y, bars, marker="o", ms=3, lw=1.2, color=colour, label=f"ε = {epsilon:g}")
    left.plot(COUNTS, [m**-0.5 for m in COUNTS], "k--", lw=1, label="independent samples")
    left.set(
        xscale="log", yscale="log", xlabel="particles M", ylabel="error", title="Error against the number of particles"
    )
    left.set_xticks(COUNTS, [str(count) for count in COUNTS])
    left.legend(frameon=False, fontsize=7)
    for index, count in enumerate(COUNTS):
        own = [cell for cell in cells if cell["particles"] == count]
        bars = [[c["error"] - c["low"] for c in own], [c["high"] - c["error"] for c in own]]
        x, y = [c["epsilon"] for c in own], [c["error"] for c in own]
        middle.errorbar(
            x, y, bars, marker="o", ms=3, lw=1.2, color=colours(0.9 * index / len(COUNTS)), label=f"M = {count}"
        )
    first = cells[0]["epsilon"], min(cell["error"] for cell in cells)
    reference = [first[1] * math.sqrt(epsilon / first[0]) for epsilon in STEP_SIZES]
    middle.plot(STEP_SIZES, reference, "k--", lw=1, label="√ε")
    middle.set(xscale="log", yscale="log", xlabel="step size ε", title="Error against the step size")
    middle.set_xticks(STEP_SIZES, [f"{epsilon:g}" for epsilon in STEP_SIZES])
    middle.set_ylim(top=1.2)
    middle.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")
    right.plot(*zip(*decay, strict=True), marker="o", ms=3, lw=1.2, color=colours(0.4), label="M = 128, ε = 0.05")
    right.axhline(128**-0.5, color="k", ls="--", lw=1, label="independent samples")
    right.set(yscale="log", xlabel="time (sum of ε)", title="Error against time")
    right.legend(frameon=False, fontsize=7)
    for axes in (left, middle, right):
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
