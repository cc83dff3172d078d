"""Untrained twins: shapes and weights, verdicts, and the rate of false positives."""

import math

import pytest
import torch
from torch import nn

from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.prune import prune
from repulsive.diagnostics.summary import as_json, as_text
from repulsive.diagnostics.untrained_baseline import Null, against_chance
from repulsive.diagnostics.untrained_twin import untrained_twin
from repulsive.errors import NoTwin
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.pages.inspection_page import render_inspection
from tests.heads.zoo import SMALL, build

transformers = pytest.importorskip("transformers")


def text(seed: int = 0, sentences: int = 8) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, 60, (sentences, 16), generator=torch.Generator().manual_seed(seed))}


def bert(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.BertModel(transformers.BertConfig(**{**SMALL, "hidden_size": 64}))


def with_equal_logits(model: nn.Module) -> nn.Module:
    """Give all heads of layer 0 the logits of head 0, each in its own basis; layer 1 stays untrained."""
    attention, generator = model.encoder.layer[0].attention.self, torch.Generator().manual_seed(1)
    with torch.no_grad():
        for head in range(1, 4):
            turn = torch.randn(16, 16, generator=generator)
            attention.query.weight[16 * head : 16 * head + 16] = turn @ attention.query.weight[:16]
            attention.key.weight[16 * head : 16 * head + 16] = torch.linalg.inv(turn).T @ attention.key.weight[:16]
    return model


@pytest.mark.parametrize("name", ["bert, sdpa", "llama, sdpa", "t5", "torch transformer", "timm", "nanogpt"])
def test_a_twin_has_the_shapes_and_scale_of_the_model_and_other_weights(name):
    model, _ = build(name)
    state = torch.random.get_rng_state()
    twin, again, other = (untrained_twin(model.train(), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state) and model.training
    for (title, mine), (same, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert title == same and mine.shape == theirs.shape and mine.dtype == theirs.dtype
        mine, theirs = mine.detach(), theirs.detach()
        if mine.numel() > 500 and mine.ndim == 2:
            assert float(theirs.std() / mine.std()) == pytest.approx(1, rel=0.3), title
            cosine = torch.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0)
            assert abs(float(cosine)) < 0.2, title
    weights = [next(p for p in each.parameters() if p.ndim == 2) for each in (twin, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_twins_of_other_models():
    own = Transformer(TransformerConfig.tiny(vocabulary=100))
    assert untrained_twin(own)(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)) is not None
    half = untrained_twin(bert().to(torch.bfloat16))
    assert half.encoder.layer[0].attention.self.query.weight.dtype == torch.bfloat16
    cut = untrained_twin(prune(bert(), [(0, 1)]))  # its configuration still has four heads in layer 0
    assert cut.encoder.layer[0].attention.self.query.weight.shape == (48, 64)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.inner = nn.Parameter(torch.ones(8)), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.factor, x, x)[0]

    with pytest.raises(NoTwin, match=r"the model \(Scaled\) has no method reset_parameters\(\) .*; add one"):
        untrained_twin(Scaled())
    found = against_chance(Scaled(), [torch.randn(2, 5, 8)])
    assert found.logits[0].verdict == "cannot say" and "no method reset_parameters" in found.notes[0]

    class Initialised(Scaled):  # as in timm
        def init_weights(self, mode: str = "") -> None:
            nn.init.normal_(self.factor, std=0.02)
            nn.init.normal_(self.inner.in_proj_weight, std=0.02)

    twin = untrained_twin(Initialised())
    assert 0.005 < float(twin.factor.std()) < 0.05 and 0.015 < float(twin.inner.in_proj_weight.std()) < 0.025

    class Kept(Scaled):
        def init_weights(self) -> None:
            """Draw nothing."""

    with pytest.raises(NoTwin, match=r"init_weights of the model \(Kept\) draws no new weights"):
        untrained_twin(Kept())


def test_verdicts_need_three_standard_deviations_and_a_margin():
    null = Null((0.0, 0.1, 0.2))  # 0.1 +- 0.1
    values = (0.39, 0.41, -0.19, -0.21, math.nan)
    assert [null.verdict(value) for value in values] == [
        "as chance",
        "more alike than chance",
        "as chance",
        "more different than chance",
        "cannot say",
    ]
    narrow = Null((0.1, 0.1, 0.1))
    assert [narrow.verdict(0.119), narrow.verdict(0.121)] == ["as chance", "more alike than chance"]
    assert Null((0.1, 0.1, 0.1), pooled=0.1).verdict(0.39) == "as chance"
    assert Null((0.1,)).verdict(0.9) == Null().verdict(0.9) == "cannot say"


def test_equal_logits_are_detected_although_weights_differ():
    model = with_equal_logits(bert())
    query = model.encoder.layer[0].attention.self.query.weight.detach().view(4, -1)
    assert float(torch.corrcoef(query).triu(1).abs().max()) < 0.5  # the weights are not similar
    found = against_chance(model, [text(), text(1)])
    first, second = found.logits
    assert first.similarity.mean > 0.99 and first.verdict == first.pair_verdict == "more alike than chance"
    assert len(first.mean.values) == 3 and abs(first.mean.mean) < 0.2
    assert second.verdict == "as chance" and {each.verdict for each in found.ov} == {"as chance"}
    bare = against_chance(model, [text()], twins=0)
    assert bare.logits[0].verdict == "cannot say" and math.isnan(bare.logits[0].mean.mean) and not bare.notes


def test_untrained_models_are_as_chance():
    """At most 10 % of 40 layers of untrained models may be false positives; measured: 3 % of 200."""
    verdicts = []
    for seed in range(10):
        found = against_chance(bert(1000 + seed), [text(seed)], seed=10 * seed)
        verdicts += [each.verdict for each in found.logits + found.ov]
    assert len(verdicts) == 40 and verdicts.count("as chance") >= 36


def test_the_inspection_shows_numbers_and_verdicts():
    found = inspect_heads(with_equal_logits(bert()), [text()])
    out = as_text(found)
    line = next(row for row in out.splitlines() if row.startswith("encoder.layer.0.attention.self "))
    assert "similarity of heads in attention logits" in out and "similarity of heads in OV circuits" in out
    assert "more alike than chance" in line and f"{found.circuits.logits[0].similarity.mean:+.3f}" in line
    numbers = as_json(found)["similarity"]
    assert numbers["logits"][0]["verdict"] == "more alike than chance" and len(numbers["ov"]) == 2
    assert numbers["logits"][0]["mean_cosine"] == found.circuits.logits[0].similarity.mean
    assert len(numbers["logits"][1]["untrained"]["mean_cosine"]) == 3
    assert len(numbers["logits"][1]["cosine"]) == 4 and numbers["logits"][1]["largest_pair"][1] > 0
    page = render_inspection(found, title="Heads")
    places = [
        page.index(f"<h3>{title}</h3>")
        for title in ("Similarity of attention logits", "Similarity of value-output circuits", "Redundant heads")
    ]
    assert places == sorted(places) and "<td>more alike</td>" in page and "mean over layers; untrained" in page


def test_without_twins_the_page_does_not_mention_chance():
    page = render_inspection(inspect_heads(bert(), [text()], twins=0), title="Heads")
    assert "Similarity of attention logits" in page and "fresh random weights" not in page and "cannot say" in page


def test_additive_attention_is_left_out_with_a_note():
    model, inputs = build("additive")
    found = inspect_heads(model, [inputs])
    assert not found.circuits.logits and any("has no queries and keys" in note for note in found.notes)
    assert "Similarity of attention logits" not in render_inspection(found, title="Heads")
