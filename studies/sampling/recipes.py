r"""Compare the sampling recipes on Age with plain attention: accuracy, likelihood, calibration and spread of heads.

    repulsive train age/ma age/sgld age/sgld-tempered age/spos age/spos-tempered --seeds 7 --jobs 1 --device cpu \
        --set model.units=50 --set model.hidden=50 --set model.mlp=300 --set training.epochs=5 --out runs/recipes
    python -m studies.sampling.recipes --runs runs/recipes/age --minutes 43

Training needs prepared/age; this module writes the tables of the finished runs. Only seeds that all recipes have
finished are used. `--tables` writes the page again from the stored numbers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.output import save

from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.run_reader import RUN
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import cell, finished_in, label_of, table
from repulsive.lab.engine.task import Evaluation
from repulsive.metrics.compare import Comparison
from repulsive.metrics.student import half_width
from repulsive.safety.markdown import format_table

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("ma", "sgld", "sgld-tempered", "spos", "spos-tempered")
SCORES = ("accuracy", "nll", "ece15", "overlap", "relative_dist")
DISTANCE = "distance of weights"
COMMAND = (
    "repulsive train age/ma age/sgld age/sgld-tempered age/spos age/spos-tempered --seeds {seeds} --jobs 1 "
    "--device cpu --set model.units=50 --set model.hidden=50 --set model.mlp=300 --set training.epochs=5 "
    "--out runs/recipes"
)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/recipes/age"), help="folder with the runs of all recipes"
    )
    parser.add_argument("--minutes", type=int, default=0, help="duration of the training, for the page")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sampling", help="folder to write")
    parser.add_argument("--tables", action="store_true", help="write the page of the stored numbers again")
    options = parser.parse_args(words)
    stored = options.out / "recipes.json"
    if not options.tables:
        save(stored, collect(options.runs, options.minutes))
    save(options.out / "recipes.md", describe(json.loads(stored.read_text())))


def collect(folder: Path, minutes: int) -> dict[str, Any]:
    """Read the measurements of all seeds that every recipe has finished, and compare them with plain attention.

    Args:
        folder: has one folder for each recipe, named METHOD+CHANGES.
        minutes: duration of the training.
    """
    folders = {method: next(folder.glob(f"{method}+*")) for method in METHODS}
    finished = {method: finished_in(path) for method, path in folders.items()}
    seeds = sorted(set.intersection(*(set(runs) for runs in finished.values())))
    runs = {method: {seed: finished[method][seed] for seed in seeds} for method in METHODS}
    answers = {
        method: {seed: Evaluation(run.metrics("test"), run.items("test")) for seed, run in own.items()}
        for method, own in runs.items()
    }
    rows = table([(label_of(folders[method], runs[method]), folders[method], answers[method]) for method in METHODS])
    started = read_json(runs["ma"][seeds[0]].path / RUN)["started"]
    return {
        "command": COMMAND.format(seeds=len(seeds)),
        "device": started["device"],
        "versions": {name: started["versions"][name] for name in ("repulsive", "python", "torch")},
        "date": datetime.date.fromisoformat(started["at"][:10]).isoformat(),
        "minutes": minutes,
        "labels": {method: row.label for method, row in zip(METHODS, rows, strict=True)},
        "runs": [measure(method, seed, run) for method in METHODS for seed, run in runs[method].items()],
        "against plain": {
            method: {name: _interval(row.against[name]) for name in ("accuracy", "nll")}
            for method, row in zip(METHODS, rows, strict=True)
            if method != "ma"
        },
    }


def _interval(result: Comparison) -> str:
    return f"{result.difference:+.4f} [{result.low:+.4f}, {result.high:+.4f}], p = {result.p_value:.2f}"


def measure(method: str, seed: int, run: RunFolder) -> dict[str, Any]:
    """Read the numbers of one run: test set at the best epoch, development set and weights at the last one."""
    result = run.result or {}
    return {
        "method": method,
        "seed": seed,
        "best step": result["best_step"],
        "test": {name: result["test"][name] for name in SCORES},
        "last": {name: run.curve("dev", name)[-1][1] for name in SCORES}
        | {DISTANCE: run.curve("heads", "distance")[-1][1]},
    }


def describe(data: dict[str, Any]) -> str:
    """Write the page of results."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    about = (
        f"`{data['command']}` ({data['device']}, {versions}, {data['date']}, {data['minutes']} minutes on a busy CPU)."
    )
    seeds = len({run["seed"] for run in data["runs"]})
    test = means(data, "test", SCORES), differences(data, "test", SCORES)
    last = means(data, "last", (*SCORES, DISTANCE)), differences(data, "last", (*SCORES, DISTANCE))
    parts = ["# Sampling recipes on Age", about, SETTINGS.format(seeds=seeds), "## Test set, best epoch", test[0]]
    parts += [
        "Differences from MA:",
        test[1],
        "## Development set, last epoch",
        last[0],
        "Differences from MA:",
        last[1],
    ]
    return "\n\n".join([*parts, FINDINGS])


