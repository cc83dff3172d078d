"""Language modelling on the engine: the loss by hand, nats per byte, order, resuming, verbs, and that it learns."""

import json
import math
import signal

import numpy as np
import pytest
import torch

from repulsive.cli.app import run
from repulsive.errors import ConfigError
from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.loop import Stopped
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.runs.score import load_run, score
from repulsive.lab.systems.electra.toy import write_corpus, write_vocabulary
from repulsive.lab.systems.lm.data import numbers
from repulsive.lab.systems.lm.model import Decoder
from repulsive.lab.systems.lm.prepare import plan_text, plan_toy
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.engine import tiny
from tests.lab.systems import running
from tests.threads import one_thread  # noqa: F401  an autouse fixture

SMALL = ["model.width=16", "model.heads=2", "data.length=32", "data.steps=6", "training.epochs=2", "training.batch=8"]
SMALL += ["training.log_every=3"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "prepared"
    plan_toy(None, folder).make()
    return folder


def recipe(folder, *more, name="lm/toy-svgd"):
    return open_recipe(name, [f"data.folder={folder}", *SMALL, *more])


def unigram_entropy(tokens):
    """Entropy of the token frequencies, in nats: the best loss of a model that ignores its context."""
    shares = torch.bincount(numbers(tokens)).double() / len(tokens)  # [V]
    return -float(sum(p * math.log(p) for p in shares.tolist() if p))


class Uniform(torch.nn.Module):
    """Every token is equally likely."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, tokens):
        return torch.zeros(*tokens.shape, self.vocabulary)


# the loss


def test_the_loss_by_hand(toy):
    task = make_task(recipe(toy))
    torch.manual_seed(0)
    model, batch, text = task.model(), task.order(0)[2], numbers(task.parts["train"])
    total = 0.0
    for start in batch.indices.tolist():
        logs = model(text[None, start : start + 32])[0].log_softmax(-1).detach()
        total -= sum(float(logs[i, text[start + i + 1]]) for i in range(32))
    assert task.loss(model, task.fetch(batch), 32).item() == pytest.approx(total / (8 * 32), rel=1e-5)


def test_processes_together_have_the_loss_of_one(toy):
    task = make_task(recipe(toy))
    torch.manual_seed(0)
    model, batch = task.model(), task.order(0)[0]
    shares = [rank_share(batch, index, 3) for index in range(3)]
    split = sum(task.loss(model, task.fetch(mine), 32) * count / len(batch) for mine, count in shares)
    assert split.item() == pytest.approx(task.loss(model, task.fetch(batch), 32).item(), rel=1e-6)


def test_the_loss_never_waits_for_the_device(toy):
    changes = "model.drop_heads=0.1", "model.kv_heads=1", "model.qk_norm=true"
    running.check_the_loss_never_waits(make_task(recipe(toy, *changes)))


def test_nats_per_byte_of_uniform_guesses(toy, tmp_path):
    """log V for a byte; for word pieces log V times pieces over bytes. Every token counts once but the first."""
    task = make_task(recipe(toy, "data.length=100"))
    found = task.evaluate(Uniform(256), "dev")
    assert found.metrics["nats_per_byte"] == pytest.approx(math.log(256), rel=1e-6)
    assert int(found.items["labels"].sum()) == len(task.parts["dev"]) - 1
    assert found.metrics["log_likelihood"] == -found.metrics["nats_per_byte"]

    pytest.importorskip("tokenizers")
    vocabulary = write_vocabulary(tmp_path)
    plan = plan_text(write_corpus(tmp_path), tmp_path / "pieces", tokenizer="wordpiece", vocabulary=vocabulary, dev=0.1)
    text = plan.make()
    task = make_task(recipe(tmp_path / "pieces"))
    found = task.evaluate(Uniform(text.vocabulary), "test").metrics
    each = math.log(text.vocabulary)
    assert found["nll"] == pytest.approx(each, rel=1e-6)
    assert found["nats_per_byte"] == pytest.approx(each * len(text.parts["test"]) / text.bytes["test"], rel=1e-6)


def test_an_evaluation_is_that_of_one_long_loop(toy):
    """Window by window without padding, and items that have the metrics as their means."""
    task = make_task(recipe(toy, "data.length=50"))
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.inference_mode():
        found = task.evaluate(model, "dev")
        text, nats, right = numbers(task.parts["dev"]), [], []
        for start in range(0, len(text) - 1, 50):
            window = text[start : start + 51]
            logs = model(window[None, :-1])[0].log_softmax(-1)  # [T, V]
            nats += logs[torch.arange(len(logs)), window[1:]].neg().tolist()
            right += (logs.argmax(-1) == window[1:]).tolist()
    assert len(nats) == len(text) - 1
    assert found.metrics["nll"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert found.metrics["accuracy"] == pytest.approx(np.mean(right), rel=1e-9)
    assert float(found.items["nll"].mean()) == found.metrics["nll"]


def test_unigram_entropy_by_hand():
    assert unigram_entropy(torch.tensor([3, 3, 5, 5], dtype=torch.uint8)) == pytest.approx(math.log(2))
    assert unigram_entropy(torch.tensor([7, 7], dtype=torch.uint8)) == 0.0


# order


def test_windows_are_a_function_of_seed_and_step(toy):
    task, again = make_task(recipe(toy)), make_task(recipe(toy))
    other = make_task(recipe(toy, "seed=1"))
    drawn = [batch.indices.tolist() for epoch in (0, 1) for batch in task.order(epoch)]
    assert drawn == [batch.indices.tolist() for epoch in (0, 1) for batch in again.order(epoch)]
    assert len({tuple(starts) for starts in drawn}) == 12
    assert drawn[0] != other.order(0)[0].indices.tolist()
    longer = make_task(recipe(toy, "data.steps=12"))  # what is called an epoch does not change the windows
    assert drawn == [batch.indices.tolist() for batch in longer.order(0)]


def test_windows_lie_within_the_text(toy):
    task = make_task(recipe(toy, "data.share=0.0002", "training.batch=512"))
    assert task.num_data == 51 and len(task.parts["dev"]) > 51
    starts = task.order(0)[0].indices
    assert int(starts.min()) == 0 and int(starts.max()) == 51 - 33
    assert math.isfinite(task.loss(task.model(), task.fetch(task.order(0)[0]), 32).item())


# runs


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole" / "seed-0"
    running.train(recipe(toy, "model.drop_heads=0.2"), folder)
    return folder


def test_resumed_it_ends_with_the_same_bits(toy, whole, tmp_path):
    asked, folder = recipe(toy, "model.drop_heads=0.2"), tmp_path / "stopped"
    with pytest.raises(Stopped, match="step 9 of 12"):
        running.train(asked, folder, tiny.At(9, tiny.signalled(signal.SIGTERM)))
    running.train(asked, folder)
    tiny.assert_same(folder, whole)


def test_between_two_forces_it_resumes_with_the_same_bits(toy, tmp_path):
    """From step 100 on a force is used twice; the one in use at step 101 is part of the checkpoint."""
    settings = recipe(toy, "method.space=logits", "method.smoothing=0", "data.steps=52", "training.log_every=1")
    running.train(settings, tmp_path / "whole")
    with pytest.raises(Stopped, match="step 101 of 104"):
        running.train(settings, tmp_path / "stopped", tiny.At(101, tiny.signalled(signal.SIGTERM)))
    running.train(settings, tmp_path / "stopped")
    tiny.assert_same(tmp_path / "stopped", tmp_path / "whole")


def test_the_result_has_nats_per_byte(whole):
    result = json.loads((whole / "result.json").read_text())
    assert result["steps"] == 12 and result["label"] == "SVGD, toy"
    for part in ("dev", "test"):
        assert result[part]["nats_per_byte"] == result[part]["nll"] < math.log(256)
    heads = [line for line in RunFolder(whole).lines() if line["kind"] == "heads"]
    assert heads and heads[-1]["repulsion"] > 0


def test_texts_too_short_to_train_on_can_be_evaluated(whole, tmp_path):
    for part in ("train", "dev", "test"):
        (tmp_path / f"{part}.txt").write_text("The sky is blue.\n")
    plan_text(tmp_path, tmp_path / "prepared").make()
    (row,) = score([whole.parent], "test", tmp_path / "prepared", "cpu")
    assert 0 < row.cells["nats_per_byte"].mean < 9


def test_verbs_read_its_runs(toy, whole, tmp_path, capsys):
    place = str(whole.parent)
    assert isinstance(load_run(RunFolder(whole), torch.device("cpu"))[1], Decoder)
    (row,) = score([whole.parent], "test", device="cpu")
    kept = json.loads((whole / "result.json").read_text())["test"]["nats_per_byte"]
    assert row.cells["nats_per_byte"].mean == pytest.approx(kept, rel=1e-6)
    assert run(["evaluate", place]) == 0 and "nats_per_byte" in capsys.readouterr().out
    assert run(["report", place, "--out", str(tmp_path / "page.html"), "--device", "cpu"]) == 0
    assert "nats per byte" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    for words in (["export", place, "--out", str(tmp_path / "exported")], ["inspect", place]):
        assert run(words) == 2
        output = capsys.readouterr().err
        assert output.count("\n") == 1 and "run" in output


@pytest.mark.parametrize("method", ["ma", "svgd", "svgd-sphere", "logits"])
def test_the_toy_is_learned(method, toy, tmp_path):
    """Below what guessing by frequency can reach, in 60 steps of a smaller model."""
    settings = recipe(toy, "data.steps=60", "training.epochs=1", "model.width=32", name=f"lm/toy-{method}")
    running.train(settings, tmp_path)
    task = make_task(settings)
    reached = json.loads((tmp_path / "result.json").read_text())["test"]["nats_per_byte"]
    assert reached < 0.9 * unigram_entropy(task.parts["test"])


# recipes


@pytest.mark.parametrize("dataset", ["toy", "europarl", "wikipedia"])
def test_methods_differ_in_the_method_alone(dataset):
    plain = open_recipe(f"lm/{dataset}-ma")
    for method in ("svgd", "svgd-sphere", "logits"):
        other = open_recipe(f"lm/{dataset}-{method}")
        assert (other.data, other.model, other.training, other.optimizer) == (
            plain.data,
            plain.model,
            plain.training,
            plain.optimizer,
        )
    assert str(plain.data.folder) == f"prepared/lm-{dataset}"


def test_the_default_size_and_schedule():
    settings = open_recipe("lm/europarl-ma")
    assert (settings.model.layers, settings.model.heads, settings.model.width, settings.data.length) == (8, 8, 512, 512)
    assert settings.data.steps * settings.training.epochs == 1800 and settings.training.batch == 64
    used = settings.optimizer
    assert (used.name, used.lr, used.betas, used.weight_decay, used.clip) == ("adamw", 1e-3, (0.9, 0.95), 0.1, 1.0)
    assert (used.schedule, used.final, used.warmup) == ("cosine", 0.1, 100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.length=300000", "take shorter sequences or more text"),
        ("data.length=0", "length and steps must be at least 1"),
        ("data.share=0", "above 0 and at most 1"),
        ("data.share=1.01", "above 0 and at most 1"),
        ("model.heads=3", "does not divide into heads"),
        ("model.kv_heads=5", "does not divide into kv_heads"),
        ("method.penalty=1", "no regularizer"),
    ],
)
def test_a_recipe_that_cannot_be(change, message, toy):
    with pytest.raises(ConfigError, match=message):
        make_task(recipe(toy, change)).order(0)
