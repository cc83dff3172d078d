"""Find the modules that compute the queries, keys and values of each attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
EXTRA_BIASES = ("q_bias", "k_bias", "v_bias")  # DeBERTa and LayoutLM add them after the projection


@dataclass(frozen=True, eq=False)
class Projection:
    """The projection to q, k or v in one attention layer.

    Args:
        group: the heads of the projection.
        module: the module whose result holds the heads; for `nn.MultiheadAttention`, the attention module itself.
        norm: norm that is applied to the result before the dot product; None if there is none.
        width: number of features of a head that are recorded; None for all. In latent attention (DeepSeek) the other
            features of a query encode positions.
    """

    group: HeadGroup
    module: nn.Module
    norm: nn.Module | None = None
    width: int | None = None

    @property
    def rows(self) -> Tensor:
        """Indices of each head's output features that are recorded, int64 [M, d]."""
        return self.group.slices[0].rows[:, : self.width]

    @property
    def features(self) -> int:
        """Width of the projection's result."""
        first = self.group.slices[0]
        return int(first.parameter().shape[first.axis])


@dataclass(frozen=True, eq=False)
class QKVLayer:
    """One attention layer whose queries and keys can be recorded.

    Args:
        name: the attention module's dotted name.
        where: "encoder", "decoder" or "cross".
        parts: projections by part: "q", "k" and, if the layer has its own values, "v".
        serves: the key-value head of each query head; None if each query head has its own.
    """

    name: str
    where: str
    parts: Mapping[str, Projection]
    serves: tuple[int, ...] | None


def find_qkv_layers(model: nn.Module, groups: Sequence[HeadGroup]) -> tuple[list[QKVLayer], dict[str, str]]:
    """Find the attention layers with queries and keys, in model order.

    Args:
        model: any module, also inside a data-parallel or compile wrapper.
        groups: the result of `find_heads` for all parts.

    Returns:
        The layers, and {name: reason} for layers whose queries and keys cannot be recorded.
    """
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    parts: dict[str, dict[str, HeadGroup]] = {}
    for group in groups:
        parts.setdefault(module_of(group), {})[group.part] = group
    layers, left_out = [], {}
    for name, own in parts.items():
        try:
            layers.append(_qkv_layer(modules, name, own))
        except HeadLayoutError as error:
            left_out[name] = str(error)
    return layers, left_out


def _qkv_layer(modules: Mapping[str, nn.Module], name: str, groups: Mapping[str, HeadGroup]) -> QKVLayer:
    attention, first = modules[name], next(iter(groups.values()))
    kind = type(attention).__name__
    if missing := [part for part in "qk" if part not in groups]:
        names = "queries and keys" if len(missing) == 2 else "queries" if missing == ["q"] else "keys"
        raise HeadLayoutError(f"{kind} ({first.family}) has no {names}")
    if hasattr(attention, "register_propagate_forward_hook"):
        raise HeadLayoutError(f"{kind} attends along the edges of a graph, not to all tokens")
    if biases := [bias for bias in EXTRA_BIASES if isinstance(getattr(attention, bias, None), Tensor)]:
        raise HeadLayoutError(f"{kind} adds {biases[0]} outside its projections")
    if isinstance(getattr(attention, "logit_scale", None), Tensor):  # Swin v2
        raise HeadLayoutError(f"{kind} compares queries and keys by cosine, outside any module")
    parts = {part: _projection(modules, attention, group) for part, group in groups.items()}
    content = getattr(attention, "qk_nope_head_dim", None)  # latent attention
    if parts["q"].rows.shape[1] > parts["k"].rows.shape[1] == content:
        parts["q"] = replace(parts["q"], width=content)
    return QKVLayer(name, first.where, parts, groups["q"].serves)


def _projection(modules: Mapping[str, nn.Module], attention: nn.Module, group: HeadGroup) -> Projection:
    first = group.slices[0]
    if isinstance(attention, nn.MultiheadAttention):
        return Projection(group, attention)
    if first.attribute != "weight":
        raise HeadLayoutError(f"{first.parameter_name} is a parameter outside any projection module")
    path = first.parameter_name.removesuffix(".weight").split(".lora_B.")[0]  # the adapted layer, not the adapter
    module = modules.get(path, first.module)
    norms = (getattr(attention, name, None) for name in NORMS[group.part])
    norm = next((n for n in norms if isinstance(n, nn.Module) and not isinstance(n, nn.Identity)), None)
    return Projection(group, module, norm)
