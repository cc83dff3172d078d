r"""Repulsion between value-output circuits: the map from a token to what a head adds to the residual stream.

Head i adds $W_O^i v_i(x)$ for a token x that it attends to. Two heads have the inner product
$\sum_{ab} (\tfrac1N v_i^\top v_j)_{ab} ({W_O^i}^\top W_O^j)_{ab}$, and the force is pulled back to the value projection
and to the heads' columns of the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from repulsive.errors import RuleError
from repulsive.heads.layout import HeadGroup, HeadSlice, consecutive_rows, whole_tensor
from repulsive.heads.module_paths import clean, module_of, unwrap
from repulsive.heads.products.per_head_weights import PerHeadSlice
from repulsive.heads.table.lookup import listed_modules
from repulsive.heads.table.match import is_conv1d
from repulsive.heads.table.output_projection import output_parameter, output_projection
from repulsive.heads.trace.output_projection import trace_output_projections
from repulsive.particles.gram import compute_dtype, full_precision
from repulsive.particles.logits import Circuits, function_gram
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.logits.find_projections import projection_of, reads_of, refuse_tensor_parallel
from repulsive.repulsion.logits.force import ForceNumbers, LayerForce, changed, stacked_outputs, to_targets
from repulsive.repulsion.logits.projections import Projection, Target
from repulsive.repulsion.logits.samples import Sample


@dataclass(frozen=True, eq=False)
class ValueLayer:
    """The value-output circuits of one attention layer.

    Args:
        name: dotted name of the attention module, followed by "(values)".
        attention: the attention module.
        where: "encoder", "decoder" or "cross".
        value: the value projection.
        out: the columns of the output projection that belong to each head.
        reads: the value head of each query head, or None if each query head has its own.
    """

    name: str
    attention: nn.Module
    where: str
    value: Projection
    out: HeadGroup
    reads: tuple[int, ...] | None = None

    @property
    def num_heads(self) -> int:
        return self.out.num_heads

    @property
    def watched(self) -> dict[str, Projection]:
        """Projections whose tokens are sampled, by part ("v")."""
        return {"v": self.value}

    @property
    def sides(self) -> tuple[tuple[HeadGroup, tuple[Target, ...]], ...]:
        """The two groups of heads that the force moves (v, then o), each with the parameters that receive the force."""
        return (self.value.group, self.value.targets), (self.out, (Target(self.out.slices[0]),))


class _Output(NamedTuple):
    """An output projection: the module that owns its weight, the weight's name, and its axis of heads or features."""

    path: str
    module: nn.Module
    attribute: str
    axis: int
    ndim: int = 2  # expected number of axes

    @property
    def owner(self) -> str:
        """Dotted name of the module that owns the weight."""
        return self.path.rpartition(".")[0]


def output_groups(model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object = None) -> list[HeadGroup]:
    """Find the columns of every output projection that belong to each head, as groups with the part "o".

    Args:
        model: the model.
        groups: the q and v groups of the model, not joined.
        example_inputs: as in `find_heads`; finds projections without a usual name by autograd.

    Raises:
        RuleError: a layer's output projection is not found, or is not one matrix.
    """
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    layers: dict[str, list[HeadGroup]] = {}
    for group in groups:
        layers.setdefault(module_of(group), []).append(group)
    found = {name: _named_projection(modules, name, own) for name, own in layers.items()}
    remedy = "pass example_inputs=..., without groups, to find it by autograd, or choose circuits='qk'"
    if example_inputs is not None:
        listed = listed_modules(unwrap(model))
        usual = {name: each.owner for name, each in found.items() if each and each.ndim == 2 and name not in listed}
        unlisted = {name: own for name, own in layers.items() if found[name] is None or name in usual}
        traced = trace_output_projections(model, unlisted, example_inputs, usual)
        found |= {
            name: _named_projection(modules, name, layers[name], traced[name]) if name in traced else None
            for name in unlisted
        }
        remedy = "choose circuits='qk'"
    outputs = [_outputs(own, found[name], remedy) for name, own in layers.items()]
    _refuse_adapted(model, outputs)
    return outputs


def _refuse_adapted(model: nn.Module, outputs: Sequence[HeadGroup]) -> None:
    """Raise an error for output projections with an adapter: what a head writes depends on the adapter, too."""
    adapted = {module.base_layer for module in unwrap(model).modules() if hasattr(module, "base_layer")}
    adapted |= {module for module in unwrap(model).modules() if hasattr(module, "lora_B")}
    if names := [group.slices[0].parameter_name for group in outputs if group.slices[0].module in adapted]:
        raise RuleError(
            f"{names[0]}: circuits='qk+ov' does not support an adapter on the output projection; leave that projection "
            "out of the adapter's target_modules, or choose circuits='qk'"
        )


