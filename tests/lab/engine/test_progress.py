"""Progress of trainings: log lines, and a live table of many runs."""

import io
import json
import re

import pytest

from repulsive.lab.engine import progress, progress_table
from repulsive.lab.engine.launch import Spec
from repulsive.terminal.progress import as_time
from tests.lab.engine import tiny

rich = pytest.importorskip("rich.console")


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when `seconds` is changed."""

    class Now:
        seconds = 100.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Now.seconds)
    return Now


def test_lines(clock):
    file = io.StringIO()
    log = progress.Log(file, ("accuracy", "nll"), every=60)
    log.started(10, 110, 50)
    log.logged("train", 20, {"loss": 1.5})
    clock.seconds += 50
    log.logged("train", 35, {"loss": 1.25})
    log.logged("dev", 35, {"accuracy": 0.5, "nll": 0.75, "other": 1.0})
    clock.seconds += 61
    log.logged("heads", 60, {"ratio": 0.3})
    log.logged("train", 60, {"loss": 1.0})
    log.finished({"best_step": 35, "test": {"accuracy": 0.25}})
    assert file.getvalue().splitlines() == [
        "resuming from step 10: 110 steps, 50 per epoch",
        "step 35  loss 1.2500  dev accuracy 0.5000  nll 0.7500  0:02:30 left",  # 25 steps took 50 s, 75 are to come
        "step 60  loss 1.0000  0:01:51 left",
        "test (weights of step 35): accuracy 0.2500",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (90, "0:01:30"), (100_000, "27:46:40")])
def test_time(seconds, text):
    assert as_time(seconds) == text


def plan(data, out, *names):
    return [Spec(tiny.recipe(data), out / "tiny" / name, "cpu") for name in names]


def write(spec, *lines, ending="\n"):
    spec.folder.mkdir(parents=True, exist_ok=True)
    with open(spec.folder / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).removesuffix("\n") + ending)


def train(step, loss):
    return {"kind": "train", "step": step, "epoch": step / 10, "loss": loss}


def test_progress_is_read_as_it_is_written(data, tmp_path, clock):
    (spec,) = plan(data, tmp_path, "seed-0")
    run = progress_table.RunProgress(spec)
    run.update()
    assert (run.state, run.time_left, run.loss) == ("waiting", "", None)
    write(spec, train(4, 1.5))
    run.update()
    assert (run.state, run.epoch, run.loss, run.time_left) == ("training", 0.4, 1.5, "?")
    clock.seconds += 30
    write(spec, train(10, 1.25), {"kind": "dev", "step": 10, "accuracy": 0.5, "nll": 1.0}, {"kind": "he"}, ending="")
    run.update()
    assert (run.epoch, run.loss, run.dev) == (1.0, 1.25, "accuracy 0.5000")
    assert run.time_left == "0:00:50"  # 0.6 epochs took 30 s, 1 is to come
    (spec.folder / "metrics.jsonl").unlink()  # resumed: written anew
    write(spec, train(4, 1.5), train(8, 1.0))
    run.update()
    assert (run.epoch, run.loss) == (0.8, 1.0)


def test_table_of_many_runs(data, tmp_path, clock):
    specs = plan(data, tmp_path, "seed-0", "seed-1", "seed-2")
    console = rich.Console(file=io.StringIO(), force_terminal=True, width=100, height=20)
    with progress_table.ProgressTable(specs, console) as table:
        write(specs[1], train(10, 1.25), {"kind": "dev", "step": 10, "accuracy": 0.5})
        table.update()
        clock.seconds += 30
        write(specs[0], train(20, 0.5))
        table.ended(specs[0], "done")
        table.update()
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", console.file.getvalue())
    last = text[text.rindex("time left") :]
    rows = {line.split()[0]: line.split()[1:] for line in last.splitlines() if line.startswith(" tiny")}
    assert rows == {
        "tiny/seed-0": ["2.00", "/", "2", "0.5000", "done"],
        "tiny/seed-1": ["1.00", "/", "2", "1.2500", "accuracy", "0.5000", "?"],
        "tiny/seed-2": ["0.00", "/", "2", "waiting"],
    }
    # Half a run was done at the first update and 1.5 runs 30 s later, so the other 1.5 runs take 45 s.
    assert re.search(r"1 of 3 runs have ended ━.* 0:00:45 left", last)
