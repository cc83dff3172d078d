"""What an attention layer applies to queries, keys and values between their projection and the dot product.

In this order: a bias that is a parameter of the attention module, a norm, and clipping. Rotations by position come
after them and are left out.
"""

from __future__ import annotations

import re
from math import prod

from torch import Tensor, nn

from repulsive.errors import HeadLayoutError
from repulsive.heads.layout import HeadGroup, HeadSlice, consecutive_rows
from repulsive.heads.module_paths import module_of

# DeBERTa and LayoutLMv2 have q_bias and v_bias. With relative positions, pos_bias_u (Wav2Vec2-Conformer), bias_u
# (Parakeet) and r_w_bias (Funnel) are added in the part of the logits that depends on the key token.
_BIASES = {"q": ("q_bias", "pos_bias_u", "bias_u", "r_w_bias"), "k": ("k_bias",), "v": ("v_bias",)}

# "qk" is one module for queries and keys.
_NORMS = {
    part: re.compile(rf"^({words})_?(norm|layernorm|layer_norm|ln)$|^(norm|ln)_({words})$")
    for part, words in (("q", "q|query|qk"), ("k", "k|key|qk"), ("v", "v|value"))
}

_TRACED_WITH = {"q": "qk", "k": "qk", "v": "v"}  # scores show whether a norm is applied to q or k, but not to which
_TOKENS = {"q": "queries", "k": "keys", "v": "values"}

_SCALES = ("scaling", "per_dim_scale")  # TimesFM; the audio encoders of Gemma 3n and 4
_CONVOLUTIONS = {part: re.compile(rf"^{part}_s?conv(1d)?$") for part in "qkv"}


def added_bias(attention: nn.Module, group: HeadGroup) -> HeadSlice | None:
    """Find the parameter of the attention module that is added to a projection; None if there is none.

    Args:
        attention: the attention module.
        group: the heads of one part (q, k or v).

    Raises:
        HeadLayoutError: the bias does not have one number for each feature of each head.
    """
    shape = len(group.slices[0].rows), group.head_dim  # M, d
    for name in _BIASES.get(group.part, ()):
        bias = getattr(attention, name, None)
        if not isinstance(bias, nn.Parameter):
            continue
        path = f"{module_of(group)}.{name}".lstrip(".")
        if bias.shape == shape:
            return HeadSlice(attention, name, path, consecutive_rows(shape[0]))
        if bias.ndim and bias.shape[-1] == bias.numel() == prod(shape):
            return HeadSlice(attention, name, path, consecutive_rows(*shape), axis=bias.ndim - 1)
        raise HeadLayoutError(
            f"{path}: expected a bias with {prod(shape)} numbers for {shape[0]} heads, got shape {list(bias.shape)}; "
            "exclude the layer with match=..."
        )
    return None


def own_bias(part: HeadSlice) -> HeadSlice | None:
    """Find the bias of a weight in einsum notation, such as b_Q [M, d] of W_Q; None if there is none.

    Args:
        part: the slice of the weight.
    """
    for weight, bias in (("weight", "bias"), ("W", "b"), ("w", "b")):
        name = part.attribute.replace(weight, bias, 1)
        values = part.module._parameters.get(name) if name != part.attribute else None
        if values is not None and tuple(values.shape) == (part.num_heads, part.width):
            path = ".".join([*part.parameter_name.split(".")[:-1], name])
            return HeadSlice(part.module, name, path, consecutive_rows(part.num_heads))
    return None


def norm_between(attention: nn.Module, part: str) -> nn.Module | None:
    """Find the norm between a projection (q, k or v) and the dot product, by its name; None if there is none."""
    for name, child in attention.named_children() if part in _NORMS else ():
        if _NORMS[part].match(name) and not isinstance(child, nn.Identity):
            return child
    return None


def clip_limit(attention: nn.Module) -> float | None:
    """Return the limit to which queries, keys and values are clipped (`clip_qkv`); None if they are not."""
    for owner in (attention, getattr(attention, "config", None), getattr(attention, "cfg", None)):
        limit = getattr(owner, "clip_qkv", None)
        if isinstance(limit, int | float) and limit > 0:
            return float(limit)
    return None


def projects_positions(attention: nn.Module) -> bool:
    """Check whether projections of tokens run a second time, on relative positions (DeBERTa v2 and v3, SEW-D)."""
    return getattr(attention, "share_att_key", False) is True


def unknown_change(attention: nn.Module, group: HeadGroup) -> str | None:
    """Describe why logits are not products of projected tokens with a bias, a norm and clipping; None if unknown.

    Args:
        attention: the attention module.
        group: the heads of one part (q, k or v).
    """
    if hasattr(attention, "register_propagate_forward_hook"):  # PyTorch Geometric
        return "attends along the edges of a graph, not to all tokens"
    if group.part in ("q", "k") and isinstance(getattr(attention, "logit_scale", None), Tensor):  # Swin v2
        return "compares queries and keys by cosine, outside any module"
    for name in _SCALES if group.part == "q" else ():
        if isinstance(getattr(attention, name, None), nn.Parameter):
            return f"scales each feature of queries by a parameter ({name})"
    if group.has_norm and all(norm_between(attention, part) is None for part in _TRACED_WITH[group.part]):
        return f"normalises {_TOKENS[group.part]} outside a submodule named {group.part}_norm"
    projection = group.slices[0].module
    for name, child in attention.named_children():
        if group.part in _CONVOLUTIONS and _CONVOLUTIONS[group.part].match(name):  # Inkling
            return f"applies a convolution ({name}) to the result of the projection"
        inside = set(child.modules())
        if projection in inside and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in inside):
            return "applies a batch norm to the result of the projection"  # LeViT
    return None
