"""Sharded checkpoints: written in the background by all ranks, intact or absent whenever a process dies."""

import hashlib
import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from repulsive.errors import CheckpointError, ConfigError
from repulsive.lab.engine.checkpoint import Checkpoints, load
from repulsive.lab.engine.checkpoint_writers import ShardedWriter, WholeWriter, make_writer
from repulsive.lab.engine.loop import Stopped
from repulsive.lab.engine.processes import Processes
from tests.lab.engine import tiny
from tests.lab.engine.conftest import LOGGED
from tests.lab.engine.test_checkpoint import example, same

hf_storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
SHARDED = "training.checkpoint=sharded"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def writer(tmp_path):
    made = make_writer("sharded", Checkpoints(tmp_path / "run", keep=2), Processes("cpu"))
    yield made
    made.close()


def saved(writer, step, state):
    """Save a state, wait, and return the folder."""
    writer.save(step, lambda: state)
    writer.wait()
    return writer._checkpoints.path(step)


def test_a_state_comes_back_as_it_was(writer):
    assert isinstance(writer, ShardedWriter)
    state = example() | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "half": torch.ones(2).bfloat16()}
    path = saved(writer, 7, state)
    step, loaded = load(path)
    assert step == 7 and same(loaded, state)
    names = sorted(file.name for file in path.iterdir())
    assert names == ["manifest.json", "shard-00001-model-00001-of-00001.safetensors", "state.json"]  # no pickle
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # users who may read the JSON may read the shards


def test_both_formats_share_a_folder(writer):
    saved(writer, 1, example(1))
    saved(writer, 2, example(2))
    WholeWriter(writer._checkpoints, writer._processes).save(3, lambda: example(3))
    assert [path.name[-1] for path in writer._checkpoints.paths()] == ["3", "2"]
    assert same(writer._checkpoints.latest()[1], example(3)) and same(load(writer._checkpoints.path(2))[1], example(2))


class Gate:
    """Holds the thread that writes shards until it is opened."""

    def __init__(self, monkeypatch, error=None):
        self.entered, self.opened = threading.Event(), threading.Event()
        write = hf_storage.HuggingFaceStorageWriter.write_data

        def gated(writer, plan, planner):
            self.entered.set()
            assert self.opened.wait(60)
            if error is not None:
                raise error
            return write(writer, plan, planner)

        monkeypatch.setattr(hf_storage.HuggingFaceStorageWriter, "write_data", gated)


def test_training_continues_while_a_checkpoint_is_written(writer, monkeypatch):
    saved(writer, 1, {"x": torch.zeros(3)})
    gate = Gate(monkeypatch)
    x = torch.ones(3)
    writer.save(2, lambda: {"x": x})
    assert gate.entered.wait(60)
    x += 5  # the next training step
    assert writer._checkpoints.latest()[0] == 1
    gate.opened.set()
    writer.wait()
    step, state = writer._checkpoints.latest()
    assert step == 2 and torch.equal(state["x"], torch.ones(3))


def test_an_error_while_writing_is_raised_by_the_next_save(writer, monkeypatch):
    saved(writer, 1, {"x": torch.zeros(3)})
    with monkeypatch.context() as patched:
        Gate(patched, OSError(28, "No space left on device")).opened.set()
        writer.save(2, lambda: {"x": torch.ones(3)})
        with pytest.raises(CheckpointError, match=r"step-000000002: cannot be written \(No space left.*is intact"):
            writer.save(3, lambda: {"x": torch.ones(3)})
    assert writer._checkpoints.latest()[0] == 1
    saved(writer, 3, {"x": torch.ones(3)})
    assert sorted(path.name for path in writer._checkpoints.folder.iterdir()) == ["step-000000001", "step-000000003"]


def inflate(shard):
    """Let a shard claim that it is the end of a huge tensor; return the bytes of that file."""
    with safe_open(shard, framework="pt") as file:
        tensors, extra = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    info = json.loads(extra["DCP_SHARDING_INFO"])
    name = next(name for name, x in tensors.items() if x.ndim)
    info[name]["saved_offsets"][0] = 10**13
    save_file(tensors, shard, {"DCP_SHARDING_INFO": json.dumps(info)})
    manifest = json.loads((shard.parent / "manifest.json").read_text())
    manifest["sha256"][shard.name] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (shard.parent / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), "is damaged"),
        (lambda shard: shard.unlink(), "lists other files"),
        (lambda shard: shard.with_name("shard-9.safetensors").write_bytes(shard.read_bytes()), "lists other files"),
        (lambda shard: (shard.parent / "manifest.json").write_text('{"format": 2, "step": 2, "sha256": {}}'), "other"),
        (lambda shard: (shard.parent / "manifest.json").write_text('{"format": 2, "step": 2}'), "manifest.json is dam"),
        (lambda shard: (shard.parent / "state.json").unlink(), "state.json cannot be read"),
        (lambda shard: shard.rename(shard.parents[1] / "x") and shard.symlink_to(shard.parents[1] / "x"), "is a link"),
        (inflate, "do not add up"),
    ],
    ids=["truncated", "missing", "added", "empty manifest", "no checksums", "no state", "link", "huge"],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning(damage, message, writer):
    saved(writer, 1, example(1))
    (shard,) = saved(writer, 2, example(2)).glob("*.safetensors")
    damage(shard)
    with pytest.warns(UserWarning, match=rf"step-000000002.*{message}.*trying the checkpoint before it"):
        step, state = writer._checkpoints.latest()
    assert step == 1 and same(state, example(1))


