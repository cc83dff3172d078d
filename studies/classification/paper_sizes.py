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
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import torch
from studies.arguments import errors_in_one_line
from studies.classification import lstm_choice
from studies.classification.lean_runs import Job, train
from studies.classification.lstm_choice import LstmTest
from studies.classification.search_space import ARMS, BASELINE, OWN
from studies.classification.sizes_records import Records, store_labels
from studies.classification.sizes_study import PLANS, Study
from studies.classification.sizes_tables import write_tables
from studies.tuning.choices import FINAL
from studies.tuning.records import RUNS
from studies.tuning.side_by_side import POLL, train_side_by_side, work_folder

from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.workers import DONE, WorkerPool
from repulsive.triton_setting import VARIABLE

_STOP = 8.0  # seconds at the end for the tables


def do(job: Job | LstmTest, file: TextIO) -> None:
    """Do a job in a worker."""
    if isinstance(job, Job):
        train(job, file)
    else:
        lstm_choice.check_lstm(job, file)


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
        for test, outcome in pool.ended(POLL):
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
    end = time.monotonic() + arguments.seconds - _STOP
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        os.environ.setdefault(VARIABLE, "triton")
    with ExitStack() as stack:
        stack.enter_context(shared_gpu(on_gpu))
        pool = stack.enter_context(WorkerPool(do))
        if on_gpu and arguments.rows == 0:
            arguments.rows = choose_rows(pool, work, arguments.jobs)
        for study in studies:
            study.rows = arguments.rows

        def timed_jobs(left: float) -> Iterator[tuple[float, Job]]:
            yield from ((study.expected(job), job) for study, job in next_jobs(left))

        train_side_by_side(pool, records, timed_jobs, jobs=arguments.jobs, end=end)


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


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__, Path("runs/paper_sizes"))
    parser.add_argument(
        "--controls-only", action="store_true", help="train controls of the arms in --out, nothing else"
    )
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
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
