"""Sentence classification at the paper's sizes: tune every method with the same number of trials, then compare them.

    python -m studies.classification.paper_sizes --data prepared --out runs/paper_sizes --seconds 450

Needs prepared folders of yelp, age and snli with vectors of 300 numbers (`studies.classification.splits`). Four stages
for each dataset:

screen   every arm tries the same number of points of one common space (`search_space`), one seed, few reviews
refine   the best points of each arm, three new seeds
final    the best point of each arm by mean NLL on the development set, fresh seeds, test set
control  controls of the arms (`controls`) with the seeds of the final stage, test set; after all other stages

The epoch with the lowest NLL on the development set counts in all stages. The test set is read in the stages final and
control only. The training size of the last three stages follows from the time that the screening took, once, and is
recorded. `--controls-only` adds controls to the records of an earlier run in OUT.

Every finished run is one line of OUT/runs.jsonl, of which the beginning may be in OUT/runs.jsonl.xz; its answers on the
test set are in OUT/answers-DATASET.npz. Rerun the same command to resume. `--tables` trains nothing, and writes the
tables with intervals over seeds and items; without it they are over seeds alone, because resampling items takes a
minute.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import shutil
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from studies.classification import lstm_choice
from studies.classification.controls import Control, list_controls
from studies.classification.lean_runs import ANSWERS, CONTROL, FINAL, MAPS, RECORD, Job, train
from studies.classification.lstm_choice import LstmTest
from studies.classification.search_space import ARMS, BASELINE, FIXED, OWN, trials
from studies.classification.sizes_tables import write_tables

from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.workers import DONE, LOG, WorkerPool
from repulsive.lab.text.folders import read_folder
from repulsive.lab.text.prepared import Prepared
from repulsive.triton_setting import VARIABLE

STAGES = ("screen", "refine", FINAL)  # CONTROL follows when these have ended for all datasets
SCREEN_SEEDS, REFINE_SEEDS = range(100, 101), range(101, 104)
REFINED = 3  # points per arm
SHARE = 0.7  # of the remaining time that the runs after the screening may take: the rest is margin, and other datasets
MARGIN = 1.3  # a run is started if this many times its expected duration is left
ATTEMPTS = 2  # for a run that fails for another reason than divergence
RUNS = "runs.jsonl"
_POLL, _STOP = 0.25, 8.0  # seconds between two checks; seconds at the end for the tables


@dataclass(frozen=True)
class Plan:
    """Plan for one dataset.

    Args:
        changes: settings of all runs.
        screen: training items of the screening; 0: all.
        sizes: training items to choose from for the other stages, ascending; empty: all.
        seeds: seeds of the final stage.
    """

    changes: tuple[str, ...]
    screen: int = 0
    sizes: tuple[int, ...] = ()
    seeds: int = 10


# Captured graphs are not worth their cost here: the GPU is busy with the steps of the other processes.
SIZES = (
    "model.units=300",
    "training.batch=256",
    "training.precision=bf16",
    "training.capture=false",
    "optimizer.warmup_share=0.1",  # the wide ReLU layer diverges for some steps without it
)
PLANS = {
    "yelp": Plan(
        (*SIZES, "model.hidden=350", "model.mlp=3000", "training.epochs=2"),
        screen=30_000,
        sizes=(30_000, 45_000, 60_000, 75_000, 92_000),
    ),
    "age": Plan((*SIZES, "model.hidden=350", "model.mlp=2000", "training.epochs=8"), seeds=40),
    "snli": Plan(
        (*SIZES, "model.hidden=150", "model.mlp=4000", "model.gate=600", "training.epochs=3"),
        screen=30_000,
        sizes=(30_000, 60_000, 90_000),
    ),
}
TINY = ("model.units=8", "model.hidden=6", "model.heads=3", "model.mlp=10", "model.gate=4", "training.epochs=1")


def do(job: Job | LstmTest, file: TextIO) -> None:
    """Do a job in a worker."""
    if isinstance(job, Job):
        train(job, file)
    else:
        lstm_choice.check_lstm(job, file)


class Records:
    """Records of finished runs, and the chosen training sizes, in a file that only grows.

    Args:
        out: folder of the file and of the answers.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.runs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.sizes: dict[str, int] = {}
        self.versions: dict[str, str] = {}
        packed, path = out / f"{RUNS}.xz", out / RUNS
        text = lzma.decompress(packed.read_bytes()).decode() if packed.is_file() else ""
        text += path.read_text() if path.is_file() else ""
        for line in text.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "versions" in line:
            self.versions = line["versions"]
        elif "chosen_size" in line:
            self.sizes[line["dataset"]] = line["chosen_size"]
        else:
            self.runs[tuple(line[name] for name in ("dataset", "stage", "arm", "trial", "seed"))] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line to the file."""
        self._take(line)
        with (self.out / RUNS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, job: Job) -> dict[str, Any]:
        """Take the record and the answers of a finished run from its folder, which is deleted."""
        record: dict[str, Any] = json.loads((job.folder / RECORD).read_text())
        if (job.folder / ANSWERS).is_file():
            with np.load(job.folder / ANSWERS, allow_pickle=False) as answers, _answers(self.out, job.dataset) as file:
                for name, array in answers.items():
                    with file.open(f"{job.answers_name}/{name}.npy", "w") as entry:
                        np.lib.format.write_array(entry, array)
        if (job.folder / MAPS).is_file():
            folder = self.out / "maps"
            folder.mkdir(exist_ok=True)
            shutil.copyfile(job.folder / MAPS, folder / f"{job.dataset}-{job.arm}-{job.seed}.json")
        self.add(record)
        shutil.rmtree(job.folder, ignore_errors=True)
        return record

    def fail(self, job: Job, reason: str) -> None:
        """Record that a run failed; it is not tried again."""
        names = ("dataset", "stage", "arm", "trial", "seed")
        self.add(dict(zip(names, job.key, strict=True)) | {"train": job.train, "failed": reason, "seconds": 0.0})

    def of(self, dataset: str, stage: str, arm: str) -> list[dict[str, Any]]:
        """List the records of an arm in a stage."""
        return [run for key, run in self.runs.items() if key[:3] == (dataset, stage, arm)]


def _answers(out: Path, dataset: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(out / f"answers-{dataset}.npz", "a", zipfile.ZIP_LZMA)


class Study:
    """All runs on one dataset, in the order in which they become known.

    Args:
        dataset: name of the dataset.
        arguments: of the command line.
        records: finished runs.
        work: folder for runs in progress.
    """

    def __init__(self, dataset: str, arguments: argparse.Namespace, records: Records, work: Path) -> None:
        self.dataset, self.arguments, self.records, self.work = dataset, arguments, records, work
        self.plan, self.arms, self.rows = PLANS[dataset], arguments.arms, 0
        self.items = _training_items(arguments.data / dataset)
        self.epochs = count_epochs(self._changes())
        self._rate = 0, 0.0  # number of records, and the seconds per item that follow from them

    def _changes(self) -> tuple[str, ...]:
        return (*self.plan.changes, *(TINY if self.arguments.tiny else ()), *self.arguments.set)

    def size(self, stage: str) -> int | None:
        """Return the number of training items of a stage; None if it is not decided yet."""
        if self.arguments.tiny:
            return min(self.items, 200)
        if stage == "screen":
            return min(self.items, self.plan.screen or self.items)
        return self.records.sizes.get(self.dataset) if self.plan.sizes else self.items

    def decide_size(self, seconds: float, jobs: int) -> None:
        """Choose the largest training size with which all further runs fit, when the screening has ended.

        Args:
            seconds: time left.
            jobs: runs side by side.
        """
        if self.size("refine") is not None or not all(self._ended("screen", arm) for arm in self.arms):
            return
        runs = len(self.arms) * (REFINED * len(REFINE_SEEDS) + self.seeds)
        rate = self.seconds_per_item() * self.epochs
        fitting = [size for size in self.plan.sizes if size * rate * runs / jobs <= SHARE * seconds]
        size = min(self.items, max(fitting, default=self.plan.sizes[0]))
        self.records.add({"dataset": self.dataset, "chosen_size": size, "seconds_left": round(seconds)})
        print(f"{self.dataset}: {size:,} training items in the stages refine and final", flush=True)

    @property
    def seeds(self) -> int:
        return min(self.plan.seeds, self.arguments.seeds or self.plan.seeds)

    def seconds_per_item(self) -> float:
        """Return the mean time per training item and epoch of the runs so far, side by side; 0 without runs."""
        runs = self.records.runs
        if self._rate[0] != len(runs):
            own = [run for run in runs.values() if run["dataset"] == self.dataset and "steps" in run]
            self._rate = len(runs), statistics.fmean(map(_seconds_per_item, own)) if own else 0.0
        return self._rate[1]

    def expected(self, job: Job) -> float:
        """Return the expected duration of a run in seconds, with a margin."""
        return MARGIN * self.seconds_per_item() * job.train * count_epochs(job.changes)

    def pending(self) -> Iterator[Job]:
        """Yield the runs that are determined by the results so far and have no record, the most urgent first."""
        for stage in STAGES:
            for job in self._jobs(stage):
                if job.key not in self.records.runs:
                    yield job

    def _jobs(self, stage: str) -> Iterator[Job]:
        if stage == "screen":
            for trial, arm in ((t, a) for t in range(self.arguments.trials) for a in self.arms):
                yield from self._runs(stage, arm, trial, SCREEN_SEEDS)
        elif self.size(stage) is None:
            return
        elif stage == "refine":
            for arm in self.arms:
                for trial in self.refined(arm):
                    yield from self._runs(stage, arm, trial, REFINE_SEEDS)
        else:
            chosen = {arm: best for arm in self.arms if (best := self.chosen(arm)) is not None}
            for seed in range(self.seeds):
                for arm, trial in chosen.items():
                    yield from self._runs(stage, arm, trial, range(seed, seed + 1))

    def pending_controls(self) -> Iterator[tuple[int, Job]]:
        """Yield rank and run of all controls without a record, for the seeds of plain attention's final runs."""
        chosen = self.all_chosen()
        if BASELINE not in chosen or self.size(CONTROL) is None:
            return
        seeds = self.final_seeds()
        for control in list_controls(self.dataset, chosen, self.epochs):
            for job in self.control_jobs(control, seeds):
                if job.key not in self.records.runs:
                    yield control.rank, job

    def final_seeds(self) -> list[int]:
        """List the seeds of plain attention's final runs."""
        plain = self.records.of(self.dataset, FINAL, BASELINE)
        return sorted(run["seed"] for run in plain if "test" in run and run["seed"] < self.seeds)

    def control_jobs(self, control: Control, seeds: Iterable[int]) -> Iterator[Job]:
        """Yield the runs of a control."""
        point = trials(control.recipe, self.arguments.trials)[control.trial]
        yield from self.make_jobs(
            CONTROL,
            control.recipe,
            control.trial,
            (*point, *control.changes),
            seeds,
            name=control.name,
            control_of=control.of,
            force=control.force,
        )

    @property
    def has_final(self) -> bool:
        """Check that plain attention has runs of the final stage, and that all arms have a chosen point."""
        return bool(self.all_chosen() and self.records.of(self.dataset, FINAL, BASELINE))

    def all_chosen(self) -> dict[str, int]:
        """Return arm -> chosen trial; empty until all arms have one."""
        chosen = {arm: trial for arm in self.arms if (trial := self.chosen(arm)) is not None}
        return chosen if len(chosen) == len(self.arms) else {}

    def _runs(self, stage: str, arm: str, trial: int, seeds: Iterable[int]) -> Iterator[Job]:
        return self.make_jobs(stage, arm, trial, trials(arm, self.arguments.trials)[trial], seeds)

    def make_jobs(
        self,
        stage: str,
        arm: str,
        trial: int,
        changes: Sequence[str],
        seeds: Iterable[int],
        *,
        name: str = "",
        **more: Any,
    ) -> Iterator[Job]:
        """Yield the runs of an arm in a stage.

        Args:
            stage: name of the stage; its training size must be decided.
            arm: recipe of the arm.
            trial: number of the point.
            changes: `key=value` changes that follow those of the dataset and the arm.
            seeds: random seeds.
            name: name in records, if it differs from the arm's.
            **more: further settings of `Job`.
        """
        size = self.size(stage)
        assert size is not None
        common = (f"data.folder={(self.arguments.data / self.dataset).resolve()}", f"data.share={size / self.items}")
        all_changes = (*common, *self._changes(), *FIXED.get(arm, ()), *changes)
        name = name or arm
        for seed in seeds:
            folder = self.work / "-".join([self.dataset, stage, name, str(trial), str(seed)])
            device, rows = self.arguments.device, self.rows or 16
            yield Job(folder, self.dataset, name, stage, trial, seed, all_changes, size, device, rows, arm, **more)

    def _ended(self, stage: str, arm: str) -> bool:
        refined = min(REFINED, self.arguments.trials) * len(REFINE_SEEDS)
        wanted = self.arguments.trials * len(SCREEN_SEEDS) if stage == "screen" else refined
        return len(self.records.of(self.dataset, stage, arm)) >= wanted

    def refined(self, arm: str) -> list[int]:
        """List the trials with the lowest NLL in the screening; empty until it has ended."""
        if not self._ended("screen", arm):
            return []
        losses = mean_losses(self.records.of(self.dataset, "screen", arm))
        return sorted(losses, key=lambda trial: (losses[trial], trial))[:REFINED]

    def chosen(self, arm: str) -> int | None:
        """Return the trial with the lowest mean NLL over the refining seeds; None until they have ended."""
        if not self._ended("refine", arm):
            return None
        losses = mean_losses(self.records.of(self.dataset, "refine", arm))
        return min(losses, key=lambda trial: (losses[trial], trial))


