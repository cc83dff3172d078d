"""Pairs of q and kv heads, mixed heads, windows, FlexAttention and variable-length attention in the trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive import HeadLayoutError, find_heads, heads_by_hand, verify_heads
from repulsive.heads.module_paths import where_of
from repulsive.heads.select import join_heads
from repulsive.heads.trace import tracer
from tests.heads.tricky import D, E, H, TalkingHeads, Tiled, Windowed

X = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("eager", [False, True])
def test_tiled_kv_heads_join_the_q_heads_they_serve(eager: bool) -> None:
    model = Tiled(eager)
    (guess,) = find_heads(model, particle="head")
    assert guess.slices[0].rows[0].tolist() == [0, 1, 2, 3, 4, 5]  # q heads 0 and 1, which is wrong here
    for groups in ([guess], find_heads(model)):
        with pytest.raises(HeadLayoutError, match=r"pairs head|serve the q heads"):
            verify_heads(model, X, groups)
    with pytest.raises(HeadLayoutError):
        verify_heads(model, X)
    (joined,) = find_heads(model, X, particle="head")
    assert joined.slices[0].rows[0].tolist() == [0, 1, 2, 6, 7, 8]  # q heads 0 and 2
    assert joined.proof == "proved"
    assert find_heads(model, X, parts="q")[0].serves == (0, 1, 0, 1)
    assert {r.status for r in verify_heads(model, X, [joined])} == {"verified"}


def test_a_pairing_by_hand_is_checked_too() -> None:
    model = Tiled()
    q, k, v = heads_by_hand(model, {"q_proj": ("q", H), "k_proj": ("k", 2), "v_proj": ("v", 2)})
    with pytest.raises(HeadLayoutError, match="pairs head"):
        verify_heads(model, X, join_heads([q, k, v]))
    right = replace(q, serves=(0, 1, 0, 1))
    assert {r.status for r in verify_heads(model, X, [*join_heads([right, k, v])])} == {"verified"}


def test_joined_heads_that_are_all_too_coarse_are_caught() -> None:
    model = nn.MultiheadAttention(E, H, batch_first=True)
    coarse = join_heads(heads_by_hand(model, {"in_proj_weight": ("qkv head dim", 2)}))
    with pytest.raises(HeadLayoutError, match="at least 4 heads"):
        verify_heads(model, (X, X, X), coarse)


def test_rows_that_attention_does_not_use_are_caught() -> None:
    class Gated(nn.Module):
        """The query weight has a gate next to each query head."""

        def __init__(self) -> None:
            super().__init__()
            self.num_heads = H
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(E, 2 * H * D), nn.Linear(E, H * D), nn.Linear(E, H * D)

        def forward(self, x: Tensor) -> Tensor:
            q, gate = self.q_proj(x).unflatten(-1, (H, 2 * D)).transpose(1, 2).chunk(2, -1)
            k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.k_proj, self.v_proj))
            return (F.scaled_dot_product_attention(q, k, v) * gate.sigmoid()).transpose(1, 2).flatten(2)

    model = Gated()
    with pytest.raises(HeadLayoutError, match="does not use rows 3-5, 9-11"):
        verify_heads(model, X, heads_by_hand(model, {"q_proj": ("q", H)}))
    assert find_heads(model, X, parts="q")[0].slices[0].rows.tolist()[1] == [6, 7, 8]


@pytest.mark.parametrize("mix", ["before", "beside", "after", "deepvit", "selective", "scaled", "averaged"])
def test_mixed_queries_and_keys_are_left_out_and_values_kept(mix: str) -> None:
    model = TalkingHeads(mix)
    with pytest.warns(UserWarning, match=r"not heads and are left out: q .*(talking heads|of another head)"):
        groups = find_heads(model, X)
    assert [(g.part, g.proof) for g in groups] == [("v", "proved")]
    with pytest.raises(HeadLayoutError, match=r"talking heads|of another head"):
        verify_heads(model, X, find_heads(model))
    assert [r.status for r in verify_heads(model, X, find_heads(model, parts="v"))] == ["verified"]


def test_heads_without_mixing_are_all_found() -> None:
    assert [g.part for g in find_heads(TalkingHeads("not at all"), X)] == ["q", "k", "v"]


def test_only_a_few_windows_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    gradients = tracer._gradients

    def counted(*args: Any) -> Any:
        calls.append(1)
        return gradients(*args)

    monkeypatch.setattr(tracer, "_gradients", counted)
    model, images = Windowed(), torch.randn(8, 64 * 4, E)
    assert {g.proof for g in find_heads(model, images)} == {"proved"}
    assert len(calls) < 150  # 2 of 8 samples have 512 indices, each for q and k together and for v


def test_two_samples_are_traced_first_and_all_if_the_model_rejects_them() -> None:
    class Picky(Windowed):
        """Rejects batches smaller than `least`, and records the batch sizes."""

        def __init__(self, least: int) -> None:
            super().__init__(4)
            self.least, self.sizes = least, []

        def forward(self, x: Tensor) -> Tensor:
            self.sizes.append(len(x))
            if len(x) < self.least:
                raise ValueError("too few samples")
            return super().forward(x)

    for least, sizes in ((0, [2]), (8, [2, 8])):
        model = Picky(least)
        find_heads(model, torch.randn(8, 4 * 4, E))
        assert model.sizes == sizes


class Flex(nn.Module):
    """As in torchtitan: flex_attention, compiled or not, with 4 q heads and 2 kv heads."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        from torch.nn.attention.flex_attention import flex_attention

        self.attend = torch.compile(flex_attention) if compiled else flex_attention
        self.wq, self.wkv = nn.Linear(E, H * D), nn.Linear(E, 2 * 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (H, D)).transpose(1, 2)
        k, v = (y.unflatten(-1, (2, D)).transpose(1, 2) for y in self.wkv(x).chunk(2, -1))
        return self.attend(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="FlexAttention of torch 2.6 needs powers of two")
