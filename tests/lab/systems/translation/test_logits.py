"""Repulsion between attention logits in translation: the recipes really repel, and runs without a force are refused."""

import copy

import pytest
import torch

from repulsive import SVGD, repel
from repulsive.errors import RunError
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.layers.packed import Packed
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.systems.translation.task import TranslationTask
from tests.lab.systems import running
from tests.lab.systems.translation.parallel_files import write_pairs

pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

RECIPES = ("iwslt14/logits", "multi30k/small-logits", "europarl/logits", "tatoeba/logits", "multi30k/logits")
TINY = (
    "model.width=16",
    "model.depth=[1, 1]",
    "model.feed_forward=16",
    "training.epochs=1",
    "training.batch=256",
    "training.precision=fp32",
    "training.log_every=2",
    "search.beam=1",
    "search.longest=6",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    raw = write_pairs(folder / "raw", sizes=(100, 4, 4), longest=5)
    prepare("translation", raw, folder / "prepared", jobs=1, most=120, tokenizer="none")
    return folder / "prepared"


@pytest.mark.parametrize("name", RECIPES)
def test_a_force_acts_in_the_recipes(name, data, tmp_path):
    recipe = open_recipe(name, [*TINY, f"data.folder={data}"])
    assert recipe.packed == open_recipe(name.replace("logits", "ma")).packed
    lines = running.train(recipe, tmp_path).folder.lines()
    ratios = [line["ratio"] for line in lines if line["kind"] == "heads"]
    assert ratios and min(ratios) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_force_acts_on_a_gpu(data, tmp_path, compiled):
    changes = ["model.heads=2", "model.width=32", f"training.compile={compiled}"]
    recipe = open_recipe("iwslt14/logits", [*TINY, *changes, "training.precision=bf16", f"data.folder={data}"])
    lines = running.train(recipe, tmp_path, device="cuda").folder.lines()
    ratios = [line["ratio"] for line in lines if line["kind"] == "heads"]
    assert ratios and min(ratios) > 0


@pytest.mark.parametrize("lengths", [(5, 5, 5), (2, 5, 4)])
def test_the_force_in_packed_sentences_is_that_in_padded_ones(lengths):
    """With all tokens sampled. Padded target sentences have no mask, so decoders are compared without padding."""
    torch.manual_seed(0)
    sizes = torch.tensor(lengths)
    real = torch.arange(5) < sizes[:, None]  # [3, 5]
    source, target = (torch.randint(4, 50, (3, 5)).where(real, 0) for _ in range(2))
    side = Packed.of(sizes)
    start = Transformer(TransformerConfig(50, 16, 4, (2, 1), 16, dropout=0.0)).double()
    gradients = []
    for packed in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        repel(model, optimizer, SVGD("heads", 1.0, space="logits", smoothing=0, tokens=10_000), verbose=False)
        inputs = (source[real], target[real]) if packed else (source, target)
        output = model(*inputs, packed=(side, side) if packed else None)
        output[... if packed else real].square().sum().backward()
        optimizer.step()
        where = "encoder" if min(lengths) < 5 else ""
        gradients.append({n: p.grad for n, p in model.named_parameters() if "_proj" in n and n.startswith(where)})
    padded, packed = gradients
    for name, grad in padded.items():
        torch.testing.assert_close(packed[name], grad, msg=name)
    plain = copy.deepcopy(start)
    plain(source, target)[real].square().sum().backward()
    name = "encoder.layers.0.self_attention.k_proj.weight"
    assert not torch.allclose(plain.get_parameter(name).grad, padded[name])


class _InEvaluation(TranslationTask):
    """A task that calls its model in evaluation mode, where no tokens are sampled."""

    def model(self):
        self._model = super().model()
        return self._model

    def loss(self, model, inputs, length):
        self._model.eval()
        return super().loss(model, inputs, length)


def test_a_training_that_samples_no_tokens_fails(data, tmp_path):
    recipe = open_recipe("iwslt14/logits", [*TINY, f"data.folder={data}"])
    with pytest.raises(RunError, match="no tokens were seen"):
        Loop(_InEvaluation(recipe), recipe, RunFolder(tmp_path), Watcher(), "cpu").run()
