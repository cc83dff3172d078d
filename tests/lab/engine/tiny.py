"""A training that takes a moment: its data, its recipe, and its results."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.plan import plan
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import make_task, open_recipe

ROOT = Path(__file__).resolve().parents[3]
STEPS = 20  # of two epochs
PATIENCE = 600.0  # seconds to wait for another process; on a busy machine, too, only one that hangs takes longer
# SPOS and dropout draw random numbers, and SPOS measures heads: resuming can go wrong in more ways than without them.
RECIPE = """
task = "classification"
label = "tiny"
data.folder = "{data}"
model = {{ units = 4, hidden = 4, heads = 3, mlp = 8, embedding = 6, dropout = 0.1 }}
optimizer = {{ name = "adam", lr = 2e-3, clip = 5.0 }}
training = {{ epochs = 2, batch = 32 }}
[method]
rule = "spos"
stepsize = 1.0
alpha = "auto"
ratio = 0.3
beta = 1e4
noise = "released"
order = "repel-clip"
temperature = "data"
"""
ABSENT = ("spacy", "optuna", "pydantic", "datasets", "typer")  # packages that training must not need


def make_data(folder: Path) -> Path:
    """Prepare data, and write a recipe for it beside the folder."""
    prepare("reviews", None, folder, train=300, dev=60, test=60, jobs=1)
    toml(folder).write_text(RECIPE.format(data=folder))
    return folder


def toml(data: Path) -> Path:
    return data.with_name("tiny.toml")


def recipe(data: Path, *more: str):
    return open_recipe(toml(data), more)


def words(data: Path, out: Path, *more: str) -> list[str]:
    """Arguments of `repulsive train`."""
    settings = [word for change in more for word in ("--set", change)]
    return ["train", str(toml(data)), "--out", str(out), "--device", "cpu", *settings]


def folder_of(data: Path, out: Path, *more: str) -> Path:
    return plan([str(toml(data))], more, out=out)[0].folder


def loop(spec: Spec, watcher: Watcher | None = None) -> Loop:
    return Loop(make_task(spec.recipe), spec.recipe, RunFolder(spec.folder), watcher or Watcher(), "cpu")


def after_gradients(made: Loop, action: Callable[[], None]) -> None:
    """Run `action` in every step, after the gradients are computed and before the optimizer's step."""
    build = made._build

    def build_with_action() -> None:
        build()
        gradients = made._gradients

        def compute(batch: Any) -> None:
            gradients(batch)
            action()

        made._gradients = compute

    made._build = build_with_action


def train(data: Path, folder: Path, *more: str, watcher: Watcher | None = None) -> RunFolder:
    """Train in this process."""
    made = loop(Spec(recipe(data, *more), folder, "cpu"), watcher)
    try:
        made.run()
    finally:
        made.folder.close()
    return made.folder


class At(Watcher):
    """Calls a function once the loss of a step has been logged."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def logged(self, kind, step, values):
        if kind == "train" and step == self.step:
            self.action()


def signalled(*numbers: int):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def environment() -> dict[str, str]:
    """Environment for processes: they import the code under test, not the installed package."""
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "repulsive", *arguments]


def default_signals() -> None:
    """Restore the handler of Ctrl-C in a child process: background jobs of a shell, and their children, ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outcome(folder: Path) -> tuple[dict[str, torch.Tensor], list[str], dict]:
    """Best weights and answers, lines of metrics, and the result without its run time."""
    run = RunFolder(folder)
    _, state = run.best.latest()
    tensors = state["model"] | {f"test.{name}": x for name, x in run.items("test").items()}
    result = {key: value for key, value in run.result.items() if key != "seconds"}
    return tensors, (folder / "metrics.jsonl").read_text().splitlines(), result


def assert_same(first: Path, second: Path) -> None:
    """Check that weights, answers and all logged numbers are bit-identical."""
    (a, lines, result), (b, others, expected) = outcome(first), outcome(second)
    assert lines == others
    assert result == expected
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def steps(folder: Path) -> list[int]:
    """Steps whose loss was logged."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [json.loads(line)["step"] for line in lines if line.startswith('{"kind": "train"') and line.endswith("}")]


def initial(data: Path, *more: str) -> dict[str, torch.Tensor]:
    """The weights a training starts from."""
    made = recipe(data, *more)
    torch.manual_seed(made.seed)
    return make_task(made).model().state_dict()
