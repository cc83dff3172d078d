"""Verdicts on similarity in every space: constructed models, intervals against brute force, grouped heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from repulsive import Heads
from repulsive.diagnostics.captured_similarity import centre_attention
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.model_heads import SPACES, Space
from repulsive.diagnostics.sequence_jackknife import jackknife_interval
from repulsive.diagnostics.short_summary import short_summary
from repulsive.diagnostics.similarity import of_weights
from repulsive.diagnostics.untrained_baseline import Null
from repulsive.metrics.student import interval
from repulsive.pages.inspection_page import render_inspection
from repulsive.terminal.table import Table

transformers = pytest.importorskip("transformers")

WIDTH, SIGNED = 16, ("logits", "ov", "attention", "outputs")  # width of a head; spaces whose scores can be negative


def text(sentences: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, 60, (sentences, 16), generator=torch.Generator().manual_seed(seed))}


def bert(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64
    )
    return transformers.BertModel(config).eval()


def qwen(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
    return transformers.Qwen2Model(config).eval()


@torch.no_grad()
def change(model: nn.Module, signs: tuple[int, ...] = (), sharper: float = 0.0) -> nn.Module:
    """Make heads of layer 0 copies of head 0 (2 for a sign of 2, ...), negated for a negative sign; or sharpen them."""
    layer = model.encoder.layer[0].attention
    query, key, value = layer.self.query.weight, layer.self.key.weight, layer.self.value.weight
    out = layer.output.dense.weight
    for head, sign in enumerate(signs):
        own = slice(WIDTH * head, WIDTH * (head + 1))
        source = slice(WIDTH * (abs(sign) - 1), WIDTH * abs(sign))
        factor = 1 if sign > 0 else -1
        query[own], key[own] = factor * query[source], key[source].clone()
        value[own], out[:, own] = factor * value[source], out[:, source].clone()
    if sharper:
        query *= sharper
        key *= sharper
    return model


@pytest.mark.parametrize("space", SPACES)
def test_duplicated_heads_are_more_alike_than_chance(space: Space) -> None:
    table = Heads(change(bert(), (1, 1, 1, 1))).similarity([text(), text(seed=1)], space)
    assert table[0].mean == pytest.approx(1, abs=1e-4)
    assert table.verdicts[0] == table.pair_verdicts[0] == "more alike than chance"
    assert table[0].name in repr(table) and "more alike than chance: " in repr(table).splitlines()[0]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("build", [bert, qwen])
def test_untrained_models_are_as_chance(build, space: Space) -> None:
    """Measured on 32 layers per space: 1 of 160 verdicts is wrong, and a third of those on CKA are "cannot say"."""
    table = Heads(build(1000)).similarity([text(), text(seed=1)], space)
    assert set(table.verdicts) <= ({"as chance", "cannot say"} if space == "cka" else {"as chance"}) and not table.notes


@pytest.mark.parametrize("space", SIGNED)
def test_opposite_heads_are_more_different_than_chance(space: Space) -> None:
    """Heads u, -u, w, -w have the mean cosine -1/3, whatever the cosine of u and w."""
    # outputs: attention is made uniform, so that they differ only in the sign of the values
    model = change(bert(), (1, -1, 3, -3), sharper=1e-3 if space == "outputs" else 0)
    table = Heads(model).similarity([text(), text(seed=1)], space)
    assert table[0].mean == pytest.approx(-1 / 3, abs=0.05)
    assert table.verdicts[0] == "more different than chance"


def test_sharp_heads_have_less_cka_than_chance() -> None:
    """Untrained attention is nearly uniform, so that all outputs vary alike; sharp heads attend to different tokens."""
    table = Heads(change(bert(), sharper=8.0)).similarity([text(), text(seed=1)], "cka")
    assert table.verdicts[0] == "more different than chance"


def test_attention_is_compared_without_its_uniform_part() -> None:
    generator = torch.Generator().manual_seed(0)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=generator)
    weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)  # [B, M, T, S]
    centred, real = centre_attention(weights, torch.tensor([[True] * 4, [True, True, True, False]]))
    assert real.tolist() == [[False, True, True, True], [False, True, True, False]]  # the first query has one key
    for query in range(1, 4):
        expected = weights[..., query, : query + 1] - 1 / (query + 1)
        torch.testing.assert_close(centred[..., query, : query + 1], expected)
    assert not centred[..., ~causal].any()


@pytest.mark.parametrize("space", SPACES)
def test_one_sequence_gives_no_verdict(space: Space) -> None:
    table = Heads(change(bert(), (1, 1, 1, 1))).similarity([text(1)], space)
    assert table[0].mean == pytest.approx(1, abs=1e-4) and table[0].interval is None
    assert set(table.verdicts + table.pair_verdicts) == {"cannot say"}


@pytest.mark.parametrize("space", SPACES)
def test_left_out_sequences_agree_with_measuring_the_others(space: Space) -> None:
    heads, ids = Heads(bert().double()), text(4)["input_ids"]
    batch = heads.similarity([{"input_ids": ids}], space, twins=0)
    single = heads.similarity([{"input_ids": row[None]} for row in ids], space, twins=0)
    for group in range(4):
        kept = ids[torch.arange(4) != group]
        expected = heads.similarity([{"input_ids": kept}], space, twins=0)
        alone = heads.similarity([{"input_ids": row[None]} for row in kept], space, twins=0)
        for layer in range(2):
            torch.testing.assert_close(batch[layer].left_out[group], expected[layer].cosine)
            torch.testing.assert_close(single[layer].left_out[group], alone[layer].cosine)
    low, high = batch[0].interval
    assert low < batch[0].mean < high


@pytest.mark.parametrize("space", SPACES)
def test_two_sequences_of_which_one_is_padding_give_no_interval(space: Space) -> None:
    ids, mask = text(2)["input_ids"], torch.tensor([[0], [1]]).expand(2, 16)
    table = Heads(bert()).similarity([{"input_ids": ids, "attention_mask": mask}], space, twins=0)
    assert all(layer.interval is None and abs(layer.mean) <= 1 for layer in table)


def test_padding_does_not_count() -> None:
    heads, ids = Heads(bert()), text(3)["input_ids"]
    padded = torch.cat([ids, torch.zeros(3, 4, dtype=torch.long)], 1)
    mask = torch.cat([torch.ones(3, 16), torch.zeros(3, 4)], 1).long()
    for space in ("attention", "outputs", "cka"):
        plain = heads.similarity([{"input_ids": ids}], space, twins=0)
        masked = heads.similarity([{"input_ids": padded, "attention_mask": mask}], space, twins=0)
        for a, b in zip(plain, masked, strict=True):
            torch.testing.assert_close(a.left_out, b.left_out, atol=1e-5, rtol=1e-4)


def test_jackknife_of_a_mean_is_the_interval_of_student() -> None:
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left_out = torch.stack([values[torch.arange(6) != k].mean() for k in range(6)])
    assert jackknife_interval(float(values.mean()), left_out) == pytest.approx(interval(values.tolist()))
    assert jackknife_interval(0.5, left_out[:1]) is None and jackknife_interval(float("nan"), left_out) is None


def test_intervals_decide_between_verdicts() -> None:
    null = Null((0.0, 0.1, 0.2))  # chance: -0.2 to 0.4
    cases = {(0.5, 0.45, 0.55): "more alike than chance", (0.5, 0.3, 0.7): "cannot say", (0.1, 0.0, 0.5): "as chance"}
    cases |= {(-0.5, -0.6, -0.4): "more different than chance", (0.1, -0.3, 0.5): "cannot say"}
    for (value, low, high), verdict in cases.items():
        assert null.verdict(value, (low, high)) == verdict


def test_a_fully_diverse_model_with_grouped_heads_reads_as_fully_diverse() -> None:
    """Eight query heads share two key-value heads: two orthogonal key-value heads are two effective heads, of two."""
    model = qwen()
    with torch.no_grad():
        for layer in model.layers:
            for part in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.self_attn.o_proj,
            ):
                nn.init.orthogonal_(part.weight)
                if part.bias is not None:
                    part.bias.zero_()
    heads = Heads(model)
    for diversity in of_weights(heads.groups):
        assert diversity.num_heads == (8 if diversity.name.endswith(".q") else 2)
        assert diversity.effective_heads == pytest.approx(diversity.num_heads, abs=1e-4)
        assert abs(diversity.mean_cosine) < 1e-5
    inspection = inspect_heads(model)
    table = short_summary(inspection)[1]
    assert isinstance(table, Table)
    assert ["effective heads, weights", "8.0 of 8, 2.0 of 2, mean over layers"] in [list(row) for row in table.rows]
    assert "8.0 of 8, 2.0 of 2, mean over layers" in render_inspection(inspection, title="model")
    batches = [text(), text(seed=1)]
    for space in ("logits", "ov", "outputs"):
        table = heads.similarity(batches, space)
        assert table[0].num_heads == 8 and abs(table[0].mean) < 0.1
        assert "more alike than chance" not in table.verdicts
