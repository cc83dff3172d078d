"""A training that is killed or stopped at any moment resumes, and its results are bit-identical."""

import random
import signal
import subprocess
import sys
import time
import warnings

import pytest

from repulsive.errors import CheckpointError
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.loop import Stopped
from tests.lab.engine import tiny
from tests.lab.engine.conftest import LOGGED

# Trains, and kills itself while it writes a given file of the first checkpoint. Packages that training must not need
# cannot be imported.
INSIDE = f"""
import os, signal, sys
from pathlib import Path
sys.modules.update(dict.fromkeys({tiny.ABSENT!r}))
fsync = os.fsync
def deadly(handle):
    caller = sys._getframe(1)
    inside = caller.f_code.co_name == "write_synced" and caller.f_back.f_code.co_name == "_write"
    if inside and os.readlink(f"/proc/self/fd/{{handle}}").endswith(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(handle)
os.fsync = deadly
from tests.lab.engine import tiny
tiny.train(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
"""


def start(arguments):
    return subprocess.Popen(
        tiny.command(*arguments), env=tiny.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def leftovers(folder):
    return list(folder.glob("checkpoints/.step-*"))


def kill_inside(file, data, folder):
    arguments = [sys.executable, "-c", INSIDE, file, str(data), str(folder), *LOGGED]
    died = subprocess.run(arguments, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert leftovers(folder)


def kill_somewhere(arguments, folder, source):
    """Kill a training after some steps; return whether it was saving a checkpoint, None if it had ended."""
    newest = max((path.name for path in Checkpoints(folder / "checkpoints").paths()), default="")
    process = start(arguments)
    try:
        while process.poll() is None:
            found = Checkpoints(folder / "checkpoints").paths()
            if found and found[0].name > newest:
                time.sleep(source.random() / 20)
                break
            time.sleep(0.002)
        process.kill()
        process.communicate()
    finally:
        process.kill()
    assert process.returncode in (0, -signal.SIGKILL)
    return None if process.returncode == 0 else bool(leftovers(folder))


@pytest.mark.slow
def test_killed_at_random_and_inside_a_write(data, whole, tmp_path):
    arguments, folder = tiny.words(data, tmp_path, *LOGGED), tiny.folder_of(data, tmp_path, *LOGGED)
    source = random.Random(1)
    kill_somewhere(arguments, folder, source)
    kill_inside("tensors.safetensors", data, folder)
    kill_somewhere(arguments, folder, source)
    tiny.train(data, folder, *LOGGED)
    tiny.assert_same(folder, whole)
    assert not leftovers(folder)


@pytest.mark.slow
def test_killed_twenty_times(data, tmp_path):
    more = (*LOGGED, "training.epochs=10")
    tiny.train(data, tmp_path / "whole", *more)
    arguments, folder = tiny.words(data, tmp_path, *more), tiny.folder_of(data, tmp_path, *more)
    source = random.Random(0)
    found = [kill_somewhere(arguments, folder, source) for _ in range(20)]
    last = start(arguments)
    _, errors = last.communicate()
    assert last.returncode == 0, errors
    tiny.assert_same(folder, tmp_path / "whole")
    print(f"{found.count(True)} of {len(found)} kills hit a checkpoint being written")
    assert found.count(None) == 0, "the training ended before all kills were made"
    assert found.count(True) >= 1, "no kill hit a checkpoint being written"


@pytest.mark.slow
@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_killed_inside_each_write(file, data, whole, tmp_path):
    kill_inside(file, data, tmp_path)
    assert not Checkpoints(tmp_path / "checkpoints").paths()
    tiny.train(data, tmp_path, *LOGGED)
    tiny.assert_same(tmp_path, whole)


def stop_at(data, folder, step, *more):
    with pytest.raises(Stopped, match=f"step {step} of {tiny.STEPS}; rerun the same command"):
        tiny.train(data, folder, *more, watcher=tiny.At(step, tiny.signalled(signal.SIGTERM)))


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_costs_nothing_but_time(damage, data, whole, tmp_path):
    stop_at(data, tmp_path, 9, *LOGGED)
    victim = tmp_path / "checkpoints" / "step-000000009" / "tensors.safetensors"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 64
    victim.write_bytes(content[:-100] if damage == "truncated" else content)
    with pytest.warns(UserWarning, match="step-000000009: tensors.safetensors is damaged"):
        tiny.train(data, tmp_path, *LOGGED)
    tiny.assert_same(tmp_path, whole)


def test_damaged_checkpoints_only_are_an_error_with_a_remedy(data, tmp_path):
    stop_at(data, tmp_path, 6, "training.log_every=3", "training.save_every=6")
    (path,) = Checkpoints(tmp_path / "checkpoints").paths()
    (path / "manifest.json").write_text('{"format": 1, "step": 6, "sha256": {}}')  # lists nothing
    message = r"are damaged: .*manifest.json is damaged.*Remove that folder to start again"
    with warnings.catch_warnings(record=True) as caught, pytest.raises(CheckpointError, match=message):
        tiny.train(data, tmp_path, "training.log_every=3", "training.save_every=6")
    assert not [one for one in caught if "trying the checkpoint before it" in str(one.message)]


def stop_after(position, data, folder, *more):
    """Stop after any step, not only after one that is logged."""
    made = tiny.loop(tiny.Spec(tiny.recipe(data, *more), folder, "cpu"))
    learn = made._learn

    def learn_and_stop(batch):
        learn(batch)
        if made.step + 1 == position:
            made._request.note(signal.SIGTERM)

    made._learn = learn_and_stop
    with pytest.raises(Stopped) as stopped:
        made.run()
    made.folder.close()
    assert (made.step, stopped.value.code) == (position, 143)


@pytest.mark.parametrize("position", [2, 10, 13])
def test_stopped_anywhere_the_same_comes_out(position, data, whole, tmp_path):
    """In the middle of an epoch and of a logging interval, and at the end of an epoch."""
    stop_after(position, data, tmp_path, *LOGGED)
    tiny.train(data, tmp_path, *LOGGED)
    tiny.assert_same(tmp_path, whole)


def test_measurements_before_a_stop_are_logged_after_it(data, tmp_path):
    """Heads are measured in steps 1, 7 and 13 and logged six steps later, also if the training is stopped between."""
    more = ("method.rule=none", "training.log_every=6")
    tiny.train(data, tmp_path / "whole", *more)
    stop_after(2, data, tmp_path / "parts", *more)
    stop_after(8, data, tmp_path / "parts", *more)
    tiny.train(data, tmp_path / "parts", *more)
    tiny.assert_same(tmp_path / "parts", tmp_path / "whole")
    assert '"kind": "heads", "step": 6,' in (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_the_last_step_is_evaluated(data, tmp_path):
    """Even if that is the only evaluation."""
    run = tiny.train(data, tmp_path, "training.evaluate_every=1000")
    assert [line["step"] for line in run.lines() if line["kind"] == "dev"] == [tiny.STEPS]
    assert run.result["best_step"] == tiny.STEPS


def test_bf16_trains(data, tmp_path):
    """Autocast on the CPU: losses differ a little from float32, and they fall."""
    settings = ("training.log_every=10", "optimizer.lr=0.05", "training.epochs=4")
    whole = tiny.train(data, tmp_path / "32", *settings)
    half = tiny.train(data, tmp_path / "16", *settings, "training.precision=bf16")
    losses = [[line["loss"] for line in run.lines() if line["kind"] == "train"] for run in (whole, half)]
    assert losses[0] != losses[1]
    assert abs(losses[0][0] - losses[1][0]) < 0.02
    assert losses[1][-1] < losses[1][0] - 0.005
    weights = half.best.latest()[1]["model"]
    assert {str(x.dtype) for x in weights.values()} == {"torch.float32"}
