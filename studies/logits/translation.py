"""Repulsion between attention logits in translation, with attraction and weight decay as controls.

    python -m studies.logits.translation --data prepared --out runs/logits_translation --limit 500
    python -m studies.logits.translation --tables

Needs prepared/multi30k and prepared/europarl-160k (`repulsive prepare translation`). Every arm tries the same four
learning rates with one seed (stage tune), and then trains the one with the lowest NLL on the development set with other
seeds (stage final), which alone read the test set. The learning rate falls to zero, so that runs with the same seed
differ little.

Final runs also measure the heads over training: entropy and largest logit of attention, similarity of logits, and, at a
few epochs, redundancy: the token accuracy on the development set without each head in turn.

Every finished run is one line of RECORDS. Rerun the same command to resume; `--tables` trains nothing and writes the
tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from studies.altered_forces import ATTRACTION
from studies.arguments import errors_in_one_line
from studies.logits.translation_tables import write_tables
from studies.translation.measuring_task import MeasuringTranslationTask
from studies.unsaved_loop import SilentFolder, UnsavedLoop
from torch import nn

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.errors import DataError, DivergedError
from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.engine.workers import DONE, WorkerPool
from repulsive.lab.runs.panels import redundant
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.systems.translation.measure import accuracy_of

TUNE, FINAL = "tune", "final"
TUNE_SEED = 100
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
PROBED = 500  # sentences of the development set on which heads are removed
MARGIN = 1.2  # a run is started if this many times the longest one is left
_POLL = 0.25


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Args:
        method: its recipe.
        changes: `key=value` changes of the recipe.
        force: altered force of the rule, see `altered_forces`.
    """

    method: str
    changes: tuple[str, ...] = ()
    force: str = ""


@dataclass(frozen=True)
class Dataset:
    """A dataset and its training.

    Args:
        recipes: folder of its recipes.
        changes: of all runs.
        seeds: number of seeds of the final stage.
        probes: epochs after which redundancy is measured.
    """

    recipes: str
    changes: tuple[str, ...]
    seeds: int
    probes: tuple[int, ...]


ARMS = {
    "plain": Arm("ma"),
    "logits": Arm("logits"),
    "attraction": Arm("logits", force=ATTRACTION),
    "decay": Arm("ma", ("optimizer.weight_decay=0.3",)),
}
SMALL = (
    "packed=true",
    "model.width=256",
    "model.depth=[3, 3]",
    "model.feed_forward=1024",
    "model.heads=4",
    "optimizer.schedule=cosine",
    "training.batch=4096",
    "training.precision=bf16",
    "training.average=0",
    "search.at_once=16384",
)
DATASETS = {
    "multi30k": Dataset(
        "multi30k",
        (*SMALL, "model.dropout=0.3", "optimizer.warmup=400", "training.epochs=20"),
        seeds=6,
        probes=(2, 5, 10, 20),
    ),
    "europarl-160k": Dataset(
        "europarl",
        (*SMALL, "model.dropout=0.1", "optimizer.warmup=400", "training.epochs=3"),
        seeds=4,
        probes=(1, 2, 3),
    ),
}


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        dataset: name of the dataset.
        arm: name of the arm.
        stage: `TUNE` or `FINAL`.
        rate: learning rate.
        seed: random seed.
        changes: `key=value` changes besides those of dataset and arm.
        folder: folder of its log and record.
        device: "cpu", "cuda" or None.
    """

    dataset: str
    arm: str
    stage: str
    rate: float
    seed: int
    changes: tuple[str, ...]
    folder: Path
    device: str | None = None

    @property
    def key(self) -> tuple[str, str, str, float, int]:
        return self.dataset, self.arm, self.stage, self.rate, self.seed


class WatchedTask(MeasuringTranslationTask):
    """Translation whose final runs keep the curves of heads over training, and which alone read the test set.

    Args:
        recipe: recipe of the run.
        is_final: translate the test set and measure redundancy.
        probes: epochs after which redundancy is measured.
    """

    def __init__(self, recipe: Any, is_final: bool, probes: Sequence[int]) -> None:
        super().__init__(recipe)
        self._is_final, self._probes = is_final, probes
        self.curve: list[dict[str, float]] = []

    def validate(self, model: nn.Module) -> Evaluation:
        evaluation = super().validate(model) if self._is_final else self._likelihood(model, "dev")
        point = {"epoch": len(self.curve) + 1.0} | {k: float(f"{v:.5g}") for k, v in evaluation.metrics.items()}
        if self._is_final and point["epoch"] in self._probes:
            part = self.parts["dev"]
            accuracy = accuracy_of(part, min(PROBED, len(part)))
            change = 100 * head_ablation(model, accuracy, layers=find_attention_layers(model)).change.flatten()
            change = change[~change.isnan()]
            point |= {"redundant": redundant(change), "loss_of_a_head": -float(change.mean())}
        self.curve.append(point)
        return evaluation

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        if part == "dev":
            return self._likelihood(model, part)
        return super().evaluate(model, part) if self._is_final else Evaluation({})


def train(job: Job, file: TextIO) -> None:
    """Train one run in a worker, and write its record."""
    started = time.monotonic()
    arm, dataset = ARMS[job.arm], DATASETS[job.dataset]
    changes = [*dataset.changes, *arm.changes, f"optimizer.lr={job.rate}", *job.changes, f"seed={job.seed}"]
    recipe = open_recipe(f"{dataset.recipes}/{arm.method}", changes)
    task = WatchedTask(recipe, job.stage == FINAL, dataset.probes)
    loop = UnsavedLoop(task, recipe, SilentFolder(job.folder), Watcher(), job.device)
    loop.force = arm.force
    record: dict[str, Any] = dict(zip(("dataset", "arm", "stage", "rate", "seed"), job.key, strict=True))
    try:
        result = loop.run()
    except DivergedError as error:
        record["failed"] = " ".join(str(error).split())
    else:
        record |= {"steps": result["steps"], "dev": result["dev"], "test": result["test"]}
        if job.stage == FINAL:
            record["curve"] = task.curve
    device = torch.cuda.get_device_name(loop.device) if loop.device.type == "cuda" else loop.device.type
    record |= {"seconds": round(time.monotonic() - started, 1), "device": device, "versions": versions()}
    (job.folder / "record.json").write_text(json.dumps(record))


Records = Mapping[tuple[str, str, str, float, int], Mapping[str, Any]]


def read_records(path: Path) -> dict[tuple[str, str, str, float, int], dict[str, Any]]:
    """Read the finished runs."""
    lines = path.read_text().splitlines() if path.is_file() else []
    runs = [json.loads(line) for line in lines]
    return {(r["dataset"], r["arm"], r["stage"], r["rate"], r["seed"]): r for r in runs}


def chosen_rate(records: Records, dataset: str, arm: str) -> float | None:
    """Return the learning rate with the lowest NLL on the development set; None before all have been tried."""
    tried = [records.get((dataset, arm, TUNE, rate, TUNE_SEED)) for rate in RATES]
    if any(run is None for run in tried):
        return None
    losses = {rate: run["dev"]["nll"] for rate, run in zip(RATES, tried, strict=True) if run and "dev" in run}
    return min(losses, key=lambda rate: losses[rate]) if losses else None


def wanted(records: Records, arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield the runs that are missing and determined so far, tuning first, then seed by seed."""

    def job(name: str, arm: str, stage: str, rate: float, seed: int) -> Job:
        folder = arguments.out / name / arm / f"{stage}-{rate:g}-{seed}"
        changes = (f"data.folder={arguments.data / name}", *arguments.set)
        return Job(name, arm, stage, rate, seed, changes, folder, arguments.device)

    jobs = [job(name, arm, TUNE, rate, TUNE_SEED) for name in arguments.datasets for rate in RATES for arm in ARMS]
    rates = {(name, arm): chosen_rate(records, name, arm) for name in arguments.datasets for arm in ARMS}
    for seed in range(max(DATASETS[name].seeds for name in arguments.datasets)):
        for (name, arm), rate in rates.items():
            if rate is not None and seed < min(DATASETS[name].seeds, arguments.seeds):
                jobs.append(job(name, arm, FINAL, rate, seed))
    yield from (job for job in jobs if job.key not in records)


