"""One training in two processes (gloo on the CPU): the same weights as in one, and only the first rank writes."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.checkpoint import load
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.text.batches import Batch
from tests.lab.engine import tiny

pytest.importorskip("accelerate")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# The last batch of an epoch has one item (300 = 13 x 23 + 1): one rank gets none.
MORE = ("training.batch=23", "model.dropout=0", "optimizer.lr=0.02", "training.log_every=4", "training.save_every=5")
# Every rank lists the files that it opened for writing.
WATCHED = """
import os, sys
opened = set()
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        opened.add(arguments[0])
sys.addaudithook(note)
from repulsive.cli.app import run
code = run(sys.argv[2:])
with open(f"{sys.argv[1]}/opened-{os.environ['RANK']}", "w") as file:
    file.write("\\n".join(sorted(opened)))
sys.exit(code)
"""


@pytest.mark.slow
def test_two_processes_learn_what_one_does_and_one_writes(data, tmp_path):
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    words = tiny.words(data, tmp_path / "two", *MORE)
    command = [*TORCHRUN, str(script), str(tmp_path), *words]
    finished = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("method  seeds") == 1 and finished.stderr.count("starting: 28 steps") == 1

    two = RunFolder(tiny.folder_of(data, tmp_path / "two", *MORE))
    one = tiny.train(data, tmp_path / "one", *MORE)
    for step in (25, 20):
        states = [run.checkpoints.folder / f"step-{step:09d}" for run in (one, two)]
        weights = [load(path)[1]["model"] for path in states]
        start = tiny.initial(data, *MORE)
        moved = max(float((weights[0][name] - start[name]).abs().max()) for name in start)
        assert moved > 0.1  # the weights must change, or equal weights would prove nothing
        for name in weights[0]:
            assert torch.allclose(weights[0][name], weights[1][name], rtol=0, atol=1e-5), name
    for mine, theirs in zip(one.lines(), two.lines(), strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        assert mine.get("loss") == pytest.approx(theirs.get("loss"), abs=1e-5)
    opened = [(tmp_path / f"opened-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert any(path.endswith("metrics.jsonl") for path in opened[0])
    assert [path for path in opened[1] if str(two.path) in path] == []


@pytest.mark.slow
def test_an_error_of_one_process_ends_both_with_one_line(data, tmp_path):
    folder = tiny.folder_of(data, tmp_path)
    command = [*TORCHRUN, "-m", "repulsive", *tiny.words(data, tmp_path)]
    with RunFolder(folder).locked():
        finished = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    own = [line for line in finished.stderr.splitlines() if line.startswith("repulsive: ")]
    assert own == [f"repulsive: {folder}: another process is training here"]
    assert finished.returncode != 0
    ours = finished.stderr.partition("torch/distributed/elastic")[0]  # what follows is torchrun's own report
    assert "Traceback" not in ours


# The loss of the second rank is nan from step 7 on.
POISONED = """
import os, sys
from repulsive.lab.systems.classification.task import ClassificationTask as Task
loss, calls = Task.loss, []
def poison(self, model, inputs, length):
    calls.append(1)
    return loss(self, model, inputs, length) * (float("nan") if os.environ["RANK"] == "1" and len(calls) >= 7 else 1.0)
Task.loss = poison
from repulsive.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_loss_that_is_bad_in_one_process_alone(data, tmp_path):
    """The first rank has finite losses, and must not save weights that the second has made nan."""
    script = tmp_path / "poisoned.py"
    script.write_text(POISONED)
    more = ("training.save_every=1", "training.log_every=50")
    command = [*TORCHRUN, str(script), *tiny.words(data, tmp_path, *more)]
    finished = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=False)
    (own,) = [line for line in finished.stderr.splitlines() if line.startswith("repulsive: ")]
    assert own.startswith("repulsive: step 7: the loss is not a finite number; items ")
    step, state = RunFolder(tiny.folder_of(data, tmp_path, *more)).checkpoints.latest()
    assert step == 6 and all(bool(x.isfinite().all()) for x in state["model"].values())


@pytest.mark.slow
def test_two_processes_stopped_and_resumed_by_one(data, tmp_path):
    """Without dropout the number of processes changes only the order of sums."""
    more = (*MORE, "training.epochs=60")
    folder = tiny.folder_of(data, tmp_path, *more)
    process = subprocess.Popen(
        [*TORCHRUN, "-m", "repulsive", *tiny.words(data, tmp_path, *more)],
        env=tiny.environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=tiny.default_signals,
    )
    until = time.monotonic() + tiny.PATIENCE
    while not ((folder / "metrics.jsonl").exists() and tiny.steps(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=tiny.PATIENCE)
    assert err.count("repulsive: stopped at step") == 1
    step = RunFolder(folder).checkpoints.latest()[0]
    assert 0 < step < 60 * 14
    tiny.train(data, folder, *more)
    tiny.train(data, tmp_path / "one", *more)
    lines = [RunFolder(path).lines() for path in (folder, tmp_path / "one")]
    assert [(a["kind"], a["step"]) for a in lines[0]] == [(b["kind"], b["step"]) for b in lines[1]]


@pytest.mark.slow
def test_accelerate_launch(data, tmp_path):
    words = tiny.words(data, tmp_path, *MORE)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "repulsive"]
    finished = subprocess.run([*launch, *words], env=tiny.environment(), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    tiny.train(data, tmp_path / "one", *MORE)
    tiny.assert_same(tiny.folder_of(data, tmp_path, *MORE), tmp_path / "one")


@pytest.mark.parametrize("items", [1, 2, 5, 6])
def test_a_batch_is_split_and_weighted(items):
    """Every item goes to one rank and counts add up; a rank without items gets one with weight 0."""
    batch = Batch(torch.arange(items) + 10, 8)
    shares = [rank_share(batch, index, 3) for index in range(3)]
    assert sum(count for _, count in shares) == items
    held = torch.cat([mine.indices for mine, count in shares if count])
    assert sorted(held.tolist()) == batch.indices.tolist()
    assert all(len(mine) >= 1 and mine.length == 8 for mine, _ in shares)
