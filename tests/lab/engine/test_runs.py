"""A run folder: whose it is, what it tells, who may write, and what happens when the disk is full."""

import errno
import json
import os
import resource
import shutil
from contextlib import contextmanager

import pytest

from repulsive.errors import RepulsiveError, RunError
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.runs import RunFolder
from tests.lab.engine import tiny
from tests.lab.engine.conftest import LOGGED


@contextmanager
def files_of_at_most(size):
    """No file can grow larger: what a full disk is like, for real. Python ignores the signal, writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_it_says_everything(whole, data):
    facts = json.loads((whole / "run.json").read_text())
    assert facts["seed"] == 0 and facts["resumed"] == []
    assert {"repulsive", "python", "torch", "accelerate", "safetensors"} <= facts["started"]["versions"].keys()
    assert facts["started"]["device"] == "cpu, 1 threads"
    assert facts["data"] == json.loads((data / "manifest.json").read_text())["files"]
    recipe = json.loads((whole / "recipe.json").read_text())
    assert recipe["training"]["save_every"] == 1 and recipe["method"]["rule"] == "spos"
    assert recipe["training"]["save_seconds"] == 60  # nobody said so: a default
    kinds = {path.suffix for path in whole.rglob("*") if path.is_file() and path.parent.name != "tensorboard"}
    assert kinds - {""} == {".json", ".jsonl", ".safetensors"}  # no pickle; "" is the lock
    assert len({path.stat().st_mode for path in whole.rglob("*.*") if path.is_file()}) == 1  # as the umask gives
    assert len(list((whole / "tensorboard").glob("events*"))) == 1
    assert not [path.name for path in whole.glob(".*") if path.name != ".lock"]


def test_tensorboard_has_what_metrics_has(whole):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    lines = [line for line in RunFolder(whole).lines() if line["kind"] == "train"]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert {"dev/accuracy", "heads/ratio"} <= set(events.Tags()["scalars"])


def test_tensorboard_forgets_what_is_trained_again(tmp_path, monkeypatch):
    """The parts start in different seconds, by which TensorBoard orders files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    parts = {1_000.0: {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}, 1_001.0: {4: 0.5, 5: 0.25, 6: 0.125}}
    for now, losses in parts.items():
        monkeypatch.setattr("time.time", lambda now=now: now)
        run = RunFolder(tmp_path)
        run.rewind(min(losses) - 1)
        for step, loss in losses.items():
            run.log("train", step, {"loss": loss})
        run.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 0.5), (5, 0.25), (6, 0.125)]


def test_a_finished_run_is_told_again_and_stays_as_it_is(whole, data):
    def written():
        return {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}

    class Told(tiny.Watcher):
        def __init__(self):
            self.heard = []

        def started(self, step, total, per_epoch):
            self.heard.append("started")

        def finished(self, result):
            self.heard.append(result)

    before, told = written(), Told()
    tiny.train(data, whole, *LOGGED, watcher=told)
    assert told.heard == [RunFolder(whole).result]
    assert written() == before


def test_another_recipe_is_refused_and_what_differs_is_named(whole, data):
    with pytest.raises(RunError, match=r"optimizer\.lr was 0\.002, now 0\.5.*--out"):
        tiny.train(data, whole, *LOGGED, "optimizer.lr=0.5")


def test_other_data_are_refused(data, tmp_path):
    run = RunFolder(tmp_path)
    recipe = tiny.recipe(data)
    run.claim(recipe, {"train": "a"}, "cpu")
    run.log("train", 1, {"loss": 1.0})
    with pytest.raises(RunError, match="other data"):
        run.claim(recipe, {"train": "b"}, "cpu")
    run.claim(recipe, {"train": "a"}, "a GPU")
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["started"]["device"] == "cpu" and [r["device"] for r in facts["resumed"]] == ["a GPU"]


def test_a_second_process_is_refused(data, tmp_path):
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="another process is training here"):
        tiny.train(data, tmp_path)
    tiny.train(data, tmp_path, "training.epochs=1")  # the lock went with its holder


