r"""Find the attention layers of a model, and read or replace the outputs of their heads.

Multi-head attention is $\sum_h W^O_h o_h$: the input of the output projection is the concatenated head outputs $o_h$.
A hook on that input reads or replaces the output of each head, whatever backend computed it. In einsum notation the
projection is a parameter, and the tensor that it is multiplied with is read or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import HeadLayoutError, SelectionError, did_you_mean
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import clean, module_of, unwrap
from repulsive.heads.products.weight_products import WeightProduct, intercept_products
from repulsive.heads.table.match import is_conv1d
from repulsive.heads.table.output_projection import output_parameter, output_projection
from repulsive.heads.token_order import is_time_first

NO_PROJECTION = ""  # instead of a projection's name: a trace found none, whatever modules are called
Change = Callable[["AttentionLayer", Tensor], Tensor | None]  # layer, head outputs -> new outputs; None: no change


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer, and the module where its head outputs can be hooked.

    Args:
        name: the attention module's dotted name.
        layer: index of the layer in its stack (list of layers), from 0.
        where: "encoder", "decoder" or "cross".
        num_heads: number of query heads.
        attention: the attention module.
        module: the module to hook: the output projection, or the attention module itself.
        kind: "projection" (the input of the output projection holds the heads), "torch" (`nn.MultiheadAttention`,
            which never calls its projection as a module), "parameter" (the projection is a parameter of the attention
            module, as in einsum notation), "result" (no projection: the result of the attention module
            has a head axis, [B, M, d]) or "graph" (no projection: the result of message passing has a head axis,
            [nodes, M, d], before heads are concatenated or averaged).
        head_dim: d, the width of a head; 0 if it is known only from the result.
        projection: dotted name of the output projection; "" if there is none.
        axis: axis of heads in a projection that is a parameter; the next axis is that of their features.
    """

    name: str
    layer: int
    where: str
    num_heads: int
    attention: nn.Module
    module: nn.Module
    kind: str
    head_dim: int
    projection: str = ""
    axis: int = 0


def find_attention_layers(
    model: nn.Module,
    groups: Sequence[HeadGroup] | None = None,
    *,
    example_inputs: object = None,
    out: Mapping[str, str] | None = None,
) -> list[AttentionLayer]:
    """Find every attention layer whose head outputs can be hooked, in model order.

    Args:
        model: any module, also inside a data-parallel or compile wrapper.
        groups: the result of `find_heads` for all parts; None calls `find_heads`.
        example_inputs: passed to `find_heads` if groups is None.
        out: dotted name of an attention module -> dotted name of its output projection, for layers where the
            projection is not found; `NO_PROJECTION` if it has none.

    Raises:
        HeadLayoutError: a layer has no output projection as wide as its heads.
        NoHeadsFound: the model has no heads.
        SelectionError: a group joins several parts (q, k, v).
    """
    inner = unwrap(model)
    groups = find_heads(model, example_inputs) if groups is None else groups
    modules = {clean(name): module for name, module in inner.named_modules()}
    by_module = group_by_module(groups)
    return [_attention_layer(modules, name, own, (out or {}).get(name)) for name, own in by_module.items()]


def group_by_module(groups: Sequence[HeadGroup]) -> dict[str, list[HeadGroup]]:
    """Return the groups of each attention module, by its dotted name.

    Raises:
        SelectionError: a group joins several parts (q, k, v).
    """
    by_module: dict[str, list[HeadGroup]] = {}
    for group in groups:
        if len(group.part) > 1:
            raise SelectionError(
                f"{group.name} joins parts {group.part}; find_attention_layers needs particle='projection'"
            )
        by_module.setdefault(module_of(group), []).append(group)
    return by_module


def check_layer_names(names: Iterable[str], groups: Sequence[HeadGroup]) -> None:
    """Check that all names are those of attention modules with heads.

    Raises:
        SelectionError: a name is not.
    """
    known = list(group_by_module(groups))
    for name in names:
        if name not in known:
            layers = ", ".join(map(repr, known[:6]))
            raise SelectionError(f"out: no attention layer {name!r}; {did_you_mean(name, known)}there are {layers}")


def hookable_layers(
    model: nn.Module, groups: Sequence[HeadGroup], *, out: Mapping[str, str] | None = None
) -> tuple[list[AttentionLayer], list[str]]:
    """Find the layers whose head outputs can be hooked, and the error message of each layer where they cannot."""
    layers, problems = [], []
    for own in group_by_module(groups).values():
        try:
            layers += find_attention_layers(model, own, out=out)
        except HeadLayoutError as error:
            problems.append(str(error))
    return layers, problems


