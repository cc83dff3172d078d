"""Checkpoints are intact or absent, whenever a process dies."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from repulsive.errors import CheckpointError
from repulsive.lab.engine.checkpoint import MANIFEST, Checkpoints, check_moments, check_weights, load
from repulsive.lab.engine.nested_state import pack, unpack
from repulsive.lab.engine.random_state import random_state, restore_random_state


def example(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    tied = model.weight.detach()
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "tied": [tied, tied.T],
        "random": random_state(),
        "note": None,
        "betas": (0.9, 0.98),
        "flags": {1: True, "two": 2.5},
    }


def test_moments_of_other_shapes_are_refused():
    """Torch loads them: those of a transposed weight have as many numbers."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    check_moments(optimizer)  # the number of steps is a scalar
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].T
    with pytest.raises(ValueError, match=r"exp_avg \[4, 3\] of a parameter \[3, 4\]"):
        check_moments(optimizer)


@pytest.mark.parametrize(
    "change", [lambda w: w.pop("bias"), lambda w: w.update(more=w["bias"]), lambda w: w["weight"].t_()]
)
def test_best_weights_of_another_model_are_refused(change):
    model = torch.nn.Linear(4, 3).state_dict()
    weights = {name: value.clone() for name, value in model.items()}
    check_weights(weights, model)
    change(weights)
    with pytest.raises(ValueError, match="the best weights do not fit the model"):
        check_weights(weights, model)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_a_state_comes_back_as_it_was(tmp_path):
    state = example()
    assert same(unpack(*pack(state)), state)
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest() is None
    checkpoints.save(7, state)
    step, found = checkpoints.latest()
    assert step == 7 and same(found, state)
    assert not [p for p in (tmp_path / "run").rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]
    with pytest.raises(CheckpointError, match="function"):
        pack({"a": {"b": print}})


def test_random_numbers_continue():
    torch.manual_seed(1)
    state = unpack(*pack(random_state()))
    expected = (torch.rand(3), random.random())
    torch.rand(5), random.random()
    restore_random_state(state)
    assert torch.equal(torch.rand(3), expected[0]) and random.random() == expected[1]


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        checkpoints.save(step, {"step": step})
    assert [path.name for path in checkpoints.paths()] == ["step-000000003", "step-000000002"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "manifest", "empty manifest", "no manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage, tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, example(1))
    last = checkpoints.save(2, example(2))
    victim = last / "tensors.safetensors"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "flip":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif damage == "missing":
        victim.unlink()
    elif damage == "no manifest":
        (last / MANIFEST).unlink()
    else:
        (last / MANIFEST).write_text("" if damage == "empty manifest" else '{"format": 1}')
    with pytest.warns(UserWarning, match="step-000000002"):
        step, state = checkpoints.latest()
    assert step == 1 and same(state, example(1))
    with pytest.raises(CheckpointError):
        load(last)
    for path in checkpoints.paths():
        (path / "state.json").write_text("{}")
    all_damaged = pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged")
    with pytest.warns(UserWarning, match="the checkpoint before it"), all_damaged:
        checkpoints.latest()


def test_a_damaged_checkpoint_does_not_push_out_good_ones(tmp_path):
    """A damaged checkpoint has the highest step until a resumed training has passed it."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    (checkpoints.save(9, {"step": 9}) / "state.json").write_text("{")
    for step in (5, 6):
        checkpoints.save(step, {"step": step})
        assert checkpoints.latest() == (step, {"step": step})
    assert [path.name for path in checkpoints.paths()] == ["step-000000006"]


def test_a_manifest_that_lists_nothing_is_damaged(tmp_path):
    last = Checkpoints(tmp_path).save(1, {"step": 1})
    (last / MANIFEST).write_text('{"format": 1, "step": 1, "sha256": {}}')
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        load(last)


def test_a_full_disk_is_a_clear_error_and_harms_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, example(1))
    write = os.fsync

    def full(handle):
        write(handle)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step-000000002.*No space left.*intact"):
        checkpoints.save(2, example(2))
    monkeypatch.undo()
    assert checkpoints.latest()[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


WRITER = """
import sys, torch
from pathlib import Path
from repulsive.lab.engine.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
found = checkpoints.latest()
step = 0 if found is None else found[0]
assert found is None or torch.equal(found[1]["x"], torch.full((200_000,), float(step)))
print("ready", flush=True)
while True:
    step += 1
    checkpoints.save(step, {"x": torch.full((200_000,), float(step))})
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """After kill -9 in the middle of constant saving, the newest checkpoint is intact, and steps never decrease."""
    newest, source = 0, random.Random(0)
    for _ in range(3):
        before = set(Checkpoints(tmp_path).paths())
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        while not set(Checkpoints(tmp_path).paths()) - before:
            assert writer.poll() is None
            time.sleep(0.01)
        time.sleep(source.random() / 5)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        step, state = Checkpoints(tmp_path).latest()
        assert step > newest and torch.equal(state["x"], torch.full((200_000,), float(step)))
        newest = step
