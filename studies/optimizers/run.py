"""Measure repulsion under several optimizers: its share of the steps, norms and similarity of heads, and the loss.

    python -m studies.optimizers.run

One small language model on generated text. All runs of a seed start with the same weights and see the same batches.
The schedule-free optimizer needs the package schedulefree. Takes half an hour on one busy core; `--jobs` uses several.
`--missing` keeps the finished runs and trains the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from studies.optimizers import training
from studies.optimizers.training import BATCH, HEADS, KINDS, LENGTH, PLAIN, WIDTH, arms_of
from studies.output import save

from repulsive.metrics.student import half_width
from repulsive.safety.markdown import format_table

ROOT = Path(__file__).resolve().parents[2]
HEADER = ["optimizer", "rule", "ratio in the gradient", "of one step", "of the steps", "norms", "cosine", "loss"]
HEADER += ["loss - plain"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=[kind.label for kind in KINDS], help="names in the table")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "optimizers", help="folder to write")
    parser.add_argument("--missing", action="store_true", help="train only runs that runs.json does not have")
    parser.add_argument("--tables", action="store_true", help="train nothing; write the tables of finished runs again")
    options = parser.parse_args(words)
    if not options.tables:
        kinds = [kind for kind in KINDS if kind.label in options.optimizers]
        plan = [
            (kind.label, arm.label, seed) for kind in kinds for arm in arms_of(kind) for seed in range(options.seeds)
        ]
        finished = json.loads((options.out / "runs.json").read_text()) if options.missing else None
        done = {_key(run) for run in finished["runs"]} if finished else set()
        new = run_all([task for task in plan if task not in done], options.seeds, options.steps, options.jobs)
        save(options.out / "runs.json", merge(finished, new) if finished else new)
    data = json.loads((options.out / "runs.json").read_text())
    save(options.out / "tables.md", describe(data))
    return 0


def run_all(plan: Sequence[tuple[str, str, int]], seeds: int, steps: int, jobs: int) -> dict[str, Any]:
    """Train the planned optimizers, rules and seeds; return the runs with their command, version and time."""
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        runs = list(pool.imap(_run, [(*one, steps) for one in plan]))
    return {
        "command": f"python -m studies.optimizers.run --seeds {seeds} --steps {steps} --jobs {jobs}",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
        "steps": steps,
        "runs": runs,
    }


def merge(finished: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Add new runs to the finished ones, in the order of the table, with a note on their origin.

    Raises:
        ValueError: the runs have different numbers of steps.
    """
    if finished["steps"] != new["steps"]:
        raise ValueError(f"expected runs of {finished['steps']} steps, as in runs.json, got {new['steps']}")
    if not new["runs"]:
        return finished
    order = [(kind.label, arm.label) for kind in KINDS for arm in arms_of(kind)]
    runs = sorted(finished["runs"] + new["runs"], key=lambda run: (order.index(_key(run)[:2]), run["seed"]))
    origin = {
        "command": f"{new['command']} --missing",
        "torch": new["torch"],
        "date": new["date"],
        "seconds": new["seconds"],
        "rules": sorted({run["rule"] for run in new["runs"]}),
    }
    return finished | {"added": [*finished.get("added", []), origin], "runs": runs}


def _key(run: dict[str, Any]) -> tuple[str, str, int]:
    return run["optimizer"], run["rule"], run["seed"]


def _run(task: tuple[str, str, int, int]) -> dict[str, Any]:
    label, rule, seed, steps = task
    torch.set_num_threads(1)
    kind = next(kind for kind in KINDS if kind.label == label)
    arm = next(arm for arm in arms_of(kind) if arm.label == rule)
    result = training.train(kind, arm, seed, steps)
    print(*(f"{value:.4g}" if isinstance(value, float) else value for value in result.values()), sep=", ", flush=True)
    return result


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Format one row for each optimizer and rule: means over seeds."""
    rows = []
    for optimizer, rule in dict.fromkeys((run["optimizer"], run["rule"]) for run in runs):
        own = [run for run in runs if (run["optimizer"], run["rule"]) == (optimizer, rule)]
        plain = {run["seed"]: run for run in runs if (run["optimizer"], run["rule"]) == (optimizer, PLAIN.label)}
        differences = [run["loss"] - plain[run["seed"]]["loss"] for run in own]
        ratios = ["" if own[0][name] is None else f"{_mean(own, name):.2g}" for name in training.RATIOS]
        against = "" if rule == PLAIN.label else _with_interval(differences)
        heads = [f"{_mean(own, 'growth'):.2f}", f"{_mean(own, 'cosine'):.3f}", f"{_mean(own, 'loss'):.3f}"]
        rows.append([optimizer, rule, *ratios, *heads, against])
    return format_table(HEADER, rows)


def describe(data: dict[str, Any]) -> str:
    """Write the page of results."""
    seeds = len({run["seed"] for run in data["runs"]})
    about = f"`{data['command']}` (CPU, torch {data['torch']}, {data['date']}, {data['seconds']} s)."
    for later in data.get("added", []):
        names = ", ".join(f'"{name}"' for name in later["rules"])
        about += f"\n\nRows {names} were trained later: `{later['command']}` "
        about += f"(CPU, torch {later['torch']}, {later['date']}, {later['seconds']} s)."
    model = (
        f"A byte-level language model of generated text: 2 layers, width {WIDTH}, {HEADS} heads, {BATCH} sequences of "
        f"{LENGTH} bytes per step, {data['steps']} steps, {seeds} seeds. Learning rates rise for 20 steps "
        "and, except for the schedule-free optimizer, fall to a tenth. Rules have `stepsize=4` under "
        "SGD, which keeps the size of gradients."
    )
    return "\n\n".join(["# Repulsion under several optimizers", about, model, COLUMNS, table(data["runs"])]) + "\n"


COLUMNS = """Rules:

- *default*: `repel(model, optimizer)`, that is `SVGD("heads", alpha="auto", ratio=0.01, space="sphere", smoothing=0,
  act_every=4)`, after the step under Muon.
- *sphere*: the same in every step, with the ratio that is stated.
- *published*: `SVGD(stepsize=0.1, alpha=0.01)`.

Columns, means over seeds, and for the default rule over steps in which it acts and steps in which it does not:

- *ratio in the gradient*: |repulsion| / |drive| over all heads, from `handle.report()`; with `force_in="step"` the
  ratio that was set.
- *of one step*: |step with repulsion - step without| / |step without|, from the same weights and optimizer state.
- *of the steps*: the same, but the optimizer without repulsion has never had any in its momentum. A steady force adds
  up there, while gradients of batches partly cancel.
- *norms*: mean norm of a head at the end, divided by that at the start.
- *cosine*: mean cosine between the weights of two heads at the end; -0.333 is the least that four heads can have.
- *loss*: nats per byte on held-out text; *loss - plain*: difference to plain training with the same seed, ± half of
  the 95 % interval."""


def _mean(runs: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def _with_interval(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):+.3f}"
    return f"{mean} ± {half_width(list(values)):.3f}" if len(values) > 1 else mean


if __name__ == "__main__":
    sys.exit(main())
