"""The speed benchmark of pre-training at toy size: tables, the time limit, and operations as counted by torch."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from repulsive.lab.systems.electra.task import Model
from repulsive.lab.systems.registry import make_task
from tests.lab.systems.electra import words
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
SMALL = ("model.width=32", "model.feed_forward=64", "model.embedding=16", "model.generator=0.5")


@pytest.fixture(scope="module")
def script():
    with study("studies.speed.electra") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return words.make_data(tmp_path_factory.mktemp("words"))


def call(script, data, out, *more):
    places = ("--data", data / "prepared", "--out", out, "--device", "cpu", "--size", "tiny")
    quick = ("--stretch", "128", "--measure", "0.2", "--warm-up", "1", "--steps", "8")
    script.main([*map(str, places), *quick, *more, "--set", *SMALL])
    return json.loads((out / "speed.json").read_text())


def test_operations_are_what_torch_counts(script, data):
    """A step of the recipe's own loss, forward and backward; attention as plain products, which are counted."""
    task = make_task(words.recipe(data, "method.rule=none"))
    model, batch = task.model(), task.order(0)[0]
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        task.loss(model, task.fetch(batch), batch.length).backward()
    tokens, needed = script.stretch_of(task, 3)
    assert tokens == 3 * 16 * 32 and needed == pytest.approx(3 * counted.get_total_flops(), rel=1e-9)


def test_operations_of_electra_small_by_hand(script):
    """About 12 million multiplications a token, of which the discriminator's layers have 10.2."""
    layers = 12 * (4 * 256**2 + 2 * 256 * 1024 + 2 * 128 * 256)
    small = 12 * (4 * 64**2 + 2 * 64 * 256 + 2 * 128 * 64)
    others = 128 * 256 + 256**2 + 256 + 128 * 64 + (64 * 128 + 128 * 30_522) * 19 / 128
    assert script.operations(Model(), 30_522, 128, 19) == pytest.approx(6 * 128 * (layers + small + others))


@pytest.mark.slow
def test_every_part_comes_to_its_table(script, data, tmp_path):
    facts = call(script, data, tmp_path, "--batches", "8", "--limit", "100")
    train, trainer = facts["train"], facts["trainer"]
    for row in (train["8 MA"], train["8 SVGD"], trainer["8 Trainer"]):
        assert row["tokens_per_second"] == pytest.approx(8 * 32 / row["step_seconds"])
        assert row["step_operations"] == pytest.approx(train["8 MA"]["step_operations"])
    rounds = train["8 ratio"]["rounds"]
    assert rounds == len(train["8 MA"]["stretch_seconds"]) == len(train["8 SVGD"]["stretch_seconds"])
    for label in ("MA", "SVGD"):
        hooks, step = train[f"8 hooks of {label}"], train[f"8 {label}"]["step_seconds"]
        assert hooks["host_seconds"] > 0
        assert hooks["host_share"] == pytest.approx(hooks["host_seconds"] / step)
    text = (tmp_path / "speed.md").read_text()
    assert "| 8 | repulsive, SVGD |" in text and "| 8 | transformers, Trainer |" in text and "| 8 | SVGD |" in text

    again = call(script, data, tmp_path, "--batches", "8", "--limit", "100", "--only", "trainer")
    assert again["train"] == train  # of an earlier call


def test_what_does_not_fit_is_named(script, data, tmp_path, monkeypatch):
    """Making a task takes 20 seconds on a fake clock."""
    now, make_task = [100.0], script.make_task

    def make_slowly(recipe):
        now[0] += 20
        return make_task(recipe)

    monkeypatch.setattr(script, "make_task", make_slowly)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    facts = call(script, data, tmp_path, "--batches", "4", "8", "--limit", "10")
    assert facts["train"]["notes"] == ["stopped: the limit of 10 s was reached at warming up MA, 4 sequences"]
    assert facts["train"]["took"] == 40
    assert facts["trainer"]["notes"] == [
        f"left out: Trainer, {size} sequences; it takes about 0 s, and 0 s are left" for size in (4, 8)
    ]
    assert "left out: Trainer, 8 sequences" in (tmp_path / "speed.md").read_text()


def test_both_do_the_same_work(script, data):
    """`Trainer` optimizes the loss of the recipe, on the same blocks."""
    from studies.speed.electra_trainer import Rows, WithLoss, as_inputs

    task = make_task(words.recipe(data))
    torch.manual_seed(0)
    model = task.model().eval()
    batch = task.order(0)[0]
    rows = Rows(task.data.parts["train"])
    torch.manual_seed(5)
    given = WithLoss(task, model)(**as_inputs(rows.__getitems__(batch.indices.tolist())))["loss"]
    torch.manual_seed(5)
    assert given.item() == pytest.approx(task.loss(model, task.fetch(batch), batch.length).item(), rel=1e-6)