def value_layers(model: nn.Module, groups: Sequence[HeadGroup]) -> list[ValueLayer]:
    """Pair the value projection of every layer with its output projection.

    Args:
        model: the model the groups were found in.
        groups: the q, v and o groups of the model.
    """
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    layers: dict[str, dict[str, HeadGroup]] = {}
    for group in groups:
        layers.setdefault(module_of(group), {})[group.part] = group
    pairs = []
    for name, parts in layers.items():
        value, attention = parts["v"], modules[name]
        projection = projection_of(value, value.head_dim, attention, modules)
        reads = reads_of(parts["q"], value)
        pairs.append(ValueLayer(f"{name} (values)", attention, value.where, projection, _by_feature(parts["o"]), reads))
    return pairs


def _by_feature(out: HeadGroup) -> HeadGroup:
    """Return the outputs of a layer with one row for each feature of a head, also for a weight [heads, features, D]."""
    part = out.slices[0]
    return out if part.feature_axis is None else replace(out, slices=(PerHeadSlice.of(part, along=part.axis + 1),))


def value_force(
    number: int, layer: ValueLayer, sample: Sample, rule: SVGD, step: int, drive: Tensor | None
) -> LayerForce:
    """Compute the force between the value-output circuits of one layer, which has the given number."""
    dtype = compute_dtype(sample.outputs)
    raw = stacked_outputs([sample], dtype)  # [1, N, M_v, d]
    with torch.enable_grad():
        values = changed(raw, [sample])[0] * sample.weights.to(dtype)[:, None, None]  # [N, M_v, d]
    part = layer.out.slices[0]
    columns = part.take(whole_tensor(part.parameter().detach())).unflatten(1, (part.rows.shape[1], -1))  # [M, d, D]
    circuits = Circuits(values.detach(), columns.to(dtype).movedim(2, 0), left_of=layer.reads)
    with torch.no_grad(), full_precision(values.device):
        moments = circuits.moments()
        products = (moments[0] * moments[1]).sum((-3, -1))  # [M, M]
        gram = function_gram(products)
        interaction = rule.interact(gram)
        unit = -rule.force_scale(gram.num_particles) * interaction.repulsion
        push, on_columns = circuits.pull_back(unit, moments)  # [N, M_v, d], [D, M, d]
        is_none = circuits.are_rounding_errors((push, on_columns), unit, moments, sample.rounding)
        if raw.requires_grad:
            (push,) = torch.autograd.grad(values, raw, push)
        else:
            push = push.unsqueeze(0)
        on_value = to_targets(push, [sample], [layer.value])
        sides = [[f[0] for f in on_value], [on_columns.movedim(0, 2)]]  # [M, d, D]
        norm = torch.stack([f.square().sum() for side in sides for f in side]).sum().sqrt()
        alpha = rule.weight_of(step, None if drive is None else drive.to(norm), norm)
        alpha = torch.where(is_none, 0.0, alpha)
        rows = (value.unsqueeze(0) for value in (alpha, alpha * norm, interaction.bandwidth, products))
        parts = tuple(tuple(f * alpha.to(f.dtype) for f in side) for side in sides)
    return LayerForce(parts, ForceNumbers((number,), *rows), 0)


def _value_and_sizes(groups: Sequence[HeadGroup]) -> tuple[HeadGroup, int, int]:
    """Return the value group of a layer, the number of its query heads, and the width of a head's values."""
    parts = {group.part: group for group in groups}
    return parts["v"], parts["q"].num_heads, parts["v"].head_dim


def _named_projection(
    modules: Mapping[str, nn.Module], name: str, groups: Sequence[HeadGroup], path: str | None = None
) -> _Output | None:
    """Find the output projection of a layer by its path, or by usual names; None if there is none."""
    value, heads, width = _value_and_sizes(groups)
    sizes = value.family, heads, width, path
    if (found := output_projection(modules, name, *sizes)) is not None:
        return _Output(f"{found[0]}.weight", found[1], "weight", 0 if is_conv1d(found[1]) else 1)
    if (parameter := output_parameter(modules, name, *sizes)) is not None:
        return _Output(parameter[0], modules[name], parameter[0].rpartition(".")[2], parameter[1], ndim=3)
    return None


def _outputs(groups: Sequence[HeadGroup], output: _Output | None, remedy: str) -> HeadGroup:
    value, heads, width = _value_and_sizes(groups)
    weight = None if output is None else getattr(output.module, output.attribute, None)
    if output is None or not isinstance(weight, nn.Parameter) or weight.ndim != output.ndim:
        raise RuleError(
            f"{value.name}: circuits='qk+ov' found no output projection for {heads} heads of {width} features; {remedy}"
        )
    rows = consecutive_rows(heads, width if weight.ndim == 2 else 1)
    part = HeadSlice(output.module, output.attribute, output.path, rows, output.axis)
    refuse_tensor_parallel(part)
    title = ".".join(filter(None, (module_of(value), "o")))
    return HeadGroup(title, value.layer, "o", value.where, value.stack, value.family, (part,), proof=value.proof)
