"""Each family is found without an example and proved with one; strided slices are rejected."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from repulsive.errors import HeadLayoutError, NoHeadsFound, SelectionError
from repulsive.heads import find_heads, verify_heads
from tests.heads.zoo import TORCH, TRANSFORMERS, TimmAttention, build

FAMILY = {  # expected family of some models
    "torch packed": "torch",
    "torch separate": "torch-separate",
    "timm": "qkv",
    "nanogpt": "c_attn",
    "annotated": "annotated",
    "additive": "additive",
    "bert, eager": "bert",
    "albert, sdpa": "albert",
    "gpt-neox, eager": "gpt-neox",
    "bloom": "gpt-neox",
    "falcon": "falcon",
    "phi3": "phi3",
    "codegen": "codegen",
    "t5": "t5",
    "marian, sdpa": "bart",
    "qwen2, sdpa": "llama",
    "vit, sdpa": "vit",
    "olmo2, eager": "q_proj/k_proj/v_proj",
}
GROUPS = {  # expected number of groups
    "torch transformer": 18,
    "albert, eager": 3,
    "t5": 18,
    "bart, eager": 18,
    "gpt2 with cross-attention, sdpa": 12,
}


def _case(name: str):
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    return build(name)


@pytest.mark.parametrize("name", [*TORCH, *TRANSFORMERS])
def test_the_table_finds_heads_and_the_trace_proves_them(name: str) -> None:
    model, example = _case(name)
    groups = find_heads(model)
    assert "inferred" not in {g.family for g in groups}
    assert len({g.name for g in groups}) == len(groups)
    reports = verify_heads(model, example, groups)
    assert {r.status for r in reports} == {"verified"}, "\n".join(map(str, reports))
    assert [g.name for g in find_heads(model, example)] == [g.name for g in groups]
    if name in FAMILY:
        assert {g.family for g in groups} == {FAMILY[name]}
    if name in GROUPS:
        assert len(groups) == GROUPS[name]


@pytest.mark.parametrize("name", [name for name in [*TORCH, *TRANSFORMERS] if name != "additive"])
def test_strided_slices_are_caught_in_every_part(name: str) -> None:
    model, example = _case(name)
    strided = [g for g in find_heads(model, layout="strided") if g.num_heads > 1]
    for part in "qkv":
        mine = [g for g in strided if g.part == part]
        for group in mine[:1]:
            with pytest.raises(HeadLayoutError, match="misses"):
                verify_heads(model, example, [group])


def test_where_and_layer_of_an_encoder_decoder() -> None:
    model, _ = build("torch transformer")
    places = {(g.stack, g.where, g.layer) for g in find_heads(model)}
    assert places == {
        *(("encoder.layers", "encoder", n) for n in (0, 1)),
        *(("decoder.layers", place, n) for place in ("decoder", "cross") for n in (0, 1)),
    }


def test_where_of_t5_and_gpt2() -> None:
    model, _ = _case("t5")
    by_name = {g.name: (g.where, g.layer) for g in find_heads(model)}
    assert by_name["decoder.block.1.layer.0.SelfAttention.q"] == ("decoder", 1)
    assert by_name["decoder.block.1.layer.1.EncDecAttention.q"] == ("cross", 1)
    model, _ = _case("gpt2 with cross-attention, eager")
    assert {g.where for g in find_heads(model, match="h.0.*")} == {"decoder", "cross"}


class CrossAttention(TimmAttention):
    """As in timm's CrossViT, where the class token attends to the tokens of its own branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class MaskedCrossAttention(CrossAttention):
    """The same with a mask."""

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


class ContextCrossAttention(CrossAttention):
    """Attention that may read other tokens, as in latent diffusion."""

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "path", "where"),
    [
        (CrossAttention, "attn", "encoder"),
        (MaskedCrossAttention, "attn", "encoder"),
        (ContextCrossAttention, "attn", "cross"),
        (CrossAttention, "cross_attn", "cross"),
    ],
)
def test_the_name_of_a_class_with_one_input_does_not_make_it_cross_attention(
    kind: type[nn.Module], path: str, where: str
) -> None:
    model = nn.Sequential(OrderedDict({path: kind()}))
    assert {g.where for g in find_heads(model)} == {where}
    assert {g.where for g in find_heads(model, torch.randn(2, 5, 24))} == {where}


class XCA(nn.Module):
    """As in timm's XCiT: the softmax is over channels, which a trace would take for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1)  # each [B, H, d, T]
        return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2).mT


@pytest.mark.parametrize("example", [None, torch.randn(2, 5, 8)], ids=["table", "trace"])
def test_a_class_without_heads_is_a_near_miss(example: torch.Tensor | None) -> None:
    with pytest.raises(NoHeadsFound, match="channels"):
        find_heads(nn.Sequential(XCA()), example)


def test_autoformer_has_no_heads() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    config = transformers.AutoformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], label_length=4, num_time_features=1, **sizes
    )
    past, future = torch.randn(2, 10), torch.randn(2, 4)
    example = {
        "past_values": past,
        "past_time_features": past.unsqueeze(-1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": future,
        "future_time_features": future.unsqueeze(-1),
    }
    model = transformers.AutoformerModel(config)
    for inputs in (None, example):
        with pytest.raises(NoHeadsFound, match="mean over heads"):
            find_heads(model, inputs)


def test_weights_in_einsum_notation_have_an_axis_for_heads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.XLNetConfig(vocab_size=40, d_model=24, n_layer=1, n_head=4, d_inner=32)
    model = transformers.XLNetModel(config).eval()
    groups = find_heads(model)
    assert [(g.part, g.proof, g.num_heads, g.head_dim, g.dim) for g in groups] == [
        (part, "table", 4, 6, 24 * 6) for part in "qkv"
    ]
    torch.testing.assert_close(groups[1].read()[2], model.layer[0].rel_attn.k[:, 2].flatten())
    reports = verify_heads(model, torch.randint(40, (2, 7)), groups)
    assert {r.status for r in reports} == {"verified"}, "\n".join(map(str, reports))
    with pytest.raises(SelectionError, match="separate axes for heads and features"):
        find_heads(model, layout="strided")
