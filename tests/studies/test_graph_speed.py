"""The speed benchmark of graph-to-text at toy size: both ways compute the same. No speed is asserted."""

import json

import pytest
import torch

from repulsive.lab.layers.beam_search import Ends
from repulsive.lab.systems.graphs.batches import Shape
from repulsive.lab.systems.graphs.search import write
from tests.lab.systems.graphs import toy_graphs
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

TOY = ("model.titles=false", "model.width=32", "model.layers=1", "model.lstm_layers=1", "training.batch=8")


@pytest.fixture(scope="module")
def speed():
    with study("studies.speed.graphs") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy_graphs.make_data(tmp_path_factory.mktemp("graphs")) / "prepared"


def opened(speed, data, *more):
    given = ["--data", str(data), "--device", "cpu", "--set", *TOY, *more]
    with pytest.MonkeyPatch.context() as patch:
        made = []
        patch.setattr(speed.Bench, "run", lambda self: made.append(self))
        speed.main(given)
    return made[0].task()


def test_every_part_is_measured(speed, data, tmp_path):
    sizes = ("--batches", "3", "--rounds", "2", "--warm-up", "1", "--graphs", "12", "--at-once", "5", "12")
    speed.main(
        ["--data", str(data), "--device", "cpu", "--out", str(tmp_path), *sizes, "--longest", "9", "--set", *TOY]
    )
    facts, text = json.loads((tmp_path / "speed.json").read_text()), (tmp_path / "speed.md").read_text()
    train = facts["train"]
    assert train["round"]["texts"] == 24 and train["losses agree to"] < 1e-9
    assert train["one graph after the other"]["times"] == 1 and len(train["batched"]["seconds"]) == 2
    assert f"| batched | {train['batched']['texts_per_second']:,.1f} |" in text
    assert facts["decode"]["5 at a time"]["graphs"] == 12 and "| 12 | 12 | 4 | 9 |" in text


def test_both_ways_take_the_same_step(speed, data):
    """After a round the weights are equal up to rounding."""
    found = []
    for alone in (False, True):
        task = opened(speed, data, "model.dropout=0")
        loop = speed.Round(task, "cpu", task.order(0)[:2], speed.SingleGraphs(task) if alone else None)
        before = [p.detach().clone() for p in loop.bare.parameters()]
        loop.round()
        found.append([p.detach() for p in loop.bare.parameters()])
    assert max(float((a - b).abs().max()) for a, b in zip(before, found[0], strict=True)) > 1e-2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_losses_that_differ_are_an_error(speed, data):
    task = opened(speed, data)
    alone = speed.SingleGraphs(task)
    alone._lengths = alone._lengths - 1  # the last word of every text is lost
    with pytest.raises(RuntimeError, match="the losses differ by"):
        speed.check_losses(task, alone, task.order(0)[:1], torch.device("cpu"))


def test_texts_never_end(speed, data):
    task = opened(speed, data)
    model = speed.never_ends(task.model())
    given = task.parts["test"].inputs(torch.arange(4), Shape(*task.parts["test"].sizes()[:4].amax(0).tolist()))
    texts = write(model, *given, Ends(2, 3), beam=3, longest=11)
    assert [len(text.tokens) for text in texts] == [10] * 4
