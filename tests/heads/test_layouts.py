"""Layout strings, and `HeadGroup.read` against slices written by hand for each kind of layout."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from repulsive.errors import HeadLayoutError
from repulsive.heads import by_hand, discover, find_heads
from repulsive.heads.layout import HeadSlice
from repulsive.heads.table import parse_layout
from repulsive.heads.table.parse_layout import rows_of
from tests.heads.zoo import build

LAYOUTS = (
    "qkv head dim",
    "head qkv dim",
    "qkv dim head",
    "q head dim | kv head dim",
    "group q+k+v dim",
    "2 kqv head dim",
)


@given(st.sampled_from(LAYOUTS), st.integers(1, 4), st.sampled_from([(2, 2), (4, 2), (4, 4), (6, 2)]))
def test_every_feature_belongs_to_one_head_of_one_part(layout: str, dim: int, counts: tuple[int, int]) -> None:
    heads, kv_heads = counts if "qkv" not in layout and "kqv" not in layout else (counts[0], counts[0])
    features = (heads + 2 * kv_heads) * dim
    tables = rows_of(layout, features, heads, kv_heads)
    assert {part: tuple(table.shape) for part, table in tables.items()} == {
        "q": (heads, dim),
        "k": (kv_heads, dim),
        "v": (kv_heads, dim),
    }
    assert sorted(n for table in tables.values() for n in table.flatten().tolist()) == list(range(features))


def test_examples_in_docstrings_run() -> None:
    for module in (parse_layout, discover, by_hand):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


def _read(model: nn.Module, name: str) -> torch.Tensor:
    return {g.name: g for g in find_heads(model)}[name].read()


def test_rows_of_simple_layouts() -> None:
    assert rows_of("q head dim", 6, 3)["q"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert rows_of("qkv head dim", 12, 2)["v"].tolist() == [[8, 9], [10, 11]]
    assert rows_of("head qkv dim", 12, 2)["k"].tolist() == [[2, 3], [8, 9]]
    assert rows_of("q dim head", 6, 2)["q"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert rows_of("head qg dim", 8, 2)["q"].tolist() == [[0, 1], [4, 5]]
    assert set(rows_of("head qg dim", 8, 2)) == {"q"}


@pytest.mark.parametrize(
    ("rows", "axis", "is_whole"),
    [
        ([[0, 1, 2], [3, 4, 5]], 0, True),
        ([[0, 1], [2, 3]], 0, False),  # packed with something else
        ([[1, 2], [4, 5]], 0, False),
        ([[0, 2, 4], [1, 3, 5]], 0, False),
        ([[0, 1, 2], [3, 4, 5]], 1, False),
    ],
)
def test_heads_that_cover_a_whole_parameter_in_order(rows: list[list[int]], axis: int, is_whole: bool) -> None:
    layer = nn.Linear(6, 6, bias=False)
    assert HeadSlice(layer, "weight", "weight", torch.tensor(rows), axis=axis).is_whole is is_whole


@pytest.mark.parametrize("axis", [0, 1])
def test_heads_in_rows_without_a_pattern_are_read_and_written(axis: int) -> None:
    layer, rows = nn.Linear(7, 7, bias=False), torch.tensor([[5, 0], [2, 3], [6, 1]])
    part = HeadSlice(layer, "weight", "weight", rows, axis=axis)
    weight = torch.arange(49.0).view(7, 7)
    lines = weight if axis == 0 else weight.T
    heads = part.take(weight)
    assert heads.tolist() == [[*lines[a].tolist(), *lines[b].tolist()] for a, b in rows.tolist()]
    new = torch.zeros(7, 7)
    part.put(new, heads)
    assert torch.equal(new, weight * (new != 0)) and not new.movedim(axis, 0)[4].any()
    assert torch.equal(part.take(new), heads)


def test_rows_of_grouped_layouts() -> None:
    blocks = rows_of("q head dim | kv head dim", 8, 4, 2)  # q 0-3, k 4-5, v 6-7
    assert {part: table.flatten().tolist() for part, table in blocks.items()} == {
        "q": [0, 1, 2, 3],
        "k": [4, 5],
        "v": [6, 7],
    }
    grouped = rows_of("group q+k+v dim", 8, 4, 2)  # q q k v, q q k v
    assert {part: table.flatten().tolist() for part, table in grouped.items()} == {
        "q": [0, 1, 4, 5],
        "k": [2, 6],
        "v": [3, 7],
    }
    sharded = rows_of("2 qvk head dim", 12, 4)  # q q v v k k, twice
    assert {part: table.flatten().tolist() for part, table in sharded.items()} == {
        "q": [0, 1, 6, 7],
        "v": [2, 3, 8, 9],
        "k": [4, 5, 10, 11],
    }


@pytest.mark.parametrize("layout", ["head dim", "q head", "q k head dim", "x head dim"])
def test_incomplete_layouts_are_refused(layout: str) -> None:
    with pytest.raises(HeadLayoutError, match="each block needs"):
        rows_of(layout, 12, 2)


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(HeadLayoutError, match="10 features do not divide into 4 heads"):
        rows_of("q head dim", 10, 4)


def test_in_proj_weight() -> None:
    model, _ = build("torch packed")
    torch.testing.assert_close(_read(model, "k"), model.in_proj_weight[16:32].reshape(4, 4 * 16), rtol=0, atol=0)


def test_separate_projections() -> None:
    model, _ = build("torch separate")
    torch.testing.assert_close(_read(model, "v"), model.v_proj_weight.reshape(4, 4 * 10), rtol=0, atol=0)


def test_timm_qkv() -> None:
    model, _ = build("timm")
    torch.testing.assert_close(_read(model, "1.v"), model[1].qkv.weight[48:].reshape(3, 8 * 24), rtol=0, atol=0)


def test_additive_rows() -> None:
    model, _ = build("additive")
    torch.testing.assert_close(_read(model, "v"), model.score.weight, rtol=0, atol=0)


def test_bert_linear() -> None:
    pytest.importorskip("transformers")
    model, _ = build("bert, sdpa")
    weight = model.encoder.layer[1].attention.self.key.weight
    torch.testing.assert_close(_read(model, "encoder.layer.1.attention.self.k"), weight.view(4, 8 * 32), rtol=0, atol=0)


def test_gpt2_conv1d_is_transposed() -> None:
    pytest.importorskip("transformers")
    model, _ = build("gpt2 with cross-attention, sdpa")
    weight = model.h[0].attn.c_attn.weight  # [in, 3 * heads * dim]
    truth = torch.stack([weight[:, 32 + 8 * h : 40 + 8 * h].T.flatten() for h in range(4)])
    torch.testing.assert_close(_read(model, "h.0.attn.k"), truth, rtol=0, atol=0)
    cross = model.h[0].crossattention.c_attn.weight
    truth = torch.stack([cross[:, 32 + 8 * h : 40 + 8 * h].T.flatten() for h in range(4)])
    torch.testing.assert_close(_read(model, "h.0.crossattention.v"), truth, rtol=0, atol=0)


def test_neox_is_interleaved() -> None:
    pytest.importorskip("transformers")
    model, _ = build("gpt-neox, eager")
    weight = model.layers[0].attention.query_key_value.weight
    truth = torch.stack([weight[24 * h + 16 : 24 * h + 24].flatten() for h in range(4)])
    torch.testing.assert_close(_read(model, "layers.0.attention.v"), truth, rtol=0, atol=0)


def test_llama_groups_and_phi3_blocks() -> None:
    pytest.importorskip("transformers")
    model, _ = build("llama, sdpa")
    groups = {g.part: g for g in find_heads(model, layers=[0])}
    assert (groups["q"].num_heads, groups["k"].num_heads, groups["q"].serves) == (4, 2, (0, 0, 1, 1))
    model, _ = build("phi3")
    weight = model.layers[0].self_attn.qkv_proj.weight  # 32 of q, 16 of k, 16 of v
    torch.testing.assert_close(_read(model, "layers.0.self_attn.v"), weight[48:].view(2, 8 * 32), rtol=0, atol=0)


def test_falcon_groups_q_k_and_v_by_kv_head() -> None:
    pytest.importorskip("transformers")
    model, _ = build("falcon")
    weight = model.h[0].self_attention.query_key_value.weight.view(2, 4, 8, 32)  # [kv, q q k v, dim, in]
    torch.testing.assert_close(_read(model, "h.0.self_attention.q"), weight[:, :2].reshape(4, -1), rtol=0, atol=0)
    torch.testing.assert_close(_read(model, "h.0.self_attention.k"), weight[:, 2].reshape(2, -1), rtol=0, atol=0)