@contextmanager
def replaced_head_outputs(
    layers: Sequence[AttentionLayer], change: Change, *, only_reads: bool = False
) -> Iterator[None]:
    """Call `change(layer, heads)` with head outputs [B, T, M, d], and use its result unless it returns None.

    Packed tokens and the nodes of a graph have the shape [1, N, M, d], additive attention has [B, 1, M, d]. In nested
    contexts the inner `change` receives the result of the outer one. All hooks are removed at the end, also after an
    exception.

    Args:
        layers: the layers.
        change: called each time one of the layers runs.
        only_reads: `change` returns None and needs no gradients. Then a pass under activation checkpointing saves the
            same tensors with and without hooks.
    """
    with ExitStack() as stack:
        for layer in layers:
            if layer.kind == "parameter":
                _hook_parameter(stack, layer, change, only_reads)
            else:
                _hook(stack, layer, change)
        yield


@torch.no_grad()
def output_weight(layer: AttentionLayer) -> Tensor:
    """Return the weight of a layer's output projection, [d_model, M d], including an adapter around it.

    Args:
        layer: a layer with an output projection (kind "projection", "torch" or "parameter").
    """
    if layer.kind == "parameter":
        own = layer.attention.get_parameter(layer.projection.rpartition(".")[2]).detach()
        return own.movedim((layer.axis, layer.axis + 1), (0, 1)).flatten(0, 1).mT  # [d_model, M d]
    width = layer.num_heads * layer.head_dim
    projection: nn.Module = layer.attention.out_proj if layer.kind == "torch" else layer.module  # type: ignore[assignment]
    if isinstance(projection, _IdentityProjection):  # inside a context that replaces head outputs
        projection = projection.originals[0]
    weight = getattr(projection, "weight", None)
    if isinstance(projection, nn.Linear) and isinstance(weight, Tensor) and weight.shape[-1] == width:
        return weight.detach()
    if is_conv1d(projection) and isinstance(weight, Tensor):
        return weight.detach().mT
    first = next(projection.parameters())
    unit = torch.eye(width, device=first.device, dtype=first.dtype if first.is_floating_point() else torch.float32)
    training = projection.training
    try:
        response = projection.eval()(unit) - projection(torch.zeros_like(unit[:1]))  # [M d, d_model]
    finally:
        projection.train(training)
    return response.mT


def _attention_layer(
    modules: Mapping[str, nn.Module], name: str, groups: Sequence[HeadGroup], out: str | None
) -> AttentionLayer:
    attention, first = modules[name], groups[0]
    heads = max(group.num_heads for group in groups)
    value = next((group for group in groups if "v" in group.part), None)
    head_dim = value.head_dim if value else 0
    position = (name, first.layer, first.where, heads, attention)
    if out is None and first.family == "additive":
        return AttentionLayer(*position, attention, "result", 0)
    if out is None and hasattr(attention, "register_propagate_forward_hook"):
        return AttentionLayer(*position, attention, "graph", head_dim)
    match = output_projection(modules, name, first.family, heads, head_dim, out)
    if match is not None:
        path, projection, width = match
        kind = "torch" if isinstance(attention, nn.MultiheadAttention) else "projection"
        hooked = attention if kind == "torch" else projection
        return AttentionLayer(*position, hooked, kind, width // heads, path)
    if (parameter := output_parameter(modules, name, first.family, heads, head_dim, out)) is not None:
        path, axis = parameter
        return AttentionLayer(*position, attention, "parameter", head_dim, path, axis)
    raise HeadLayoutError(f"{name or type(attention).__name__}: {_no_projection(name, heads, head_dim, out)}")


def _no_projection(name: str, heads: int, head_dim: int, out: str | None) -> str:
    expected = f"{heads} heads of size {head_dim}" if head_dim else f"{heads} heads"
    problem = f"{out!r} is not a projection" if out else "found no output projection"
    remedy = f'name it: out={{"{name}": "dotted.name.of.the.projection"}}'
    kinds = "a module such as nn.Linear, or a parameter [heads, features, outputs]"
    if out == NO_PROJECTION:
        return f"{problem} that takes {expected}, one after the other ({kinds}), in a trace; if there is one, {remedy}"
    return f"{problem} that takes {expected} ({kinds}); pass example_inputs=..., or {remedy}"


def _hook(stack: ExitStack, layer: AttentionLayer, change: Change) -> None:
    if layer.kind == "projection":

        def before_projection(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = next(iter(kwargs)) if not args else ""
            new = _changed(layer, change, args[0] if args else kwargs[name])
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, name: new})

        stack.callback(layer.module.register_forward_pre_hook(before_projection, with_kwargs=True).remove)
    elif layer.kind == "torch":
        _hook_torch(stack, layer, change)
    elif layer.kind == "graph":

        def after_propagate(_module: nn.Module, _args: object, heads: Tensor) -> Tensor | None:
            new = change(layer, heads.unsqueeze(0))  # [1, nodes, M, d]
            return None if new is None else new.squeeze(0)

        stack.callback(layer.module.register_propagate_forward_hook(after_propagate).remove)  # type: ignore[operator]
    else:

        def after_attention(_module: nn.Module, _args: object, result: Any) -> Any:
            single = isinstance(result, Tensor)
            *others, heads = [result] if single else result  # additive attention returns [B, M, d] last
            new = change(layer, heads.unsqueeze(1))  # [B, 1, M, d]
            if new is None:
                return None
            return new.squeeze(1) if single else (*others, new.squeeze(1))

        stack.callback(layer.module.register_forward_hook(after_attention).remove)


