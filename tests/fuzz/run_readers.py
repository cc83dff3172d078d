"""Readers of trained and stopped runs."""

import shutil
import signal
from contextlib import suppress
from pathlib import Path

from repulsive.lab.engine.stop_signals import Stopped
from tests.fuzz.harness import Subject
from tests.fuzz.prepared_readers import seal_manifests
from tests.lab.engine import tiny


def make_run(folder: Path) -> None:
    data = tiny.make_data(folder.parent / "data")
    tiny.train(data, folder / "runs" / "seed-0", "training.log_every=5")


def read_run(folder: Path, out: Path) -> None:
    """What `ls`, `report` and `evaluate` read of a run."""
    from repulsive.lab.engine import tables
    from repulsive.lab.engine.runs import RunFolder
    from repulsive.lab.runs.listing import describe_runs
    from repulsive.lab.runs.load import facts, open_methods
    from repulsive.lab.runs.score import score

    describe_runs(folder)
    RunFolder(folder / "runs" / "seed-0").checkpoints.latest()
    methods = open_methods([folder / "runs"])
    facts(methods)
    for method in methods:
        method.curves("train", "loss")
    tables.as_markdown(tables.rows([folder / "runs"]))
    score([folder / "runs"], "test", device="cpu")


def make_stopped(folder: Path) -> None:
    """A training that was stopped in the middle, with two checkpoints."""
    data = tiny.make_data(folder.parent / "data")
    watcher = tiny.At(8, tiny.signalled(signal.SIGTERM))
    with suppress(Stopped):
        tiny.train(data, folder / "seed-0", "training.log_every=2", "training.save_every=4", watcher=watcher)
    assert len(list((folder / "seed-0" / "checkpoints").glob("step-*"))) == 2


def go_on(folder: Path, out: Path) -> None:
    """Resume a copy of it, which is what the training may write to."""
    from repulsive.lab.engine.launch import Spec
    from repulsive.lab.engine.runs import RunFolder
    from repulsive.lab.systems.registry import from_tables

    shutil.copytree(folder, out, symlinks=True)
    recipe = from_tables(RunFolder(out / "seed-0").recipe, "the run")
    if recipe.training.epochs > 2 or recipe.training.batch < 8:
        return  # a longer training than a test has time for
    made = tiny.loop(Spec(recipe, out / "seed-0", "cpu"))
    try:
        made.run()
    finally:
        made.folder.close()


def run_words(folder: Path, out: Path) -> list[str]:
    return ["evaluate", str(folder / "runs"), "--device", "cpu"]


RUNS = [
    Subject("run", make_run, read_run, run_words),
    Subject("run sealed", make_run, read_run, run_words, sealed=seal_manifests),
    Subject("resume", make_stopped, go_on, among="seed-0/[!t]*/**/*"),
    Subject("resume sealed", make_stopped, go_on, among="seed-0/checkpoints/**/*", sealed=seal_manifests),
]
