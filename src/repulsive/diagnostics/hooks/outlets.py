r"""Where heads leave their attention layer, and how to read or change what leaves there.

Multi-head attention is $\sum_h W^O_h o_h$: the input of the output projection is the heads' outputs $o_h$ side by
side, head after head. A hook there sees, and may replace, what leaves each head, whatever computed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import clean, module_of, unwrap
from repulsive.heads.table.output_projection import output_projection

Change = Callable[["Outlet", Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class Outlet:
    """Where the heads of one attention layer leave it.

    Args:
        name: the attention module's dotted name.
        layer: its index in its stack, from 0.
        where: "encoder", "decoder" or "cross".
        num_heads: query heads.
        attention: the attention module.
        module: what is hooked: the output projection, or the attention module itself.
        kind: "projection" (its input is the heads), "torch" (`nn.MultiheadAttention`, which never calls its
            projection), "result" (no projection: the attention's own result has a head axis, [B, M, d]) or "graph"
            (no projection: what message passing gives has one, [nodes, M, d], before heads are joined or averaged).
        head_dim: d; 0 where only the result will tell.
        projection: dotted name of the output projection; "" where there is none.
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


def find_outlets(
    model: nn.Module,
    groups: Sequence[HeadGroup] | None = None,
    *,
    example_inputs: object = None,
    out: Mapping[str, str] | None = None,
) -> list[Outlet]:
    """The outlet of every attention layer, in model order.

    Args:
        model: any module; data-parallel and compile wrappers are seen through.
        groups: what `find_heads` returned for all parts; None: found here.
        example_inputs: for `find_heads` where groups is None.
        out: attention module's dotted name -> its output projection's, for layers where it is not found.

    Raises:
        HeadLayoutError: a layer has no output projection that is as wide as its heads.
        NoHeadsFound: the model has no heads.
        SelectionError: the groups are joined heads.
    """
    inner = unwrap(model)
    groups = find_heads(model, example_inputs) if groups is None else groups
    modules = {clean(name): module for name, module in inner.named_modules()}
    layers: dict[str, list[HeadGroup]] = {}
    for group in groups:
        if len(group.part) > 1:
            raise SelectionError(f"{group.name} joins parts {group.part}; outlets need particle='projection'")
        layers.setdefault(module_of(group), []).append(group)
    return [_outlet(modules, name, found, (out or {}).get(name)) for name, found in layers.items()]


@contextmanager
def rerouted(outlets: Sequence[Outlet], change: Change) -> Iterator[None]:
    """Let `change(outlet, heads)` see what leaves the heads, [B, T, M, d], and replace it unless it returns None.

    A model that keeps tokens in one row gives [1, N, M, d], and so do the nodes of a graph; an additive attention gives
    [B, 1, M, d]. Contexts may be nested: the inner one sees what the outer one leaves. All is put back at the end,
    whatever happens inside.
    """
    with ExitStack() as stack:
        for outlet in outlets:
            _hook(stack, outlet, change)
        yield


def _outlet(modules: Mapping[str, nn.Module], name: str, groups: Sequence[HeadGroup], out: str | None) -> Outlet:
    attention, first = modules[name], groups[0]
    heads = max(group.num_heads for group in groups)
    value = next((group for group in groups if "v" in group.part), None)
    head_dim = value.slices[0].rows.shape[1] if value else 0
    place = (name, first.layer, first.where, heads, attention)
    if out is None and first.family == "additive":
        return Outlet(*place, attention, "result", 0)
    if out is None and hasattr(attention, "register_propagate_forward_hook"):
        return Outlet(*place, attention, "graph", head_dim)
    found = output_projection(modules, name, first.family, heads, head_dim, out)
    if found is not None:
        path, projection, width = found
        kind = "torch" if isinstance(attention, nn.MultiheadAttention) else "projection"
        hooked = attention if kind == "torch" else projection
        return Outlet(*place, hooked, kind, width // heads, path)
    wanted = f"{heads} heads of {head_dim}" if head_dim else f"{heads} heads"
    what = f"{out!r} is no projection" if out is not None else "no output projection found"
    raise HeadLayoutError(
        f"{name or type(attention).__name__} ({first.family}): {what} that takes {wanted}; "
        f'name it: find_outlets(model, out={{"{name}": "dotted.name.of.its.output.projection"}})'
    )


def _hook(stack: ExitStack, outlet: Outlet, change: Change) -> None:
    if outlet.kind == "projection":

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = next(iter(kwargs)) if not args else ""
            new = _changed(outlet, change, args[0] if args else kwargs[name])
            if new is None:
                return None
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, name: new})

        stack.callback(outlet.module.register_forward_pre_hook(before, with_kwargs=True).remove)
    elif outlet.kind == "torch":
        _hook_torch(stack, outlet, change)
    elif outlet.kind == "graph":

        def passed(_module: nn.Module, _args: object, heads: Tensor) -> Tensor | None:
            new = change(outlet, heads.unsqueeze(0))  # [1, nodes, M, d]
            return None if new is None else new.squeeze(0)

        stack.callback(outlet.module.register_propagate_forward_hook(passed).remove)  # type: ignore[operator]
    else:

        def after(_module: nn.Module, _args: object, result: Any) -> Any:
            single = isinstance(result, Tensor)
            *others, heads = [result] if single else result  # [B, M, d] is the last thing such an attention gives
            new = change(outlet, heads.unsqueeze(1))  # [B, 1, M, d]
            if new is None:
                return None
            return new.squeeze(1) if single else (*others, new.squeeze(1))

        stack.callback(outlet.module.register_forward_hook(after).remove)


class _Through(nn.Module):
    """Stands in for the projection of `nn.MultiheadAttention`, which then returns its heads side by side."""

    def __init__(self, real: nn.Linear) -> None:
        super().__init__()
        weight = real.weight
        self.changes: list[Change] = []  # of all contexts, the outermost first
        self.register_buffer("weight", torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device))
        self.register_buffer("bias", None if real.bias is None else torch.zeros_like(real.bias).detach())


def _hook_torch(stack: ExitStack, outlet: Outlet, change: Change) -> None:
    attention = outlet.module
    assert isinstance(attention, nn.MultiheadAttention)
    there: nn.Module = attention.out_proj
    if isinstance(there, _Through):  # an outer context has the projection, and applies it behind all changes
        there.changes.append(change)
        stack.callback(there.changes.pop)
        return
    real, through = attention.out_proj, _Through(attention.out_proj)
    through.changes.append(change)
    attention._modules["out_proj"] = through
    stack.callback(attention._modules.__setitem__, "out_proj", real)

    def after(_module: nn.Module, _args: object, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        heads = result[0]  # [B, T, M d], or [T, B, M d]
        turned = heads.ndim == 3 and not attention.batch_first
        heads = heads.transpose(0, 1) if turned else heads
        for each in through.changes:
            new = _changed(outlet, each, heads)
            heads = heads if new is None else new
        heads = heads.transpose(0, 1) if turned else heads
        return F.linear(heads, real.weight, real.bias), *result[1:]

    stack.callback(attention.register_forward_hook(after, prepend=True).remove)


def _changed(outlet: Outlet, change: Change, x: Tensor) -> Tensor | None:
    """Show `x` [..., M d] as [B, T, M, d] and give the change the shape of `x`."""
    heads = x.unflatten(-1, (outlet.num_heads, -1))  # [..., M, d]
    shown = heads.unsqueeze(0) if x.ndim == 2 else heads.flatten(1, -3)  # [B, T, M, d]
    new = change(outlet, shown)
    return None if new is None else new.reshape(x.shape)
