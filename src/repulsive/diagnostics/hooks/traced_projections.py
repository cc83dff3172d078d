"""Find the output projections of all attention layers, by autograd where names do not show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from repulsive.diagnostics.hooks.attention_layers import group_by_module, hookable_layers
from repulsive.heads import HeadGroup
from repulsive.heads.trace.output_projection import trace_output_projections


def traced_projections(
    model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Find the output projections of layers where names do not show them, for `find_attention_layers(out=...)`.

    Args:
        model: any module; its parameters, gradients and flags stay as they are.
        groups: the result of `find_heads` for all parts.
        example_inputs: as in `find_heads`; the model runs on it once if a projection is unknown, else not at all.
        known: projections that the caller names, which are kept.

    Returns:
        Dotted name of an attention module -> dotted name of its output projection: the known ones, and those that
        `trace_output_projections` finds.
    """
    result = dict(known or {})
    done = {layer.name for layer in hookable_layers(model, groups, out=result)[0]} | result.keys()
    unknown = {name: own for name, own in group_by_module(groups).items() if name not in done}
    return result | trace_output_projections(model, unknown, example_inputs)
