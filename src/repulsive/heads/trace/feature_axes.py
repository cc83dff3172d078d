"""Find the axis of features in weights in einsum notation, from the products that a model computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor, nn

from repulsive.heads.call_arguments import call_arguments
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.products.weight_products import After, WeightProduct, intercept_products
from repulsive.heads.trace.forward_pass import without_compilation, without_side_effects
from repulsive.heads.trace.sharded_weights import gathered_weights


def with_feature_axes(model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object) -> list[HeadGroup]:
    """Set the axis of features in slices of inferred groups, which is otherwise taken to be the last one.

    Args:
        model: the unwrapped model.
        groups: groups of heads.
        example_inputs: as in `find_heads`; the model runs on it once if there are such slices, else not at all.
    """
    unsure = [s for g in groups if g.family == "inferred" for s in g.slices if s.feature_axis is not None]
    axes: dict[int, int] = {}
    if not unsure:
        return list(groups)
    args, kwargs = call_arguments(model, example_inputs)
    with ExitStack() as stack:
        for context in (gathered_weights(model), without_side_effects(model), without_compilation(), torch.no_grad()):
            stack.enter_context(context)
        for module in dict.fromkeys(s.module for s in unsure):
            after = {s.attribute: _record(axes, s) for s in unsure if s.module is module}
            intercept_products(stack, module, after=after)
        model(*args, **kwargs)
    return [
        replace(g, slices=tuple(replace(s, along=axes[id(s)]) if id(s) in axes else s for s in g.slices))
        for g in groups
    ]


def _record(axes: dict[int, int], part: HeadSlice) -> After:
    def after(product: WeightProduct, result: Tensor) -> None:
        others = [axis for axis in range(part.parameter().ndim) if axis != part.axis]
        candidates = [axis for axis in others if product.heads_out(result, part.axis, axis) is not None]
        if len(candidates) == 1:
            axes[id(part)] = candidates[0]

    return after
