"""Packed batches on the engine: the same loss as padded ones, in one process and in two, captured and compiled."""

import subprocess
import sys

import pytest
import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine.batch_gradients import rank_share
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import make_task, open_recipe
from tests.lab.engine import tiny
from tests.lab.systems.translation import digits
from tests.lab.systems.translation.parallel_files import write_pairs

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

PACKED = ("packed=true", "training.batch=300")
ON_CHIP = (*PACKED, "model.heads=2")  # heads of 16, which the kernels take


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Words on spaces, so that nothing is needed to tokenise them."""
    folder = tmp_path_factory.mktemp("packed")
    raw = write_pairs(folder / "raw", sizes=(400, 20, 20), longest=5)
    prepare("translation", raw, folder / "prepared", jobs=1, most=120, tokenizer="none")
    digits.toml(folder).write_text(digits.RECIPE.format(data=folder / "prepared", label="digits"))
    return folder


@pytest.mark.parametrize("more", [(), ("method.penalty=0.5",), ("method.penalty=0.5", "loss.penalty_on=subspaces")])
def test_the_loss_is_that_of_a_padded_batch(more, data):
    packed, padded = (make_task(digits.recipe(data, *more, *extra)) for extra in (PACKED, ()))
    torch.manual_seed(0)
    model = packed.model().double().eval()
    pack = packed.order(0)[0]
    longest = int(pack.sizes.max())
    expected = padded.loss(model, {"indices": pack.indices, "tokens": torch.tensor(pack.tokens)}, longest)
    torch.testing.assert_close(packed.loss(model, packed.fetch(pack), pack.length), expected)
    for processes in (2, 3):  # means of shares, weighted, are the mean
        total = torch.zeros((), dtype=torch.float64)
        for index in range(processes):
            mine, count = rank_share(pack, index, processes)
            assert mine.length < pack.length
            if not more:
                total += packed.loss(model, packed.fetch(mine), mine.length).double() * count / len(pack)
        if not more:
            torch.testing.assert_close(total, expected.double(), rtol=1e-6, atol=0)  # cross entropy is float32


def test_it_learns(data, tmp_path):
    found = digits.train(data, tmp_path, *PACKED, "training.epochs=3", "method.rule=svgd")
    assert found.folder.result["test"]["nll"] < 4.0  # log 120 and more at the start


@pytest.mark.slow
def test_two_processes_train_as_one(data, tmp_path):
    words = ["train", str(digits.toml(data)), "--device", "cpu", "--quiet", "--set", "model.dropout=0"]
    words += [word for change in PACKED for word in ("--set", change)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for start, out in ((tiny.command(), "one"), ([*launch, "repulsive"], "two")):
        command = [*start, *words, "--out", str(tmp_path / out)]
        subprocess.run(command, env=tiny.environment(), check=True, capture_output=True)
    one, two = (RunFolder(next((tmp_path / out).glob("*/seed-0"))).lines() for out in ("one", "two"))
    assert len(one) == len(two) > 6
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        (),
        PACKED,
        ON_CHIP,
        (*ON_CHIP, "training.compile=true"),
        (*ON_CHIP, "model.pre_norm=true"),
        ("method.penalty=0.5",),
        (*ON_CHIP, "method.penalty=0.5"),
        (*ON_CHIP, "method.penalty=0.5", "training.compile=true"),
    ],
    ids=["padded", "packed", "kernels", "compiled", "pre-norm", "penalty", "packed penalty", "compiled penalty"],
)
def test_captured_training_is_the_same_training(more, data, tmp_path):
    """No dropout: the loss of every step, with graphs and without any."""
    more = (*more, "model.dropout=0", "training.log_every=1", "training.tf32=false", "training.epochs=6")
    losses = []
    for name, extra in (("fast", ()), ("plain", ("training.capture=false", "training.compile=false"))):
        recipe = digits.recipe(data, *more, *extra)
        made = Loop(make_task(recipe), recipe, RunFolder(tmp_path / name), Watcher(), "cuda")
        made.run()
        made.folder.close()
        losses.append([line["loss"] for line in made.folder.lines() if line["kind"] == "train"])
        assert name == "plain" or len(made._gradients.captured._graphs) == 1 or "packed=true" not in more
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_mistakes(data):
    for changes, message in (
        ((*PACKED, "method.penalty=1", "loss.penalty_on=positions"), "no positions"),
        (("training.compile=true",), "set packed=true"),
    ):
        with pytest.raises(ConfigError, match=message):
            digits.recipe(data, *changes)
    with pytest.raises(ConfigError, match="many shapes"):
        open_recipe("yelp/ma", ["training.compile=true"])
