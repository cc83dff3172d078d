"""Find output projections by autograd, in classes that do not use one of the usual names.

The input of an output projection is the concatenated outputs of the heads, so its slice i depends on the value rows of
head i and on those of no other head. Any module whose input passes this test for every head is the projection. In
einsum notation the projection is a parameter of the attention module, and what it is multiplied with is tested.

A usual name alone proves nothing: a module called `proj` may project the inputs, or interleave the features of all
heads. Such a module is rejected if the test contradicts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.heads.call_arguments import call_arguments
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, dotted, unwrap
from repulsive.heads.products.weight_products import WeightProduct, intercept_products
from repulsive.heads.table.output_projection import heads_axis, input_features
from repulsive.heads.trace.attention_calls import flex_recorded
from repulsive.heads.trace.forward_pass import without_compilation, without_side_effects
from repulsive.heads.trace.sharded_weights import gathered_weights

LEAK = 1e-6  # largest share of the squared gradient that may reach the value rows of other heads
# Above this share a module with a usual name is rejected: a norm before it leaks less, columns of other heads more.
REJECTED = 0.25


def trace_output_projections(
    model: nn.Module,
    layers: Mapping[str, Sequence[HeadGroup]],
    example_inputs: object,
    usual: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Find the output projections of attention layers where names do not show them, or may be wrong.

    Args:
        model: any module; its parameters, gradients, flags and random state stay as they are. Every rank must call
            this if FSDP2 shards it.
        layers: dotted name of an attention module -> its groups of heads, not joined.
        example_inputs: as in `find_heads`; the model runs on it once, or not at all if there is no candidate.
        usual: dotted name of an attention module -> dotted name of the module that its name suggests, to be tested.

    Returns:
        Dotted name of an attention module -> dotted name of its output projection, a module or a parameter: the one
        that passes the test; or else the one in `usual`, unless the test contradicts it.
    """
    usual = usual or {}
    inner = unwrap(model)
    modules = {clean(name): module for name, module in inner.named_modules()}
    parameters = {name: axes for name, own in layers.items() if (axes := _parameters(modules, name, own))}
    candidates = {
        name: paths
        for name, own in layers.items()
        if (paths := [*_candidates(modules, name, own), *parameters.get(name, ())])
    }
    values = {name: _value(layers[name]) for name in candidates}
    watched = {path: modules[path] for paths in candidates.values() for path in paths if path in modules}
    weights = {modules[name]: axes for name, axes in parameters.items()}
    result = dict(usual)
    if not candidates:
        return result
    parts = [value.slices[0] for value in values.values() if value is not None]
    uses = Counter(id(part.parameter()) for part in parts)  # shared values reach a layer through the layers below, too
    with gathered_weights(inner), _recorded_inputs(inner, watched, weights, parts, example_inputs) as inputs:
        for name, paths in candidates.items():
            value = values[name]
            assert value is not None  # there are no candidates without values
            leaks = {path: _leak(inputs[path], layers[name], value) for path in paths if path in inputs}
            passed = [path for path, leak in leaks.items() if leak <= LEAK]
            is_shared = uses[id(value.slices[0].parameter())] > 1
            if len(passed) == 1:
                result[name] = passed[0]
            elif name in usual and not is_shared and leaks.get(usual[name], 0.0) > REJECTED:
                del result[name]
    return result


def _value(groups: Sequence[HeadGroup]) -> HeadGroup | None:
    """Return the group of values if one weight holds it."""
    return next((group for group in groups if group.part == "v" and len(group.slices) == 1), None)


def _parameters(modules: Mapping[str, nn.Module], name: str, groups: Sequence[HeadGroup]) -> dict[str, int]:
    """List the parameters of an attention module that may be its output weight, each with its axis of heads."""
    value = _value(groups)
    if value is None or value.slices[0].feature_axis is None:
        return {}
    heads, own = max(group.num_heads for group in groups), {id(p) for group in groups for p in group.parameters()}
    axes = {
        dotted(name, attribute): heads_axis(parameter, heads, value.head_dim)
        for attribute, parameter in modules[name].named_parameters(recurse=False)
        if id(parameter) not in own
    }
    return {path: axis for path, axis in axes.items() if axis is not None}


