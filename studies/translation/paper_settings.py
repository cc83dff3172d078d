"""Translation at the paper's settings: does the published rule hurt a Transformer there, too?

    repulsive prepare translation --data europarl --pairs 160000 --out prepared/europarl-160k      # three minutes
    tar cJf europarl-160k.tar.xz -C prepared europarl-160k                 # 10 MB, to carry it to another machine
    python -m studies.translation.paper_settings --data prepared/europarl-160k --limit 560         # again to resume
    python -m studies.translation.paper_settings --tables

Europarl cut to 160,000 pairs, 6+6 layers, width 512, 4 heads, learning rate 5e-4, warm-up of 4,000 steps, 37 epochs of
1,244 updates with 4,096 tokens. The rows plain, published and kernel-free are trained first, seed by seed, then all
others.

The rows of a seed train side by side; with `--together` all rows and seeds do, so that the GPU never waits for a seed
to be compiled or evaluated. When the time of `--limit` (seconds) ends they stop after the same epoch, and the test set
is translated with the weights of that epoch, so that the comparison is fair; the learning rate does not depend on the
length of the training. `--until 32` stops runs after epoch 32, to compare them with runs that stopped there for lack of
time. A finished training is evaluated with the mean of its last ten epochs. Rerun the same command to resume from the
checkpoints in OUT, each 0.7 GB for a run. A run whose process dies is resumed once by itself. Do not kill other
programs that share the GPU: with NVIDIA's MPS all of them die. `--limit` includes `--reserve` seconds at the end for
translations and checkpoints.

A run takes 230 s of one H200: an epoch of four runs side by side took 24.8 s, one of six 36.9 s. Layers are compiled
once in each process, which takes half a minute, less if torch's cache is warm; forward and backward are then replayed
as one CUDA graph. The results so far are in RECORDS, two small files: `answers.npz` and `runs.json.xz`. Runs that are
complete there are not trained again, even if OUT is empty, so that another machine can go on with the next seed.

`--tables` writes RESULTS/NAME.md, .json and .svg from the records; NAME is paper_settings by default. To try the script
on a CPU, use prepared data of any size:

    python -m studies.translation.paper_settings --tiny --device cpu --data prepared/multi30k --epochs 4 --seeds 2
        --rows plain published --limit 120 --reserve 10 --out trial/runs --records trial/records
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from studies.arguments import errors_in_one_line
from studies.engine import check, is_finished
from studies.translation.equal_epochs import Gate, Gatekeeper, Job, train
from studies.translation.paper_records import Key, Records
from studies.translation.paper_rows import COMMON, EPOCHS, GROUPS, ROWS, TINY, PaperRow
from studies.translation.paper_tables import write_tables

from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.stop_signals import Request, Stopped, listening
from repulsive.lab.engine.workers import DONE, STOPPED, WorkerPool
from repulsive.lab.runs.plan import plan

LEAST = 150.0  # seconds that must be left to start the runs of a seed on a GPU
ATTEMPTS = 2  # at the runs of a seed: one whose process dies is resumed from its last checkpoint
_POLL = 0.25


def make_spec(row: PaperRow, seed: int, arguments: argparse.Namespace) -> Spec:
    """Specify a run."""
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    changes = [f"data.folder={arguments.data}", f"training.epochs={arguments.epochs}", *COMMON]
    changes += [] if on_gpu else ["training.compile=false"]
    changes += [*(TINY if arguments.tiny else ()), *row.changes, *arguments.set]
    (spec,) = plan([f"iwslt14/{row.method}"], changes, seed=seed, device=arguments.device)
    return dataclasses.replace(spec, folder=arguments.out / row.name / f"seed-{seed}")


def cohorts(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[Key, Spec]]]:
    """Yield the runs that train side by side, the most urgent first, with a name."""
    counts = {name: arguments.seeds if own is None else own for name, own in arguments.rows}

    def specs_of(rows: Iterable[PaperRow], seed: int) -> dict[Key, Spec]:
        chosen = [row for row in rows if seed < counts.get(row.name, 0)]
        return {(row.name, seed): make_spec(row, seed, arguments) for row in chosen}

    seeds = range(max(counts.values()))
    if arguments.together:
        yield "gate", {key: spec for seed in seeds for key, spec in specs_of(ROWS.values(), seed).items()}
        return
    for number, group in enumerate(GROUPS):
        for seed in seeds:
            if specs := specs_of(group, seed):
                yield f"gate-{number}-{seed}", specs


def row_and_seeds(text: str) -> tuple[str, int | None]:
    """Parse an argument of `--rows`: a row, or a row and its number of seeds.

    Example:
        >>> row_and_seeds("plain"), row_and_seeds("disagreement:1")
        (('plain', None), ('disagreement', 1))
    """
    name, _, count = text.partition(":")
    if name not in ROWS:
        raise argparse.ArgumentTypeError(f"{name!r} is not a row; choose from {', '.join(ROWS)}")
    if count and not (count.isdecimal() and int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: the number of seeds must be a whole number, at least 1")
    return name, int(count) if count else None


def run(arguments: argparse.Namespace, records: Records) -> None:
    """Train as many runs as the time allows.

    Raises:
        Stopped: a signal was received; runs that had started are saved.
        RunError: the records have runs with other settings.
    """
    started = time.monotonic()
    end = started + arguments.limit - arguments.reserve
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, str(max(1, cores // 4)))
    planned = {key: spec for _, specs in cohorts(arguments) for key, spec in specs.items()}
    records.check_settings(spec.recipe for spec in planned.values())
    folders = {key: spec.folder for key, spec in planned.items()}
    with ExitStack() as stack:
        stack.enter_context(shared_gpu(on_gpu))
        request = stack.enter_context(listening())
        pool = stack.enter_context(WorkerPool(train))
        for name, specs in cohorts(arguments):
            for spec in specs.values():
                check(spec)
            has_failed, attempts = True, 0
            while has_failed and attempts < ATTEMPTS:
                open_runs = {key: spec for key, spec in specs.items() if not records.is_complete(key, arguments.until)}
                missing = [spec for spec in open_runs.values() if not is_finished(spec)]
                if not missing or end - time.monotonic() < (LEAST if on_gpu else 0.0):
                    break
                gate = Gate(arguments.out / f"{name}.json")
                jobs = [Job(spec, gate) for spec in missing]
                gate.path.parent.mkdir(parents=True, exist_ok=True)
                keeper = Gatekeeper(gate, jobs, arguments.epochs, end, arguments.until)
                has_failed = _train_together(pool, jobs, keeper, request, started)
                attempts += 1
                records.collect(folders)
                if request.number is not None:
                    raise Stopped("stopped; rerun the same command to resume", request.number)
    records.collect(folders)
    left = sum(not records.is_complete(key, arguments.until) for key in folders)
    print(f"{time.monotonic() - started:.0f} s, {left} of {len(folders)} runs left", flush=True)


def _train_together(
    pool: WorkerPool, jobs: Sequence[Job], keeper: Gatekeeper, request: Request, started: float
) -> bool:
    """Train runs side by side to their end or to their gate; return whether one of them failed."""
    for job in jobs:
        pool.start(job)
    allowed, stopping, has_failed = 0, False, False
    while pool.busy:
        if request.number is not None and not stopping:
            stopping = True
            pool.stop()
        keeper.look()
        if keeper.allowed > allowed:
            allowed = keeper.allowed
            took = f"{keeper.seconds_per_epoch:.1f} s an epoch"
            print(f"{time.monotonic() - started:5.0f} s: training to epoch {allowed}, {took}", flush=True)
        for job, outcome in pool.ended(_POLL):
            keeper.remove(job)
            state = f"after {job.epochs_done} epochs"
            print(f"{time.monotonic() - started:5.0f} s: {job.folder} {outcome} {state}", flush=True)
            if outcome not in (DONE, STOPPED):
                has_failed = True
                print(f"see {job.folder / 'log.txt'}", flush=True)
    return has_failed


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("prepared/europarl-160k"), help="prepared data")
    parser.add_argument("--out", type=Path, default=Path("runs/paper_settings"), help="folder of runs")
    parser.add_argument("--records", type=Path, default=Path("results/translation/paper_settings"))
    parser.add_argument("--results", type=Path, default=Path("results/translation"), help="folder of the tables")
    parser.add_argument("--name", default="paper_settings", help="of the files of the tables, without endings")
    rows = [(name, None) for name in ROWS]
    about = "all by default; NAME:N trains N seeds of a row"
    parser.add_argument("--rows", nargs="+", default=rows, type=row_and_seeds, metavar="NAME", help=about)
    parser.add_argument("--seeds", type=int, default=3, help="numbered from 0")
    parser.add_argument("--together", action="store_true", help="train all rows and seeds side by side")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--until", type=int, help="stop after this epoch, so that runs compare with stopped ones")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of this call")
    parser.add_argument("--reserve", type=float, default=75.0, help="seconds of them for translations and checkpoints")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters, to try the script")
    parser.add_argument("--tables", action="store_true", help="train nothing; write the tables from the records")
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
        records = Records(arguments.records)
        if arguments.tables:
            write_tables(records, arguments.results, arguments.name)
        else:
            run(arguments, records)


if __name__ == "__main__":
    main()
