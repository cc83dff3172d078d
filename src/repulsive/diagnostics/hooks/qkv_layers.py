"""Find the modules that compute the queries, keys and values of each attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from repulsive.errors import HeadLayoutError
from repulsive.heads import HeadGroup
from repulsive.heads.after_projection import (
    added_bias,
    clip_limit,
    norm_between,
    own_bias,
    projects_positions,
    unknown_change,
)
from repulsive.heads.layout import HeadSlice
from repulsive.heads.module_paths import clean, module_of, unwrap


@dataclass(frozen=True, eq=False)
class Projection:
    """The projection to q, k or v in one attention layer.

    Args:
        group: the heads of the projection.
        module: the module whose result holds the heads; for `nn.MultiheadAttention` and weights in einsum notation, the
            attention module itself.
        added: bias that the attention module adds to the result; None if there is none.
        norm: norm that is applied to the result before the dot product; None if there is none.
        clip: limit to which values are clipped after the norm; None if they are not.
        width: number of features of a head that are recorded; None for all. In latent attention (DeepSeek) the other
            features of a query encode positions.
        bias: bias of a weight in einsum notation; None if there is none.
    """

    group: HeadGroup
    module: nn.Module
    added: HeadSlice | None = None
    norm: nn.Module | None = None
    clip: float | None = None
    width: int | None = None
    bias: HeadSlice | None = None

    @property
    def is_parameter(self) -> bool:
        """Whether the weight is a parameter in einsum notation."""
        return self.group.slices[0].feature_axis is not None

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
        attention: the attention module.
        parts: projections by part: "q", "k" and, if the layer has its own values, "v".
        serves: the key-value head of each query head; None if each query head has its own.
        repeats: whether its projections run again on relative positions, which do not count.
    """

    name: str
    where: str
    attention: nn.Module
    parts: Mapping[str, Projection]
    serves: tuple[int, ...] | None
    repeats: bool = False


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
    for group in groups.values():
        if (change := unknown_change(attention, group)) is not None:
            raise HeadLayoutError(f"{kind} {change}")
    parts = {part: _projection(modules, attention, group) for part, group in groups.items()}
    content = getattr(attention, "qk_nope_head_dim", None)  # latent attention
    if parts["q"].rows.shape[1] > parts["k"].rows.shape[1] == content:
        parts["q"] = replace(parts["q"], width=content)
    return QKVLayer(name, first.where, attention, parts, groups["q"].serves, projects_positions(attention))


def _projection(modules: Mapping[str, nn.Module], attention: nn.Module, group: HeadGroup) -> Projection:
    first = group.slices[0]
    if isinstance(attention, nn.MultiheadAttention):
        return Projection(group, attention)
    changes = added_bias(attention, group), norm_between(attention, group.part), clip_limit(attention)
    if first.feature_axis is not None and first.module is attention and len(group.slices) == 1:
        return Projection(group, attention, *changes, bias=own_bias(first))
    if first.attribute != "weight":
        raise HeadLayoutError(
            f"{first.parameter_name} is a parameter whose products with tokens are not recorded; project by a module "
            "such as nn.Linear, or compare heads in 'attention', 'outputs' or 'cka'"
        )
    path = first.parameter_name.removesuffix(".weight").split(".lora_B.")[0]  # the adapted layer, not the adapter
    module = modules.get(path, first.module)
    return Projection(group, module, *changes)
