"""Signals at the worst moments: during the last evaluation, to one process of several, to `torchrun` itself."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from repulsive.errors import RunError
from repulsive.lab.engine.loop import Loop, Stopped
from repulsive.lab.engine.nested_state import pack, unpack
from repulsive.lab.engine.processes import TIMEOUT, lost_process
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.random_state import random_state, restore_random_state, seed_everything
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import make_task
from tests.lab.engine import tiny

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LONG = ("training.epochs=2000", "training.log_every=2", "training.save_seconds=100000", "model.dropout=0")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.make_data(tmp_path_factory.mktemp("tiny") / "prepared")


@pytest.mark.parametrize("part", ["dev", "test"])
def test_a_signal_during_the_last_evaluation_is_answered(data, tmp_path, part):
    recipe = tiny.recipe(data)
    task = make_task(recipe)
    evaluate = task.evaluate

    def interrupted(model, name):
        if name == part and loop.step == loop.total and loop._saved_step == loop.total:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            pytest.fail("the signal was not answered")
        return evaluate(model, name)

    task.evaluate = interrupted
    loop = Loop(task, recipe, RunFolder(tmp_path / "run"), Watcher(), "cpu")
    stopped = r"stopped before the last evaluation, after step 20; rerun the same command"
    with pytest.raises(Stopped, match=stopped) as caught:
        loop.run()
    loop.folder.close()
    assert caught.value.code == 143 and not (tmp_path / "run" / "result.json").exists()

    again = make_task(recipe)
    trained = []
    loss = again.loss
    again.loss = lambda *given: (trained.append(1), loss(*given))[1]
    resumed = Loop(again, recipe, RunFolder(tmp_path / "run"), Watcher(), "cpu")
    resumed.run()
    resumed.folder.close()
    assert not trained  # no step is repeated
    tiny.train(data, tmp_path / "whole")
    tiny.assert_same(tmp_path / "run", tmp_path / "whole")
    assert resumed.folder.checkpoints.paths() == []


def test_other_threads_and_processes_are_told(data, tmp_path, monkeypatch):
    stop = tiny.At(10, tiny.signalled(signal.SIGTERM))
    with pytest.raises(Stopped):
        tiny.train(data, tmp_path, "training.log_every=5", watcher=stop)
    (path,) = RunFolder(tmp_path).checkpoints.paths()
    state = json.loads((path / "state.json").read_text())
    assert state["parallel"] == {"threads": torch.get_num_threads(), "processes": 1}
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: before + 1)
    with pytest.warns(UserWarning, match=rf"trained with {before} threads, now {before + 1}; the result will not"):
        tiny.train(data, tmp_path, "training.log_every=5")


def test_generators_of_tasks_are_seeded_and_kept():
    numpy = pytest.importorskip("numpy")

    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        seed_everything(7)
        first = draw()
        tensors, skeleton = pack(random_state())
        second = draw()
        seed_everything(7)
        assert draw() == first != second
        restore_random_state(unpack(tensors, json.loads(json.dumps(skeleton))))
        assert draw() == second
        seed_everything(2**40)  # larger than NumPy's seeds
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])


def test_errors_of_a_lost_process_are_known(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_process(RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv"))
    assert not lost_process(RuntimeError("shapes do not fit")) and not lost_process(RunError("nccl"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not lost_process(RuntimeError("Timed out"))


def start(data, out, **environment):
    words = ["-m", "repulsive", *tiny.words(data, out, *LONG)]
    env = tiny.environment() | environment
    return subprocess.Popen([*TORCHRUN, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def wait_for(condition):
    until = time.monotonic() + tiny.PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    assert condition()


def end(process, ranks):
    for rank in ranks:
        if tiny.alive(rank):
            os.kill(rank, signal.SIGKILL)
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_ranks_end_with_torchrun(data, tmp_path):
    folder = tiny.folder_of(data, tmp_path, *LONG)
    process = start(data, tmp_path)
    ranks = []
    try:
        wait_for(lambda: len(tiny.steps(folder)) > 2)
        ranks = children(process.pid)
        process.kill()
        wait_for(lambda: not any(map(tiny.alive, ranks)))
        assert len(ranks) == 2 and RunFolder(folder).checkpoints.paths()  # they saved before they ended
    finally:
        end(process, ranks)


@pytest.mark.slow
def test_a_rank_that_is_stopped_does_not_hold_the_other_for_ever(data, tmp_path):
    folder: Path = tiny.folder_of(data, tmp_path, *LONG)
    process = start(data, tmp_path, **{TIMEOUT: "20"})  # ranks that start on a busy machine need some of it
    ranks = []
    try:
        wait_for(lambda: len(tiny.steps(folder)) > 2)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGSTOP)
        wait_for(lambda: not tiny.alive(ranks[0]))
        os.kill(ranks[1], signal.SIGCONT)
        _, errors = process.communicate(timeout=tiny.PATIENCE)
        assert process.returncode != 0 and "did not answer in time" in errors
    finally:
        end(process, ranks)