class _IdentityProjection(nn.Module):
    """Replaces the projection of `nn.MultiheadAttention`, which then returns its concatenated heads."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.originals = [original]  # in a list, so that the projection is not registered as a submodule
        weight = original.weight
        self.changes: list[Change] = []  # changes of all open contexts, the outermost first
        self.register_buffer("weight", torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))
        self.register_buffer("bias", None if original.bias is None else torch.zeros_like(original.bias).detach())


def _hook_torch(stack: ExitStack, layer: AttentionLayer, change: Change) -> None:
    attention = layer.module
    assert isinstance(attention, nn.MultiheadAttention)
    current: nn.Module = attention.out_proj
    if isinstance(current, _IdentityProjection):  # an outer context applies the projection after all changes
        current.changes.append(change)
        stack.callback(current.changes.pop)
        return
    original, identity = attention.out_proj, _IdentityProjection(attention.out_proj)
    identity.changes.append(change)
    attention._modules["out_proj"] = identity
    stack.callback(attention._modules.__setitem__, "out_proj", original)

    def after_attention(_module: nn.Module, _args: object, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        heads = result[0]  # [B, T, M d], or [T, B, M d]
        tokens_first = heads.ndim == 3 and not attention.batch_first
        heads = heads.transpose(0, 1) if tokens_first else heads
        for each in identity.changes:
            new = _changed(layer, each, heads)
            heads = heads if new is None else new
        heads = heads.transpose(0, 1) if tokens_first else heads
        return F.linear(heads, original.weight, original.bias), *result[1:]

    stack.callback(attention.register_forward_hook(after_attention, prepend=True).remove)


# Changes of all open contexts, the outermost first, and whether each only reads.
_OPEN: WeakKeyDictionary[nn.Module, list[tuple[Change, bool]]] = WeakKeyDictionary()


def _hook_parameter(stack: ExitStack, layer: AttentionLayer, change: Change, only_reads: bool) -> None:
    changes = _OPEN.setdefault(layer.attention, [])
    changes.append((change, only_reads))
    stack.callback(changes.pop)
    if len(changes) > 1:  # an outer context applies all changes
        return
    swap = is_time_first(layer.attention)

    def before_product(product: WeightProduct) -> Tensor | None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not all(reads for _, reads in changes)):
            return changed_operand(product)

    def changed_operand(product: WeightProduct) -> Tensor | None:
        heads = product.heads_in(layer.axis)
        if heads is None:
            return None
        shape, is_changed = heads.shape, False
        flat = (heads.transpose(0, 1) if swap else heads).flatten(-2)  # [..., M d]
        for each, _ in changes:
            new = _changed(layer, each, flat)
            flat, is_changed = (flat, is_changed) if new is None else (new, True)
        if not is_changed:
            return None
        heads = flat.unflatten(-1, shape[-2:])
        return product.with_heads(layer.axis, heads.transpose(0, 1) if swap else heads)

    intercept_products(stack, layer.attention, {layer.projection.rpartition(".")[2]: before_product})


def _changed(layer: AttentionLayer, change: Change, x: Tensor) -> Tensor | None:
    """Apply `change` to `x` [..., M d] in the shape [B, T, M, d], and return its result in the shape of `x`."""
    heads = x.unflatten(-1, (layer.num_heads, -1))  # [..., M, d]
    batched = heads.unsqueeze(0) if x.ndim == 2 else heads.flatten(1, -3)  # [B, T, M, d]
    new = change(layer, batched)
    return None if new is None else new.reshape(x.shape)
