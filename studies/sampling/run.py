"""Variance of SGLD's samples under five optimizers, with noise in the gradient, the parameter or the optimizer's step.

    python -m studies.sampling.run --out results/sampling

Chains start from the target, with the second moment of a long run. Runs on the CPU in about ten minutes.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from studies.output import save
from studies.sampling.chains import METHODS, Method
from studies.sampling.gaussians import SHAPES, Target, measure

from repulsive.safety.markdown import format_table

STEPS = (0.01, 0.05)  # step times curvature
NOISE_IN = ("gradient", "parameter", "optimizer")
SMALL = 0.001  # a step whose decorrelation time is as long as the window of Adam's second moment
NOISE = 3.0  # standard deviation of gradient noise over that of gradients
GRID = [Target(shape, step, noise) for shape in SHAPES for noise in (0.0, NOISE) for step in STEPS]
SLOW = [Target("N(0, 1)", SMALL, noise) for noise in (0.0, NOISE)]
PLACES = [Target("N(0, 1)", step) for step in STEPS]
PLAIN = ("SGD", "SGD, momentum 0.9", "Adam", "AdamW", "RMSprop")  # optimizers compared for all settings of noise_in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/sampling"), help="folder of tables")
    parser.add_argument("--chains", type=int, default=512, help="independent chains for each target")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: a quick trial of the script")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    places: list[dict[str, Any]] = []
    grid: list[dict[str, Any]] = []
    for method in METHODS:
        if method.label in PLAIN:
            for noise_in in NOISE_IN:
                places += [_run(method, noise_in, [target], 4 * options.chains, options.scale) for target in PLACES]
        grid.append(_run(method, "optimizer", GRID, options.chains, options.scale))
        if method.is_normalised and not method.decay:
            grid[-1]["rows"] += _run(method, "optimizer", SLOW, 2 * options.chains, options.scale)["rows"]
        print(method.label, flush=True)
    about = {
        "command": f"python -m studies.sampling.run --chains {options.chains} --scale {options.scale}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": "cpu",
        "seconds": round(time.monotonic() - started),
    }
    save(options.out / "gaussians.json", {**about, "places": places, "grid": grid})
    save(options.out / "gaussians.md", _page(about, places, grid))


def _run(method: Method, noise_in: Any, targets: Sequence[Target], chains: int, scale: str) -> dict[str, Any]:
    """Measure all targets at once; long enough for the slowest of them, and for the window of the second moment."""
    slowest = min(target.step for target in targets)
    lr = slowest / method.sum_of_steps
    steps = math.ceil(max(5 / slowest, min(method.window, 1 / slowest), 1000))
    burn_in = math.ceil(max(1 / slowest, min(method.window, 2 / slowest)))
    if noise_in == "gradient" and method.is_normalised:  # noise in the second moment makes steps small
        burn_in = math.ceil(4 / slowest * math.sqrt(1 + 2 / slowest))
    elif noise_in == "parameter" and method.is_normalised:  # the second moment follows the wrong variance
        burn_in = math.ceil(3 * method.window)
    if scale == "tiny":
        steps, burn_in = 20, 0
    results = measure(method, noise_in, targets, lr=lr, chains=chains, steps=steps, burn_in=burn_in)
    rows = [asdict(target) | asdict(result) for target, result in zip(targets, results, strict=True)]
    return {"optimizer": method.label, "noise_in": noise_in, "steps": steps, "burn_in": burn_in, "rows": rows}


def _page(about: dict[str, Any], places: Sequence[dict[str, Any]], grid: Sequence[dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [
        f"`{about['command']}` ({versions}, CPU, {about['date']}, {about['seconds']} s)",
        "",
        "Variance of samples of SGLD (T = 1) divided by that of the target; 1 is right. Standard errors: about 0.02.",
        "",
        "## Three settings of `noise_in`",
        "",
        "Target N(0, 1), full gradients. Columns: `noise_in` at a step times curvature.",
        "",
    ]
    header = ["optimizer", *(f"{place}, {step:g}" for place in NOISE_IN for step in STEPS)]
    cells = {(run["optimizer"], run["noise_in"], row["step"]): row["stiff"] for run in places for row in run["rows"]}
    rows = [[label, *(f"{cells[label, place, step]:.2f}" for place in NOISE_IN for step in STEPS)] for label in PLAIN]
    lines += [format_table(header, rows), "", '## `noise_in="optimizer"`', ""]
    lines += [
        "Columns: target, step times curvature. Correlated: stiff direction / slow direction, with a quarter of the "
        "curvature.",
        f"Noisy: gradient noise with {NOISE:g} times the standard deviation of the gradients.",
        "",
    ]
    for noise, title in ((0.0, "full gradients"), (NOISE, "noisy gradients")):
        header = [title, f"N(0, 1), {SMALL:g}", *(f"{shape}, {step:g}" for shape in SHAPES for step in STEPS)]
        rows = []
        for run in grid:
            own = [row for row in run["rows"] if row["noise"] == noise]
            small = [_cell(row) for row in own if row["step"] == SMALL] or ["-"]
            rows.append([run["optimizer"], *small, *(_cell(row) for row in own if row["step"] != SMALL)])
        lines += [format_table(header, rows), ""]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['stiff']:.2f}" if row["shape"] == "N(0, 1)" else f"{row['stiff']:.2f} / {row['slow']:.2f}"


if __name__ == "__main__":
    main()