def count_epochs(changes: Sequence[str]) -> int:
    """Return the number of epochs among `key=value` changes; of repeated keys the last counts."""
    return int(dict(change.split("=", 1) for change in changes)["training.epochs"])


def _seconds_per_item(run: dict[str, Any]) -> float:
    return float(run["seconds"] / run["train"] / count_epochs(run["changes"]))


def mean_losses(runs: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return trial -> mean NLL on the development set; infinite if a run diverged."""
    losses: dict[int, list[float]] = {}
    for run in runs:
        losses.setdefault(run["trial"], []).append(dev_loss(run))
    return {trial: statistics.fmean(values) for trial, values in losses.items()}


def dev_loss(run: dict[str, Any]) -> float:
    """Return the NLL on the development set; infinite if the run failed."""
    loss = float(run["dev"]["nll"]) if "dev" in run else math.inf
    return math.inf if math.isnan(loss) else loss


@cache
def _training_items(folder: Path) -> int:
    return int(read_folder(folder)[1]["rows"]["train"])


def choose_rows(pool: WorkerPool, work: Path, jobs: int, seconds: float = 60.0) -> int:
    """Start all workers, test the launches of the LSTM in some of them, and return the fastest number of rows.

    Args:
        pool: the workers.
        work: folder for the results.
        jobs: number of workers.
        seconds: time limit of a test.
    """
    groups: list[tuple[int, ...]] = [(rows,) for rows in lstm_choice.CANDIDATES]
    groups = (groups + [()] * jobs)[:jobs]
    tests = [LstmTest(work / f"lstm-{number}", rows) for number, rows in enumerate(groups)]
    good = [rows for test in _all(pool, tests, seconds) for rows in lstm_choice.passed(test)]
    timed = _all(pool, [LstmTest(work / "lstm-timed", tuple(good), is_timed=True)], seconds) if good else []
    rows = lstm_choice.fastest_rows(timed[0] if timed else {})
    print(f"LSTM: rows that passed {good}, ms per batch {timed}, chosen {rows}", flush=True)
    return rows


def _all(pool: WorkerPool, tests: Sequence[LstmTest], seconds: float) -> list[dict[str, float | None]]:
    """Do tests side by side and return their results; those that fail are left out."""
    end = time.monotonic() + seconds
    for test in tests:
        pool.start(test)
    while pool.busy and time.monotonic() < end:
        for test, outcome in pool.ended(_POLL):
            if outcome != DONE:
                print(test.folder.name, outcome, flush=True)
    paths = [test.folder / lstm_choice.RESULT for test in tests]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def run(
    studies: Sequence[Study],
    records: Records,
    arguments: argparse.Namespace,
    work: Path,
    next_jobs: Callable[[float], Iterable[tuple[Study, Job]]],
) -> None:
    """Train all runs that fit into the time, side by side.

    Args:
        studies: one for each dataset.
        records: finished runs.
        arguments: of the command line.
        work: folder for runs in progress.
        next_jobs: function from the seconds left to the known runs without a record, the most urgent first.
    """
    started = time.monotonic()
    end = started + arguments.seconds - _STOP
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        os.environ.setdefault(VARIABLE, "triton")
    with ExitStack() as stack:
        stack.enter_context(shared_gpu(on_gpu))
        pool = stack.enter_context(WorkerPool(do))
        if on_gpu and arguments.rows == 0:
            arguments.rows = choose_rows(pool, work, arguments.jobs)
        running: set[tuple[Any, ...]] = set()
        failures: dict[tuple[Any, ...], int] = {}
        for study in studies:
            study.rows = arguments.rows
        while time.monotonic() < end:
            left = end - time.monotonic()
            for study, new in next_jobs(left):
                if pool.busy == arguments.jobs:
                    break
                if new.key not in running and study.expected(new) <= left:
                    running.add(new.key)
                    pool.start(new)
            if not pool.busy:
                break
            for job, outcome in pool.ended(_POLL):
                if not isinstance(job, Job):  # a late test of the LSTM
                    continue
                running.discard(job.key)
                now = f"{time.monotonic() - started:4.0f} s"
                if outcome == DONE:
                    record = records.finish(job)
                    print(now, *job.key, f"dev NLL {dev_loss(record):.4f}, {record['seconds']:.1f} s", flush=True)
                    continue
                failures[job.key] = failures.get(job.key, 0) + 1
                print(now, *job.key, outcome, flush=True)
                _print_log(job)
                if failures[job.key] == ATTEMPTS:
                    records.fail(job, outcome)


def queue(studies: Sequence[Study], controls_only: bool) -> Iterator[tuple[Study, Job]]:
    """Yield all known runs without a record, the most urgent first; controls come last, by rank and seed.

    Args:
        studies: one for each dataset; the first has priority, except for controls.
        controls_only: leave out all other runs.
    """
    if not controls_only:
        for study in studies:
            yield from ((study, job) for job in study.pending())
        if not all(study.all_chosen() for study in studies):
            return
    controls = [(rank, job.seed, study, job) for study in studies for rank, job in study.pending_controls()]
    for _, _, study, job in sorted(controls, key=lambda control: control[:2]):
        yield study, job


def _print_log(job: Job) -> None:
    path = job.folder / LOG
    if path.is_file():
        print(path.read_text(errors="replace")[-1500:], flush=True)


def store_labels(data: Path, out: Path, dataset: str) -> None:
    """Add the labels of the test set to the answers, once."""
    with _answers(out, dataset) as file:
        if "labels.npy" not in file.namelist():
            labels = Prepared.load(data / dataset).parts["test"].labels
            with file.open("labels.npy", "w") as entry:
                np.lib.format.write_array(entry, labels.to(torch.uint8).numpy())


def make_parser(about: str | None, out: Path) -> argparse.ArgumentParser:
    """Make a parser with the options of the studies at the paper's sizes.

    Args:
        about: docstring of the script.
        out: default of `--out`.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["yelp", "age"], choices=list(PLANS), help="in this order")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(OWN), help="methods")
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared datasets")
    parser.add_argument("--out", type=Path, default=out, help="folder of records and answers")
    parser.add_argument("--results", type=Path, help="folder of tables; by default --out")
    parser.add_argument("--seconds", type=float, default=450.0, help="time after which the script ends")
    parser.add_argument("--trials", type=int, default=12, help="trials of every arm")
    parser.add_argument("--seeds", type=int, default=0, help="most seeds of the final stage; 0: as planned")
    parser.add_argument("--jobs", type=int, default=14, help="runs side by side")
    parser.add_argument("--rows", type=int, default=0, help="sentences per program of the LSTM kernels; 0: measure")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--tiny", action="store_true", help="tiny models on 200 items: a trial of the script")
    parser.add_argument("--tables", action="store_true", help="write the complete tables, train nothing")
    return parser


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a temporary folder for runs in progress, in memory if possible."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as work:
        yield Path(work)


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, Path("runs/paper_sizes"))
    parser.add_argument(
        "--controls-only", action="store_true", help="train controls of the arms in --out, nothing else"
    )
    arguments = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    records = Records(arguments.out)
    if not arguments.tables:
        with work_folder() as work:
            studies = [Study(name, arguments, records, work) for name in arguments.datasets]
            if arguments.controls_only and not any(study.has_final for study in studies):
                parser.error(
                    f"--controls-only: {arguments.out / RUNS} has no final runs of {BASELINE}; train them first"
                )

            def next_jobs(left: float) -> Iterator[tuple[Study, Job]]:
                for study in studies if not arguments.controls_only else ():
                    study.decide_size(left, arguments.jobs)
                yield from queue(studies, arguments.controls_only)

            records.add({"versions": versions()})
            run(studies, records, arguments, work, next_jobs)
        for name in arguments.datasets:
            if any(key[:2] == (name, FINAL) for key in records.runs):
                store_labels(arguments.data, arguments.out, name)
    answers = arguments.out if arguments.tables else None
    print(write_tables(list(records.runs.values()), records.versions, answers, arguments.results or arguments.out))


if __name__ == "__main__":
    main()