def run(arguments: argparse.Namespace) -> None:
    """Train as many runs as the time allows."""
    end = time.monotonic() + arguments.limit
    records = read_records(arguments.records)
    started: dict[Job, float] = {}
    failed: set[Job] = set()
    longest = 0.0
    with shared_gpu(arguments.device != "cpu"), WorkerPool(train) as pool:
        while True:
            for job in wanted(records, arguments):
                if pool.busy >= arguments.jobs or time.monotonic() + MARGIN * longest > end:
                    break
                if job not in started and job not in failed:
                    started[job] = time.monotonic()
                    job.folder.mkdir(parents=True, exist_ok=True)
                    pool.start(job)
            if not pool.busy:
                break
            for job, outcome in pool.ended(_POLL):
                longest = max(longest, time.monotonic() - started.pop(job))
                if outcome != DONE:
                    failed.add(job)
                    print(job.folder, outcome, flush=True)
                    continue
                record = json.loads((job.folder / "record.json").read_text())
                records[job.key] = record
                arguments.records.parent.mkdir(parents=True, exist_ok=True)
                with arguments.records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                loss = record.get("dev", {}).get("nll", record.get("failed"))
                print(f"{job.folder}: {record['seconds']} s, NLL {loss}", flush=True)
    mean = statistics.fmean([record["seconds"] for record in records.values()] or [0.0])
    print(f"{len(records)} runs so far, {mean:.0f} s each; {len(list(wanted(records, arguments)))} to do", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared data")
    parser.add_argument("--out", type=Path, default=Path("runs/logits_translation"), help="folder of logs")
    parser.add_argument("--records", type=Path, default=Path("results/logits/translation.jsonl"))
    parser.add_argument("--results", type=Path, default=Path("results/logits"), help="folder of the tables")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--seeds", type=int, default=99, help="at most so many in the final stage")
    parser.add_argument("--jobs", type=int, default=8, help="number of parallel runs")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of this call")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--tables", action="store_true", help="train nothing; write the tables from the records")
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
        if arguments.tables:
            if not arguments.records.is_file():
                raise DataError(f"{arguments.records}: there is no such file; train runs first, without --tables")
            write_tables(read_records(arguments.records), arguments.results)
        else:
            run(arguments)


if __name__ == "__main__":
    main()
