"""Attention layers that give their weights when they are asked: torch's own, and those of graphs.

Their callers get what they asked for, not what we did, and so do hooks that were there before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.outlets import Outlet

Seen = Callable[[Outlet, Tensor], None]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by place, and by name
MOST = 1 << 27  # numbers of a graph's map, all nodes by all nodes: half a gigabyte
_TORCH = inspect.signature(nn.MultiheadAttention.forward)


def ask_torch(stack: ExitStack, outlet: Outlet, seen: Seen) -> None:
    """Have `nn.MultiheadAttention` return its weights [B, M, T, S]."""
    asked: list[tuple[bool, bool]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given = _TORCH.bind(module, *args, **kwargs)
        given.apply_defaults()
        asked.append((given.arguments["need_weights"], given.arguments["average_attn_weights"]))
        names = list(_TORCH.parameters)[1:]  # without self
        return _instead(names, args, kwargs, {"need_weights": True, "average_attn_weights": False})

    def after(_module: nn.Module, _args: object, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        out, weights = result  # [B, M, T, S]; without a batch [M, T, S]
        seen(outlet, weights if weights.ndim == 4 else weights.unsqueeze(0))
        wanted, averaged = asked.pop()
        return out, (weights.mean(-3) if averaged else weights) if wanted else None

    stack.callback(outlet.attention.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(outlet.attention.register_forward_hook(after, prepend=True).remove)


def ask_graph(stack: ExitStack, outlet: Outlet, seen: Seen) -> None:
    """Have a graph's attention return the weight of each edge; nodes are the tokens, [1, M, targets, sources]."""
    signature = inspect.signature(outlet.attention.forward)
    asked: list[tuple[Any, Any]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        values = signature.bind(*args, **kwargs).arguments
        asked.append((values.get("return_attention_weights"), values["x"]))
        return _instead(list(signature.parameters), args, kwargs, {"return_attention_weights": True})

    def after(module: nn.Module, _args: object, result: Any) -> Any:
        wanted, x = asked.pop()
        out, found = result
        if (
            isinstance(found, tuple) and found[0].layout == torch.strided
        ):  # a sparse matrix in place of edges stays unread
            sources = len(x) if isinstance(x, Tensor) else len(x[0])
            if outlet.num_heads * len(out) * sources <= MOST:
                ends = found[0] if getattr(module, "flow", "") == "target_to_source" else found[0].flip(0)  # [2, E]
                seen(outlet, over_nodes(found[1], ends[0], ends[1], len(out), sources).unsqueeze(0))
        return out if wanted is None else result

    stack.callback(outlet.attention.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(outlet.attention.register_forward_hook(after, prepend=True).remove)


def _instead(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[str, Any]) -> Call:
    """A call with other values, each given by place or by name as it was: other hooks read what is given by place."""
    by_place = [changes.get(name, value) for name, value in zip(names, args, strict=False)]
    return tuple(by_place), {**kwargs, **{name: changes[name] for name in names[len(args) :] if name in changes}}


def over_nodes(weights: Tensor, targets: Tensor, sources: Tensor, rows: int, columns: int) -> Tensor:
    """Weights of edges [E, M] as [M, rows, columns]; edges between the same two nodes add up, others are zero.

    Args:
        weights: of each edge.
        targets: the node each edge leads to [E]: the one that looks.
        sources: the node it comes from [E]: the one that is looked at.
        rows: how many nodes look.
        columns: how many can be looked at.
    """
    found = weights.new_zeros(rows * columns, weights.shape[1])
    found.index_add_(0, targets * columns + sources, weights)
    return found.T.reshape(-1, rows, columns)