def _candidates(modules: Mapping[str, nn.Module], name: str, groups: Sequence[HeadGroup]) -> list[str]:
    """List the modules in or beside an attention module that take inputs as wide as its heads."""
    value = _value(groups)
    if value is None:
        return []
    width = max(group.num_heads for group in groups) * value.head_dim
    own = {id(part.module) for group in groups for part in group.slices}
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return [
        path
        for path, module in modules.items()
        if path.startswith(prefix) and path != name and id(module) not in own and input_features(module) == width
    ]


@contextmanager
def _recorded_inputs(
    model: nn.Module,
    watched: Mapping[str, nn.Module],
    weights: Mapping[nn.Module, Mapping[str, int]],
    parts: Sequence[HeadSlice],
    example: object,
) -> Iterator[dict[str, Tensor]]:
    """Run the model once and record the input of each watched module, with its graph back to the weights of `parts`.

    The tensors that each of the `weights` (module -> dotted name -> axis of heads) is multiplied with count as inputs.
    """
    inputs: dict[str, Tensor] = {}
    args, kwargs = call_arguments(model, example)
    with ExitStack() as stack:
        for context in (
            without_side_effects(model),
            without_compilation(),
            flex_recorded(lambda *_: None),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            stack.enter_context(context)
        for parameter in [part.parameter() for part in parts]:
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(True)
        for path, module in watched.items():

            def record(module: nn.Module, args: tuple[Any, ...], path: str = path) -> None:
                is_floating = bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
                if is_floating and args[0].shape[-1] == input_features(module) and torch.is_grad_enabled():
                    inputs.setdefault(path, args[0])  # the first run: later ones depend on all heads of earlier ones

            stack.callback(module.register_forward_pre_hook(record).remove)
        for module, axes in weights.items():
            before = {path.rpartition(".")[2]: _record_product(inputs, path, axis) for path, axis in axes.items()}
            intercept_products(stack, module, before)
        model(*args, **kwargs)
        yield inputs


def _record_product(inputs: dict[str, Tensor], path: str, axis: int) -> Callable[[WeightProduct], None]:
    def record(product: WeightProduct) -> None:
        heads = product.heads_in(axis)
        if heads is not None and torch.is_grad_enabled():
            inputs.setdefault(path, heads.flatten(-2))  # [..., M d]

    return record


def _leak(x: Tensor, groups: Sequence[HeadGroup], value: HeadGroup) -> float:
    """Measure how much slice i of the input [..., M d] depends on the values of other heads than head i.

    Returns:
        The largest share, over heads, of the squared gradient of a slice that reaches the value rows of other heads;
        1 if a slice does not depend on any values.
    """
    query = next((group for group in groups if group.part == "q"), None)
    heads, kv_heads = max(group.num_heads for group in groups), value.num_heads
    serves = query.serves if query is not None and query.serves else [i * kv_heads // heads for i in range(heads)]
    slices, part = x.unflatten(-1, (heads, -1)), value.slices[0]
    noise = torch.randn(slices.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(slices)
    leaks = []
    for head in range(heads):
        grad = None
        if x.requires_grad:
            (grad,) = torch.autograd.grad(
                slices[..., head, :], [part.parameter()], noise[..., head, :], retain_graph=True, allow_unused=True
            )
        energy = part.take(grad.double()).square().sum(-1) if grad is not None else torch.zeros(kv_heads)  # [M_v]
        total = float(energy.sum())
        leaks.append(1 - float(energy[serves[head]]) / total if total > 0 else 1.0)
    return max(leaks)