def test_an_old_torch_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint.hf_storage", None)
    monkeypatch.delattr(torch.distributed.checkpoint, "hf_storage")
    with pytest.raises(ConfigError, match=r"'sharded' needs the safetensors storage.*use training.checkpoint='whole'"):
        make_writer("sharded", Checkpoints(tmp_path), Processes("cpu"))


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.checkpoint_writers import make_writer
from repulsive.lab.engine.processes import Processes
writer = make_writer("sharded", Checkpoints(Path(sys.argv[1])), Processes("cpu"))
writer.save(1, lambda: {"x": torch.full((1000,), 1.0)})
writer.wait()
write = HuggingFaceStorageWriter.write_data
def die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)  # the shard is written, and the manifest is not
HuggingFaceStorageWriter.write_data = die
writer.save(2, lambda: {"x": torch.full((1000,), 2.0)})
writer.wait()
"""


def test_a_kill_while_saving_leaves_the_previous_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    died = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    checkpoints = Checkpoints(tmp_path)
    assert list(tmp_path.glob(".step-000000002.new/*.safetensors"))  # the kill hit the second checkpoint
    step, state = checkpoints.latest()
    assert step == 1 and torch.equal(state["x"], torch.full((1000,), 1.0))
    checkpoints.save(2, {"x": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000002"]


def test_a_training_that_is_stopped_and_resumed_is_bit_identical(data, whole, tmp_path):
    with pytest.raises(Stopped, match="step 9 of 20"):
        tiny.train(data, tmp_path, *LOGGED, SHARDED, watcher=tiny.At(9, tiny.signalled(signal.SIGTERM)))
    assert list(tmp_path.glob("checkpoints/step-000000009/shard-*.safetensors"))
    tiny.train(data, tmp_path, *LOGGED)  # the format of checkpoints may change within a run
    tiny.assert_same(tmp_path, whole)


# Trains, and kills itself while the checkpoint of step 7 is written in the background.
KILLED_TRAINING = """
import os, signal, sys
from pathlib import Path
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from tests.lab.engine import tiny
write = HuggingFaceStorageWriter.write_data
def die(self, *arguments):
    done = write(self, *arguments)
    if "step-000000007" in str(self.path):
        os.kill(os.getpid(), signal.SIGKILL)
    return done
HuggingFaceStorageWriter.write_data = die
tiny.train(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
"""


@pytest.mark.slow
def test_a_training_that_is_killed_while_saving_is_bit_identical(data, whole, tmp_path):
    command = [sys.executable, "-c", KILLED_TRAINING, str(data), str(tmp_path), *LOGGED, SHARDED]
    died = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest()[0] == 6 and list(checkpoints.folder.glob(".step-000000007*"))
    tiny.train(data, tmp_path, *LOGGED, SHARDED)
    tiny.assert_same(tmp_path, whole)
    assert not list(checkpoints.folder.glob(".*"))


@pytest.mark.slow
def test_two_processes_save_and_one_resumes(data, tmp_path):
    """Without dropout the number of processes changes only the order of sums."""
    more = ("model.dropout=0", "training.log_every=4", "training.save_every=4", SHARDED)
    words, folder = tiny.words(data, tmp_path, *more), tiny.folder_of(data, tmp_path, *more)
    command = [*TORCHRUN, "-m", "repulsive", *words]
    finished = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    checkpoints = Checkpoints(folder / "checkpoints")
    step, state = checkpoints.latest()
    assert step == 16
    shards = sorted((folder / "checkpoints" / "step-000000016").glob("*.safetensors"))
    assert [path.name[:11] for path in shards] == ["shard-00001", "shard-00002"]  # each rank wrote its share
    sizes = [len(path.read_bytes()) for path in shards]
    assert min(sizes) > 0.2 * sum(sizes)
    tiny.train(data, tmp_path / "one", *more)
    expected = load(tmp_path / "one" / "checkpoints" / "step-000000016")[1]["model"]
    for name, x in state["model"].items():
        assert torch.allclose(x, expected[name], rtol=0, atol=1e-5), name
    (folder / "result.json").unlink()
    with pytest.warns(UserWarning, match="was trained with 2 processes, now 1"):
        tiny.train(data, folder, *more)  # one process resumes what two have saved
    ended, alone = (Checkpoints(run / "best").latest()[1]["model"] for run in (folder, tmp_path / "one"))
    assert all(torch.allclose(ended[name], alone[name], rtol=0, atol=1e-5) for name in alone)
