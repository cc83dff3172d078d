"""Translation and graphs to text: tune every method with the same number of trials, then compare them.

    python -m studies.budget.run --system translation --data prepared --out runs/budget --seconds 600 --device cuda
    python -m studies.budget.run --system graphs --data prepared --out runs/budget --seconds 500 --device cuda

Needs prepared/multi30k or prepared/webnlg. Stages:

screen   every arm tries the same number of points of one common space (`systems`), one seed, few epochs
refine   the best points of each arm, three new seeds
final    the best point of each arm by mean NLL on the development set, fresh seeds, test set
control  for each arm that is significantly better than plain attention, with the same seeds, test set: plain attention
         with its settings; if it repels heads, attraction, and the force of another head

The epoch with the lowest NLL on the development set counts in all stages. The test set is read in the stages final and
control only. The epochs of the last three stages are the same for all arms. They follow from the time that the
screening took, once, and are recorded; `--epochs` sets them.

Every finished run is one line of OUT/SYSTEM/runs.jsonl. Rerun the same command to resume. `--plan` prints the pending
runs and the time that they need; `--tables` writes the tables, which every call does at its end. Both train nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from studies.arguments import errors_in_one_line
from studies.budget.study import STAGES, Records, Study
from studies.budget.systems import SYSTEMS
from studies.budget.tables import write_tables
from studies.budget.training import Job, train
from studies.tuning.choices import CONTROL, FINAL, SCREEN
from studies.tuning.records import RUNS
from studies.tuning.side_by_side import train_side_by_side, work_folder

from repulsive.errors import DataError, RunError
from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.runs import versions
from repulsive.lab.engine.workers import WorkerPool

_STOP = 3.0  # seconds at the end for the tables


def describe_plan(study: Study, seconds: float, jobs: int) -> str:
    """Describe the pending runs of each stage and the time that they are expected to take.

    Args:
        study: the runs.
        seconds: time left.
        jobs: runs side by side.
    """
    lines, total, later = [], 0.0, study.epochs(FINAL) or study.arguments.epochs
    for stage in STAGES:
        if stage != SCREEN:
            later = later or study.fitting_epochs(seconds - total, jobs)
        epochs = study.lengths.screen if stage == SCREEN else later
        done = sum(key[1] == stage for key in study.records.runs)
        known = sum(job.stage == stage for job in study.pending())
        is_known = known or (stage == CONTROL and study.has_ended)
        runs = known if is_known else max(0, study.count_runs(stage) - done)
        needed = runs * study.run_seconds(epochs, jobs) / jobs
        total += needed
        note = " for each arm that is better than plain attention" if stage == CONTROL and not is_known else ""
        lines.append(f"{stage}: {done} runs done, {runs} to do{note}, {epochs} epochs, {needed:.0f} s")
    source = "runs so far" if study.records.runs else "earlier studies on one H200"
    return "\n".join([*lines, f"in all {total:.0f} s with {jobs} side by side, estimated from {source}"])


def run(study: Study, records: Records, arguments: argparse.Namespace) -> None:
    """Train all runs that fit into the time, side by side."""
    end = time.monotonic() + arguments.seconds - _STOP
    folder = arguments.data / study.system.dataset
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; make it with: {study.system.prepare}")
    if arguments.epochs and records.epochs not in (None, arguments.epochs):
        raise RunError(f"{records.out}: its runs have {records.epochs} epochs, not {arguments.epochs}; remove --epochs")
    records.check_settings(study.settings)
    records.add({"versions": versions()})

    def next_jobs(left: float) -> Iterator[tuple[float, Job]]:
        study.decide_epochs(left, arguments.jobs)
        yield from ((study.expected(job, arguments.jobs), job) for job in study.pending())

    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    with shared_gpu(on_gpu), WorkerPool(train) as pool:
        train_side_by_side(pool, records, next_jobs, jobs=arguments.jobs, end=end)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True, choices=list(SYSTEMS))
    parser.add_argument("--arms", nargs="+", help="methods besides plain attention; all by default")
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared datasets")
    parser.add_argument("--out", type=Path, default=Path("runs/budget"), help="folder of records, one for each system")
    parser.add_argument("--results", type=Path, help="folder of tables; by default that of the records")
    parser.add_argument("--seconds", type=float, default=600.0, help="time after which the script ends")
    parser.add_argument("--trials", type=int, default=0, help="trials of every arm; 0: as planned for the system")
    parser.add_argument("--seeds", type=int, default=0, help="seeds of the final stage; 0: as planned for the system")
    parser.add_argument("--epochs", type=int, default=0, help=f"epochs after the stage {SCREEN}; 0: what fits")
    parser.add_argument("--jobs", type=int, default=12, help="runs side by side")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--tiny", action="store_true", help="tiny models on few items: a trial of the script")
    parser.add_argument("--plan", action="store_true", help="print the pending runs, train nothing")
    parser.add_argument("--tables", action="store_true", help="write the tables, train nothing")
    arguments = parser.parse_args(words)
    system = SYSTEMS[arguments.system]
    arguments.arms = [system.baseline, *(arguments.arms or system.arms)]
    if unknown := set(arguments.arms) - system.arms.keys():
        parser.error(f"--arms {' '.join(sorted(unknown))}: expected some of {', '.join(system.arms)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = arguments.out / arguments.system
    with errors_in_one_line(parser), work_folder() as work:
        records = Records(out)
        study = Study(system, arguments, records, work)
        if arguments.plan:
            print(describe_plan(study, arguments.seconds, arguments.jobs))
            return
        if not arguments.tables:
            run(study, records, arguments)
        elif not records.runs:
            raise DataError(f"{out / RUNS}: no runs; train them first, without --tables")
        if records.runs:
            print(write_tables(system, records, arguments.results or out))
        print(describe_plan(study, arguments.seconds, arguments.jobs))


if __name__ == "__main__":
    main()
