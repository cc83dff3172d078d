"""Runs side by side: each as if it were alone, unaffected by failures of others, ended with their parent."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.launch import Spec, train_many
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.workers import _work
from repulsive.lab.systems.registry import make_task
from tests.lab.engine import tiny

LONG = ("training.epochs=400", "training.save_every=5", "training.log_every=5")


def make_task_or_die(recipe):
    """Kill the process of one seed, and fail with an unexpected error for another."""
    if recipe.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if recipe.seed == 2:
        raise ZeroDivisionError("nobody\nforesaw this")
    return make_task(recipe)


def test_an_outcome_does_not_repeat_the_folder_that_it_is_shown_with(data, tmp_path):
    def fail(job, file):
        raise RunError(f"{job.folder}{job.recipe}")

    for text in ("/checkpoints/step-3: cannot be written", ": out of memory"):
        assert _work(Spec(text, tmp_path / "run"), fail) == text.lstrip("/: ")
    (tmp_path / "blocked" / "log.txt").mkdir(parents=True)
    assert _work(Spec("", tmp_path / "blocked"), fail) == "log.txt: cannot be written (Is a directory)"


@pytest.mark.slow
def test_a_run_that_dies_does_not_affect_others(data, tmp_path):
    """One at a time, so that a failed process has to be replaced for the next run; `may_start` refuses one run."""
    specs = [Spec(tiny.recipe(data, f"seed={seed}"), tmp_path / f"seed-{seed}", "cpu") for seed in (1, 2, 3, 0)]
    ended = {}
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with pytest.raises(RunError, match=r"2 of 4 runs failed; the first: .*seed-1: its process died \(SIGKILL\)"):
            train_many(
                specs,
                make_task_or_die,
                1,
                lambda spec, how: ended.update({spec.recipe.seed: how}),
                may_start=lambda spec: spec.recipe.seed != 3,
            )
    finally:
        del os.environ["OMP_NUM_THREADS"]
        os.environ.update({} if before is None else {"OMP_NUM_THREADS": before})
    assert ended[0] == "done" and "SIGKILL" in ended[1]
    assert 3 not in ended and not (tmp_path / "seed-3").exists()
    log = tmp_path / "seed-2" / "log.txt"
    assert ended[2] == f"ZeroDivisionError: nobody (traceback in {log})" and "Traceback" in log.read_text()
    tiny.train(data, tmp_path / "lone")
    tiny.assert_same(tmp_path / "lone", tmp_path / "seed-0")


def test_under_torchrun_it_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun"):
        train_many([Spec(tiny.recipe(data), tmp_path)] * 2, make_task)


def begin(data, out):
    """Start three long runs, two at a time; return the parent and the ids of its workers once both are training."""
    folders = [tiny.folder_of(data, out, *LONG).with_name(f"seed-{seed}") for seed in range(3)]
    before = [starts(folder) for folder in folders]
    words = [*tiny.words(data, out, *LONG), "--seeds", "3", "--jobs", "2"]
    parent = subprocess.Popen(
        tiny.command(*words),
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=tiny.default_signals,
    )
    until = time.monotonic() + tiny.PATIENCE
    while not all(len(starts(f)) > len(old) and tiny.steps(f) for f, old in zip(folders[:2], before, strict=False)):
        assert parent.poll() is None and time.monotonic() < until, parent.stderr.read()
        time.sleep(0.05)
    return parent, workers_of(parent.pid), folders


def starts(folder):
    """Steps at which a run was started or resumed."""
    try:
        log = (folder / "log.txt").read_text()
    except OSError:
        return []
    return [int(step or 0) for step in re.findall(r"^(?:starting|resuming from step (\d+)): ", log, re.M)]


def workers_of(pid):
    """Ids of the worker processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and "spawn_main" in (path.parent / "cmdline").read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def running(pids):
    return [pid for pid in pids if tiny.alive(pid)]


def wait_for(pids):
    until = time.monotonic() + tiny.PATIENCE
    while running(pids) and time.monotonic() < until:
        time.sleep(0.05)
    return running(pids)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.slow
def test_ctrl_c_saves_all_and_a_kill_leaves_no_orphan(data, tmp_path):
    """After Ctrl-C all runs are saved and none is started. Then the same command again, and kill -9 for the parent."""
    parent, workers, folders = begin(data, tmp_path)
    assert len(workers) == 2
    for pid in (parent.pid, *workers):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    _, err = parent.communicate(timeout=tiny.PATIENCE)
    assert parent.returncode == 130
    lines = err.splitlines()
    assert sorted(lines[:2]) == [f"{folder}: stopped" for folder in folders[:2]]
    assert lines[2:] == ["repulsive: stopped with 3 of 3 runs left; run the same command to resume"]
    assert not running(workers) and not folders[2].exists()
    saved = [RunFolder(folder).checkpoints.latest()[0] for folder in folders[:2]]
    assert min(saved) >= 5

    parent, workers, _ = begin(data, tmp_path)
    assert [starts(folder) for folder in folders[:2]] == [[0, step] for step in saved]
    parent.kill()
    parent.wait()
    try:
        assert wait_for(workers) == []
        assert not any(RunFolder(folder).result for folder in folders)  # they did not end because they had finished
    finally:
        for pid in running(workers):
            os.kill(pid, signal.SIGKILL)
        parent.stderr.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_alone(number, code, data, tmp_path):
    parent, workers, folders = begin(data, tmp_path)
    parent.send_signal(number)
    _, err = parent.communicate(timeout=tiny.PATIENCE)
    assert parent.returncode == code and "Traceback" not in err
    assert not running(workers)
    assert all(RunFolder(folder).checkpoints.paths() for folder in folders[:2])


@pytest.mark.slow
def test_ctrl_c_before_anything_has_begun(data, tmp_path):
    """Workers that are still importing print no traceback."""
    words = [*tiny.words(data, tmp_path, *LONG), "--seeds", "2", "--jobs", "2"]
    parent = subprocess.Popen(
        tiny.command(*words),
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=tiny.default_signals,
    )
    until = time.monotonic() + tiny.PATIENCE
    while len(workers_of(parent.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=tiny.PATIENCE)
    assert parent.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "repulsive: stopped with 2 of 2 runs left; run the same command to resume"
