"""Make attention layers return their weights: `nn.MultiheadAttention` and graph attention.

Callers of the layers, and hooks that were registered earlier, still receive the result they asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer

Record = Callable[[AttentionLayer, Tensor], None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments, keyword arguments
MAX_GRAPH_WEIGHTS = 1 << 27  # elements of a dense [M, nodes, nodes] tensor: half a gigabyte in float32
_TORCH_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


def return_torch_weights(stack: ExitStack, layer: AttentionLayer, record: Record) -> None:
    """Make `nn.MultiheadAttention` return weights per head, and record them, [B, M, T, S]."""
    requested: list[tuple[bool, bool]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        bound = _TORCH_SIGNATURE.bind(module, *args, **kwargs)
        bound.apply_defaults()
        requested.append((bound.arguments["need_weights"], bound.arguments["average_attn_weights"]))
        names = list(_TORCH_SIGNATURE.parameters)[1:]  # without self
        return _with_changes(names, args, kwargs, {"need_weights": True, "average_attn_weights": False})

    def after(_module: nn.Module, _args: object, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        out, weights = result  # [B, M, T, S]; without a batch [M, T, S]
        record(layer, weights if weights.ndim == 4 else weights.unsqueeze(0))
        need_weights, average = requested.pop()
        return out, (weights.mean(-3) if average else weights) if need_weights else None

    stack.callback(layer.attention.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(layer.attention.register_forward_hook(after, prepend=True).remove)


def return_graph_weights(stack: ExitStack, layer: AttentionLayer, record: Record) -> None:
    """Make graph attention return a weight per edge, and record [1, M, target nodes, source nodes]."""
    signature = inspect.signature(layer.attention.forward)
    requested: list[tuple[Any, Any]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        values = signature.bind(*args, **kwargs).arguments
        requested.append((values.get("return_attention_weights"), values["x"]))
        return _with_changes(list(signature.parameters), args, kwargs, {"return_attention_weights": True})

    def after(module: nn.Module, _args: object, result: Any) -> Any:
        wants_weights, x = requested.pop()
        out, edge_weights = result
        if isinstance(edge_weights, tuple) and edge_weights[0].layout == torch.strided:  # not a sparse matrix
            sources = len(x) if isinstance(x, Tensor) else len(x[0])
            if layer.num_heads * len(out) * sources <= MAX_GRAPH_WEIGHTS:
                edges, weights = edge_weights
                ends = edges if getattr(module, "flow", "") == "target_to_source" else edges.flip(0)  # [2, E]
                record(layer, over_nodes(weights, ends[0], ends[1], len(out), sources).unsqueeze(0))
        return out if wants_weights is None else result

    stack.callback(layer.attention.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(layer.attention.register_forward_hook(after, prepend=True).remove)


def _with_changes(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[str, Any]
) -> Arguments:
    """Change some arguments of a call; positional arguments stay positional, as other hooks read them by position."""
    positional = [changes.get(name, value) for name, value in zip(names, args, strict=False)]
    return tuple(positional), {**kwargs, **{name: changes[name] for name in names[len(args) :] if name in changes}}


def over_nodes(weights: Tensor, targets: Tensor, sources: Tensor, rows: int, columns: int) -> Tensor:
    """Convert edge weights [E, M] to a dense tensor [M, rows, columns]; parallel edges add up, missing ones are zero.

    Args:
        weights: attention weights of each edge.
        targets: target node of each edge [E], the query.
        sources: source node of each edge [E], the key.
        rows: number of target nodes.
        columns: number of source nodes.
    """
    dense = weights.new_zeros(rows * columns, weights.shape[1])
    dense.index_add_(0, targets * columns + sources, weights)
    return dense.T.reshape(-1, rows, columns)