def means(data: dict[str, Any], part: str, names: Sequence[str]) -> str:
    """Format mean and standard deviation over seeds, a row for each recipe."""
    rows = []
    for method, label in data["labels"].items():
        runs = [run[part] for run in data["runs"] if run["method"] == method]
        rows.append([label, *(str(cell([run[name] for run in runs])) for name in names)])
    return format_table(["method", *names], rows)


def differences(data: dict[str, Any], part: str, names: Sequence[str]) -> str:
    """Format the differences from plain attention, with 95 % intervals, a row for each recipe."""
    own = {method: [run[part] for run in data["runs"] if run["method"] == method] for method in data["labels"]}
    rows = []
    for method, label in data["labels"].items():
        if method == "ma":
            continue
        stated = data["against plain"][method] if part == "test" else {}
        rows.append([label, *(stated.get(name) or paired(own[method], own["ma"], name) for name in names)])
    return format_table(["method", *names], rows)


def paired(runs: Sequence[dict[str, float]], plain: Sequence[dict[str, float]], name: str) -> str:
    """Format the mean difference of two recipes over seeds, with its interval by Student's t."""
    values = [run[name] - other[name] for run, other in zip(runs, plain, strict=True)]
    mean, width = statistics.fmean(values), half_width(values)
    return f"{mean:+.4f} [{mean - width:+.4f}, {mean + width:+.4f}]"


SETTINGS = """Rules and noise are those of the recipes. For all of them alike the model is smaller (50 LSTM units per
direction, 50 hidden units of the attention and 300 ReLU units, instead of 150, 150 and 1,000) and the training is
shorter (5 epochs, 250 steps, instead of 8 epochs), so that {seeds} seeds fit on a CPU. 30 heads; 12,563 texts for
training, 1,603 for development and 13,178 for testing, prepared with `repulsive prepare age --vectors GLOVE --size 50
--half-vectors --longest 64`. Adam, with a learning rate that falls from 0.004 to zero.

- *SGLD*: noise in the gradient, temperature 1e-8. *SPOS*: the published rule, ratio 1, with the noise of the authors'
  released code.
- *Tempered*: temperature 1/N = 8e-5 with noise that follows Adam's step. The temperature rises with Adam's second
  moment, as 1 - 0.999^t: these runs end at 22 % of it.
- *ece15*: expected calibration error, 15 bins. *overlap*: share of attention that two heads have in common.
  *relative_dist*: distance of head outputs, divided by their size. *distance of weights*: mean distance between the
  weights of two heads.
- Means and standard deviations over seeds. Differences are paired by seed, with 95 % intervals: those of accuracy and
  NLL on the test set cover new seeds and new test items, the others new seeds (Student's t). p is from a sign-flip
  permutation test."""

FINDINGS = """## What it shows

- **Noise does no measurable harm, and no measurable good.** No recipe differs significantly from plain attention in
  accuracy, NLL or calibration on the test set. The intervals exclude changes of accuracy by more than 0.7 points, and
  by more than 0.3 with the tempered recipes. The same holds at the last epoch, with one exception: tempered SPOS lowers
  the NLL by 0.002. Twelve such differences are tested there without a correction, and on the test set, where the
  difference is the same, the interval contains zero.
- **Tempered noise spreads the heads.** Their weights are 1.7 times as far apart as with plain attention, and their
  overlap falls by 0.04 to 0.05. Tempered SGLD, which has no repulsion, does so as much as tempered SPOS: the effect is
  that of the noise. Untempered SGLD does not spread the heads; they overlap by 0.02 more than with plain attention.
  Untempered SPOS, which repels with ratio 1, spreads them most.
- The best epoch is the last one in 30 of 35 runs. The choice of epoch matters more than the method: with seed 0, MA is
  tested after epoch 3 and SGLD after epoch 5, and their NLL differs by 0.04. The development set at the last epoch is
  free of that choice.

Not measured: the recipes' full size and length, the full temperature (it needs thousands of steps), other datasets and
translation. One set of weights of each run is evaluated, a single sample; predictions averaged over many samples,
which is what a posterior is for, were not made.
"""

if __name__ == "__main__":
    main()
