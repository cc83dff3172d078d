"""Every file operation of `train`, `prepare` and `sweep` fails once, or is the last one: a rerun ends the same.

The quick tests take a few operations of each command, the nightly ones take all of them.
"""

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from repulsive.cli.app import run
from repulsive.lab.engine import launch
from repulsive.lab.runs import sweep as sweeps
from repulsive.lab.text.folders import read_folder
from tests.faults.injection import STOPPED, Injector, run_forked
from tests.lab.engine import tiny

optuna = pytest.importorskip("optuna")
SHORT = ("training.epochs=1", "training.save_every=4", "training.log_every=5", "training.batch=64")


@dataclass
class Subject:
    """A command that writes below a folder.

    Args:
        setup: fills an empty folder.
        command: works there, and gives an exit code.
        outcome: what came out, as something that can be compared; fails where something is left behind.
    """

    setup: Callable[[Path], None]
    command: Callable[[Path], int]
    outcome: Callable[[Path], object]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tiny.make_data(tmp_path_factory.mktemp("tiny") / "prepared")
    tiny.train(folder, folder.with_name("warm"), *SHORT)  # children inherit what is imported by now
    importlib.import_module("rich.progress")
    optuna.create_study(storage=f"sqlite:///{folder.with_name('warm.db')}").ask()
    yield folder
    torch.set_num_threads(before)


def in_process(specs, make, *given, **named):
    """Runs one after the other in this process, where their file operations are seen."""
    for spec in specs:
        launch.train_here(spec, make, quiet=True)


def nothing_left(folder):
    left = [path for path in folder.rglob(".*") if path.name != ".lock"]
    assert left == [], f"left behind: {left}"


def outcome_of_run(folder):
    tensors, lines, result = tiny.outcome(folder)
    nothing_left(folder)
    return {name: x.tolist() for name, x in tensors.items()}, lines, result


def subject_of(name, data):
    if name == "train":
        return Subject(
            lambda root: None,
            lambda root: run([*tiny.words(data, root, *SHORT), "--quiet"]),
            lambda root: outcome_of_run(tiny.folder_of(data, root, *SHORT)),
        )
    if name == "prepare":
        words = ["prepare", "reviews", "--train", "40", "--dev", "10", "--test", "10", "--force", "--out"]

        def outcome(root):
            files, manifest = read_folder(root / "toy")
            assert [path.name for path in root.iterdir()] == ["toy"]
            return files, manifest

        return Subject(
            lambda root: run([*words, str(root / "toy"), "--seed", "1"]),
            lambda root: run([*words, str(root / "toy"), "--seed", "2"]),
            outcome,
        )

    def sweep(root):
        sweeps.train_many = in_process
        more = [word for change in SHORT for word in ("--set", change)]
        over = ["--over", "method.ratio=0.2,0.3", "--jobs", "1", "--device", "cpu", "--out", str(root / "swept")]
        return run(["sweep", str(tiny.toml(data)), *more, *over])

    def swept(root):
        runs = sorted((root / "swept" / "runs").rglob("result.json"))
        assert len(runs) == 2
        text = (root / "swept" / "best.toml").read_text()
        return text, [outcome_of_run(path.parent) for path in runs]

    return Subject(lambda root: None, sweep, swept)


class Attack:
    """One command, attacked at any of its file operations."""

    def __init__(self, name, data, place):
        self.name, self.subject, self.place = name, subject_of(name, data), place
        code, self.seen = self._run("whole", -1, False)
        assert code == 0 and len(self.seen) > 10
        self.expected = self.subject.outcome(place / "whole")

    def _run(self, folder, number, stop):
        root = self.place / folder
        root.mkdir(exist_ok=True)
        if not any(root.iterdir()):
            run_forked(lambda: self.subject.setup(root) or 0)
        return run_forked(lambda: self.subject.command(root), Injector(root, number, stop))

    def at(self, number, stop):
        """What is wrong after the operation was spoiled and the command was run again; nothing where all is well."""
        folder = f"{number}-{'stop' if stop else 'fail'}"
        told = f"{self.name}: {folder} ({self.seen[number]})"
        code, _ = self._run(folder, number, stop)
        if code not in ((0, STOPPED) if stop else (0, 2)):
            return f"{told} ended with {code}"
        if self.name == "prepare":
            read_folder(self.place / folder / "toy")  # the old one or the new one, at any moment
        code, _ = self._run(folder, -1, False)
        if code != 0:
            return f"{told}: the rerun ended with {code}"
        try:
            same = self.subject.outcome(self.place / folder) == self.expected
        except Exception as error:
            return f"{told}: {type(error).__name__}: {error}"
        shutil.rmtree(self.place / folder)
        return "" if same else f"{told}: another outcome"


COMMANDS = ("train", "prepare", "sweep")


@pytest.mark.parametrize("name", COMMANDS)
def test_some_operations(name, data, tmp_path):
    attack = Attack(name, data, tmp_path)
    share = {0.3: False, 0.6: True, 0.97: True} if name != "sweep" else {0.55: True}
    cases = [(int(part * len(attack.seen)), stop) for part, stop in share.items()]
    assert [told for case in cases if (told := attack.at(*case))] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_every_operation(name, data, tmp_path):
    attack = Attack(name, data, tmp_path)
    cases = [(number, stop) for stop in (True, False) for number in range(len(attack.seen))]
    told = [told for case in cases if (told := attack.at(*case))]
    assert told == [], "\n".join([f"{len(told)} of {len(cases)} cases", *told])


def test_the_injector_sees_and_spoils(tmp_path):
    def work():
        (tmp_path / "a").write_text("1")
        (tmp_path / "a").rename(tmp_path / "b")
        (tmp_path / "b").unlink()
        return 0

    code, seen = run_forked(work, Injector(tmp_path))
    assert code == 0 and [word.split()[0] for word in seen] == ["open", "os.rename", "os.remove"]
    assert run_forked(work, Injector(tmp_path, 1, stop=True))[0] == STOPPED and (tmp_path / "a").exists()
    code, _ = run_forked(work, Injector(tmp_path, 2))
    assert code == 70 and json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["b"]'


def test_many_operations_are_seen(tmp_path):
    def work():
        for _ in range(2000):  # their names are longer than a pipe
            (tmp_path / "file").write_bytes(b"")
        return 0

    assert len(run_forked(work, Injector(tmp_path))[1]) == 2000
