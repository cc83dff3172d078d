r"""Mean and variance of SGLD's samples under four optimizers, by effective step and place of the noise.

    python -m studies.sampling.run                                        # all runs, a quarter of an hour of one core
    python -m studies.sampling.run --methods Adam "Adam, b2 0.9999" --steps 0.001
    python -m studies.sampling.run --tables                               # write the pages of the stored numbers again

A run is one optimizer at one effective step (step times curvature), with all targets side by side. It replaces the same
run in gaussians.json; other runs stay. Chains start from the target, with the second moment of a long run.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from studies.output import save
from studies.sampling.chains import METHODS, Method
from studies.sampling.gaussians import SHAPES, Target, measure
from studies.sampling.page import BLOCKS, NOISE, PLACES, PLAIN, STEPS, describe, replaced

from repulsive.repulsion.settings import NoisePlace

ROOT = Path(__file__).resolve().parents[2]
BURN_IN, SAMPLED = 10.0, 5.0  # steps of a run, in decorrelation times 1 / step of the stiffest direction
SPACING = 0.1  # from one sample to the next, in the same unit


class Run(NamedTuple):
    """One optimizer, at one effective step, with noise in one place."""

    method: Method
    noise_in: NoisePlace
    step: float

    @property
    def key(self) -> tuple[str, str, float]:
        return self.method.label, self.noise_in, self.step

    def targets(self) -> list[Target]:
        """All targets for noise in the optimizer's step; for the other places N(0, 1) with full gradients."""
        if self.noise_in != "optimizer":
            return [Target("N(0, 1)", self.step)]
        return [Target(shape, self.step, noise) for shape in SHAPES for noise in (0.0, NOISE)]

    def burn_in(self) -> int:
        if self.noise_in == "gradient" and self.method.is_normalised:  # noise in the second moment makes steps small
            return math.ceil(4 / self.step * math.sqrt(1 + 2 / self.step))
        if self.noise_in == "parameter" and self.method.is_normalised:  # the second moment follows the wrong variance
            return math.ceil(max(BURN_IN / self.step, 3 * self.method.window))
        return math.ceil((2 if self.method.is_fixed else 1) * BURN_IN / self.step)


def plan() -> list[Run]:
    """List all runs of the study, in the order of the tables."""
    runs = []
    for method in METHODS:
        runs += [Run(method, "optimizer", step) for step in STEPS]
        if method.label in PLAIN:
            runs += [Run(method, place, step) for place in ("gradient", "parameter") for step in PLACES]
    return runs


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = [method.label for method in METHODS]
    places = ["optimizer", "gradient", "parameter"]
    parser.add_argument(
        "--methods", nargs="+", default=labels, choices=labels, metavar="LABEL", help="as in the tables"
    )
    parser.add_argument("--steps", nargs="+", type=float, default=STEPS, choices=STEPS, help="step times curvature")
    parser.add_argument("--places", nargs="+", default=places, choices=places, help="settings of noise_in")
    parser.add_argument("--chains", type=int, default=8192, help="independent chains for each target")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full", help="tiny: a quick trial of the script")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sampling", help="folder of numbers and tables")
    parser.add_argument("--tables", action="store_true", help="only write the pages of the stored numbers again")
    options = parser.parse_args(words)
    chosen = [
        run
        for run in plan()
        if run.method.label in options.methods and run.step in options.steps and run.noise_in in options.places
    ]
    if not chosen:
        parser.error(f"no run has these settings: other places than optimizer have {PLAIN} at steps {PLACES} only")
    torch.set_num_threads(1)
    stored = options.out / "gaussians.json"
    for run in [] if options.tables else chosen:
        result = carry_out(run, options.chains, options.scale)
        save(stored, {"runs": merge(json.loads(stored.read_text())["runs"] if stored.is_file() else [], result)})
        print(*run.key, f"{result['seconds']} s", flush=True)
    runs = json.loads(stored.read_text())["runs"]
    save(options.out / "gaussians.md", describe(runs))
    if options.out == ROOT / "results" / "sampling":
        page = ROOT / "docs" / "noise.md"
        text = page.read_text(encoding="utf-8")
        for name, block in BLOCKS.items():
            text = replaced(text, name, block(runs))
        save(page, text)


def carry_out(run: Run, chains: int, scale: str = "full") -> dict[str, Any]:
    """Run the chains; return the results with the command that repeats them."""
    steps, burn_in = math.ceil(SAMPLED / run.step), run.burn_in()
    if scale == "tiny":
        steps, burn_in = 20, 0
    began = time.monotonic()
    targets = run.targets()
    lr, every = run.step / run.method.sum_of_steps, math.ceil(SPACING / run.step)
    settings = {"chains": chains, "steps": steps, "burn_in": burn_in, "every": every}
    results = measure(run.method, run.noise_in, targets, lr=lr, **settings)
    command = f'python -m studies.sampling.run --methods "{run.method.label}" --steps {run.step:g}'
    return {
        "optimizer": run.method.label,
        "noise_in": run.noise_in,
        "step": run.step,
        "command": f"{command} --places {run.noise_in} --chains {chains} --scale {scale}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": "cpu",
        "seconds": round(time.monotonic() - began),
        **settings,
        "cells": [asdict(target) | asdict(result) for target, result in zip(targets, results, strict=True)],
    }


def merge(runs: Sequence[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Add a result to the stored runs in the order of the plan; it replaces the same run."""
    by_key = {(run["optimizer"], run["noise_in"], run["step"]): run for run in (*runs, result)}
    return [by_key[run.key] for run in plan() if run.key in by_key]


if __name__ == "__main__":
    main()