def test_what_a_killed_process_left_is_removed(data, tmp_path):
    (tmp_path / ".run.json.aside-123").write_text("{")
    RunFolder(tmp_path).claim(tiny.recipe(data), {}, "cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.json", "run.json"]
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / ".words.json.aside-123").write_text("[")
    RunFolder(tmp_path).claim(tiny.recipe(data), {}, "cpu", {"words.json": b"[]"})
    assert [path.name for path in (tmp_path / "assets").iterdir()] == ["words.json"]


def test_half_a_line_is_left_out_and_rewritten(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.log("train", step, {"loss": 1.0 / step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tra')
    assert [line["step"] for line in run.lines()] == [1, 2, 3]
    run.rewind(2)
    run.log("train", 3, {"loss": 0.5})
    run.close()
    assert [(line["step"], line["loss"]) for line in run.lines()] == [(1, 1.0), (2, 0.5), (3, 0.5)]


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl"])
def test_a_full_disk_is_named(file, data, tmp_path):
    run = RunFolder(tmp_path)
    recipe = tiny.recipe(data)
    run.claim(recipe, {}, "cpu")
    before = (tmp_path / "run.json").read_bytes()
    writes = {
        "run.json": lambda: run.claim(recipe, {}, "cpu"),
        "metrics.jsonl": lambda: run.log("train", 1, dict.fromkeys("abcdefghijkl", 0.123456789)),
    }
    with files_of_at_most(100), pytest.raises(RunError, match=rf"{file}: cannot be written \(File too large\); make"):
        writes[file]()
    assert (tmp_path / "run.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_while_saving_keeps_the_checkpoint_before(data, tmp_path, monkeypatch, whole):
    """The write fails with ENOSPC in the middle of the fourth checkpoint; with room again, the same comes out."""
    fsync, calls = os.fsync, []

    def full(handle):
        calls.append(os.readlink(f"/proc/self/fd/{handle}"))
        if calls[-1].endswith("/state.json") and "step-000000004" in calls[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match=r"step-000000004: cannot be written \(No space left on device\); .* intact"):
        tiny.train(data, tmp_path, *LOGGED)
    monkeypatch.undo()
    assert RunFolder(tmp_path).checkpoints.latest()[0] == 3
    tiny.train(data, tmp_path, *LOGGED)
    tiny.assert_same(tmp_path, whole)


def test_a_file_in_the_way(data, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        tiny.train(data, tmp_path / "taken" / "run")


def test_what_is_gone_comes_back_as_the_error_says(whole, data, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(whole, copied)
    (copied / "test.safetensors").unlink()
    with pytest.raises(RunError, match=r"remove its result\.json and run the command that trained it"):
        RunFolder(copied).items("test")
    (copied / "result.json").unlink()
    tiny.train(data, copied, *LOGGED)
    assert (copied / "test.safetensors").read_bytes() == (whole / "test.safetensors").read_bytes()


def test_a_folder_in_which_nothing_was_trained_takes_a_mended_recipe(data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RepulsiveError, match="parts='xyz' is unknown"):
        tiny.train(data, folder, *LOGGED, "method.parts=xyz")
    tiny.train(data, folder, *LOGGED, "training.epochs=1")
    facts = json.loads((folder / "run.json").read_text())
    assert facts["resumed"] == [] and json.loads((folder / "recipe.json").read_text())["method"]["parts"] == "qkv"
    with pytest.raises(RunError, match=r"another recipe \(training.epochs was 1, now 2\)"):
        tiny.train(data, folder, *LOGGED, "training.epochs=2")


@pytest.mark.parametrize(("content", "problem"), [(b"", "is empty"), (b"{", "is not JSON"), (b"\xff", "is not JSON")])
def test_a_damaged_file_of_a_run_names_the_remedy(content, problem, tmp_path):
    path = tmp_path / "result.json"
    assert read_json(path) is None
    path.write_bytes(content)
    with pytest.raises(
        RunError, match=rf"result.json: cannot be read \({problem}\); restore it from a copy, or remove it"
    ):
        read_json(path)