def test_flex_attention(compiled: bool) -> None:
    from torch.nn.attention import flex_attention

    operator = flex_attention.flex_attention_hop
    groups = {g.part: g for g in find_heads(Flex(compiled), X)}
    assert groups["q"].slices[0].rows.tolist() == torch.arange(H * D).view(H, D).tolist()
    assert groups["q"].serves == (0, 0, 1, 1)
    assert groups["v"].slices[0].rows.tolist() == torch.arange(2 * D, 4 * D).view(2, D).tolist()
    assert flex_attention.flex_attention_hop is operator


class Varlen(nn.Module):
    """Variable-length attention: concatenated sequences, [tokens, heads, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.to_query, self.to_key, self.to_value = (nn.Linear(E, n * D) for n in (H, 2, 2))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (f(x).unflatten(-1, (-1, D)) for f in (self.to_query, self.to_key, self.to_value))
        return varlen_attn(q, k, v, ends, ends, 4, 4, enable_gqa=True).flatten(1)


def test_variable_length_attention() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    model, example = Varlen(), (torch.randn(7, E), torch.tensor([0, 3, 7], dtype=torch.int32))
    groups = find_heads(model, example)
    assert [(g.part, g.num_heads, g.proof) for g in groups] == [
        ("q", H, "proved"),
        ("k", 2, "proved"),
        ("v", 2, "proved"),
    ]
    assert groups[0].serves == (0, 0, 1, 1)


class Qwen2AudioAttention(nn.Module):
    """Only the class name matters here."""


def test_towers_for_images_and_sound_are_encoders() -> None:
    plain = nn.Identity()
    model = nn.ModuleDict(
        {
            "audio_tower": nn.ModuleList([Qwen2AudioAttention()]),
            "visual": nn.ModuleList([plain]),
            "language_model": nn.ModuleList([plain]),
            "vision_text": nn.ModuleDict({"text_model": nn.Identity()}),
        }
    )
    wheres = {
        name: where_of(model, name, "decoder")
        for name in ("audio_tower.0", "visual.0", "language_model.0", "vision_text.text_model")
    }
    assert wheres == {
        "audio_tower.0": "encoder",
        "visual.0": "encoder",
        "language_model.0": "decoder",
        "vision_text.text_model": "decoder",
    }
