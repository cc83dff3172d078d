"""Select groups by layer, part, place and name, and join parts into whole heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from repulsive.errors import SelectionError
from repulsive.heads import find_heads
from tests.heads.zoo import AdditiveAttention, build


@pytest.fixture
def model() -> nn.Module:
    return build("torch transformer")[0]


def _names(model: nn.Module, **choice: object) -> list[str]:
    return [g.name for g in find_heads(model, **choice)]  # type: ignore[arg-type]


def test_first_and_last_are_per_stack(model: nn.Module) -> None:
    assert _names(model, layers="first", parts="q") == [
        "encoder.layers.0.self_attn.q",
        "decoder.layers.0.self_attn.q",
        "decoder.layers.0.multihead_attn.q",
    ]
    assert _names(model, layers="last", parts="q", where="encoder") == ["encoder.layers.1.self_attn.q"]
    uneven = nn.Transformer(16, 4, 3, 2, 32, batch_first=True)
    last = ["encoder.layers.2.self_attn.q", "decoder.layers.1.self_attn.q", "decoder.layers.1.multihead_attn.q"]
    assert _names(uneven, layers="last", parts="q") == last
    assert _names(uneven, layers=[-1], parts="q") == last


def test_indices_and_negative_indices(model: nn.Module) -> None:
    assert _names(model, layers=[1], parts="v", where="cross") == ["decoder.layers.1.multihead_attn.v"]
    assert _names(model, layers=[-1], parts="v", where="cross") == ["decoder.layers.1.multihead_attn.v"]


@pytest.mark.parametrize("where", ["encoder", "decoder", "cross"])
def test_places(model: nn.Module, where: str) -> None:
    assert {g.where for g in find_heads(model, where=where)} == {where}


def test_a_decoder_of_torch_on_its_own() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 1)
    found = {group.name: group.where for group in find_heads(model, parts="q")}
    assert found == {"layers.0.self_attn.q": "decoder", "layers.0.multihead_attn.q": "cross"}


def test_a_single_stack_is_both_encoder_and_decoder() -> None:
    model = build("timm")[0]
    assert _names(model, where="encoder") == _names(model, where="decoder") == _names(model)
    with pytest.raises(SelectionError, match="select no heads"):
        find_heads(model, where="cross")


def test_patterns(model: nn.Module) -> None:
    assert _names(model, match="*.0.multihead_attn.k") == ["decoder.layers.0.multihead_attn.k"]
    assert len(_names(model, match=["encoder*", "*multihead*"], parts="q")) == 4


def test_additive_attention_has_only_v() -> None:
    assert _names(AdditiveAttention()) == ["v"]
    with pytest.raises(SelectionError, match="parts v"):
        find_heads(AdditiveAttention(), parts="qk")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": "frist"}, "did you mean 'first'"),
        ({"layers": [0, 5]}, r"\[5\] out of range; use indices from 0 to 1"),
        ({"layers": ["0"]}, "out of range"),
        ({"layers": 1}, r"or a list of indices, such as \[1\]"),
        ({"layers": True}, r"or a list of indices, such as \[0\]"),
        ({"layers": 1.5}, r"or a list of indices, such as \[0\]"),
        ({"parts": "qx"}, "any of the letters q, k, v"),
        ({"parts": ""}, "any of the letters q, k, v"),
        ({"where": "encodr"}, "did you mean 'encoder'"),
        ({"particle": "heads"}, "did you mean 'head'"),
        ({"layout": "stride"}, "'heads' or 'strided'"),
        ({"match": "encoder.layer.0*"}, "names such as encoder.layers.0"),
        (
            {"match": ["encoder.layers.0*", "encoder.layer.1*"]},
            r"no group .* matches 'encoder.layer.1\*'; .* names such",
        ),
        ({"layers": []}, "select no heads"),
    ],
)
def test_wrong_arguments_are_refused(model: nn.Module, choice: dict[str, object], message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        find_heads(model, **choice)  # type: ignore[arg-type]


def test_joined_heads_put_q_k_v_side_by_side() -> None:
    model = build("torch packed")[0]
    (group,) = find_heads(model, particle="head")
    weight = model.in_proj_weight.detach().view(3, 4, 4 * 16)
    torch.testing.assert_close(group.read(), weight.transpose(0, 1).reshape(4, -1), rtol=0, atol=0)
    assert (group.part, group.num_heads, group.dim) == ("qkv", 4, 3 * 4 * 16)
    (pair,) = find_heads(model, particle="head", parts="qv")
    assert pair.part == "qv"


def test_joined_kv_heads_contain_the_q_heads_they_serve() -> None:
    pytest.importorskip("transformers")
    model = build("llama, sdpa")[0]
    group = find_heads(model, particle="head", layers=[1])[0]
    attention = model.layers[1].self_attn
    q = attention.q_proj.weight.detach().view(2, 2 * 8 * 32)  # q heads 0, 1 | 2, 3
    k, v = (p.weight.detach().view(2, 8 * 32) for p in (attention.k_proj, attention.v_proj))
    torch.testing.assert_close(group.read(), torch.cat([q, k, v], 1), rtol=0, atol=0)
    assert group.name == "layers.1.self_attn"


def test_q_alone_keeps_its_heads_when_joined() -> None:
    pytest.importorskip("transformers")
    model = build("llama, sdpa")[0]
    assert find_heads(model, particle="head", parts="q")[0].num_heads == 4
