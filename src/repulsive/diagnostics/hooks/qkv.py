"""Which module gives the queries, keys and values of each attention layer, and which of its features are which head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from repulsive.errors import HeadLayoutError
from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import clean, module_of, unwrap

# Norms that some attention classes have between a projection and the dot product.
NORMS = {
    "q": ("q_norm", "q_layernorm", "norm_q", "query_norm", "query_layernorm", "q_ln", "ln_q", "qk_norm"),
    "k": ("k_norm", "k_layernorm", "norm_k", "key_norm", "key_layernorm", "k_ln", "ln_k", "qk_norm"),
    "v": ("v_norm", "v_layernorm", "norm_v", "value_norm", "value_layernorm"),
}
OUTSIDE = ("q_bias", "k_bias", "v_bias")  # parameters that DeBERTa and LayoutLM add behind the projection


@dataclass(frozen=True, eq=False)
class Projection:
    """One part (q, k or v) of one attention layer.

    Args:
        group: the heads.
        module: its forward result holds the heads; for `nn.MultiheadAttention`, the attention module itself.
        norm: applied to the result before the dot product; None where there is none.
    """

    group: HeadGroup
    module: nn.Module
    norm: nn.Module | None = None

    @property
    def rows(self) -> Tensor:
        """Output features of each head, int64 [M, d]."""
        return self.group.slices[0].rows

    @property
    def features(self) -> int:
        """Width of the projection's result."""
        first = self.group.slices[0]
        return int(first.parameter().shape[first.axis])


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer whose queries and keys can be read.

    Args:
        name: the attention module's dotted name.
        where: "encoder", "decoder" or "cross".
        parts: "q", "k" and, where the layer has values of its own, "v".
        serves: the key-value head of each query head; None where each has its own.
    """

    name: str
    where: str
    parts: Mapping[str, Projection]
    serves: tuple[int, ...] | None


def find_layers(model: nn.Module, groups: Sequence[HeadGroup]) -> tuple[list[Layer], dict[str, str]]:
    """Attention layers with queries and keys, in model order.

    Args:
        model: any module; data-parallel and compile wrappers are seen through.
        groups: what `find_heads` returned for all parts.

    Returns:
        The layers, and {name: reason} for those whose queries and keys cannot be read.
    """
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    parts: dict[str, dict[str, HeadGroup]] = {}
    for group in groups:
        parts.setdefault(module_of(group), {})[group.part] = group
    layers, left_out = [], {}
    for name, found in parts.items():
        try:
            layers.append(_layer(modules, name, found))
        except HeadLayoutError as error:
            left_out[name] = str(error)
    return layers, left_out


def _layer(modules: Mapping[str, nn.Module], name: str, groups: Mapping[str, HeadGroup]) -> Layer:
    attention, first = modules[name], next(iter(groups.values()))
    kind = type(attention).__name__
    if missing := [part for part in "qk" if part not in groups]:
        lacks = "queries and keys" if len(missing) == 2 else "queries" if missing == ["q"] else "keys"
        raise HeadLayoutError(f"{kind} ({first.family}) has no {lacks} of its own")
    if hasattr(attention, "register_propagate_forward_hook"):
        raise HeadLayoutError(f"{kind} attends along the edges of a graph, not to all tokens")
    if outside := [bias for bias in OUTSIDE if isinstance(getattr(attention, bias, None), Tensor)]:
        raise HeadLayoutError(f"{kind} adds {outside[0]} outside its projections")
    if isinstance(getattr(attention, "logit_scale", None), Tensor):  # Swin v2
        raise HeadLayoutError(f"{kind} compares queries and keys by cosine, which no module computes")
    parts = {part: _projection(modules, attention, group) for part, group in groups.items()}
    return Layer(name, first.where, parts, groups["q"].serves)


def _projection(modules: Mapping[str, nn.Module], attention: nn.Module, group: HeadGroup) -> Projection:
    first = group.slices[0]
    if isinstance(attention, nn.MultiheadAttention):
        return Projection(group, attention)
    if first.attribute != "weight":
        raise HeadLayoutError(f"{first.parameter_name} is a parameter that no projection module owns")
    path = first.parameter_name.removesuffix(".weight").split(".lora_B.")[0]  # an adapter's result is not the whole
    module = modules.get(path, first.module)
    norms = (getattr(attention, name, None) for name in NORMS[group.part])
    norm = next((n for n in norms if isinstance(n, nn.Module) and not isinstance(n, nn.Identity)), None)
    return Projection(group, module, norm)
