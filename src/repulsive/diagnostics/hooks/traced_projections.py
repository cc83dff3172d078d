"""Find the output projections of all attention layers, by autograd where names do not show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from repulsive.diagnostics.hooks.attention_layers import NO_PROJECTION, group_by_module, hookable_layers
from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import unwrap
from repulsive.heads.table.lookup import listed_modules
from repulsive.heads.trace.output_projection import trace_output_projections


def traced_projections(
    model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Find the output projections of layers whose class the family table does not list.

    Args:
        model: any module; its parameters, gradients and flags stay as they are.
        groups: the result of `find_heads` for all parts.
        example_inputs: as in `find_heads`; the model runs on it once if a projection is not known from the table, else
            not at all.
        known: projections that the caller names, which are kept.

    Returns:
        Dotted name of an attention module -> dotted name of its output projection, as `find_attention_layers` takes it:
        the known ones, those that `trace_output_projections` finds, and `NO_PROJECTION` where it finds none.
    """
    result = dict(known or {})
    layers = hookable_layers(model, groups, out=result)[0]
    listed = listed_modules(unwrap(model))
    usual = {layer.name: layer.projection for layer in layers if layer.kind == "projection"}
    usual = {name: path for name, path in usual.items() if name not in listed and name not in result}
    done = {layer.name for layer in layers} - usual.keys() | result.keys()
    unknown = {name: own for name, own in group_by_module(groups).items() if name not in done}
    traced = trace_output_projections(model, unknown, example_inputs, usual)
    return result | dict.fromkeys(unknown, NO_PROJECTION) | traced
