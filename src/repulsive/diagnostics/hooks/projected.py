"""Queries, keys and values of a model's attention layers on tokens of its own inputs.

Heads are read as the projections return them: with biases and with any norm between projection and dot product,
before rotary position embeddings. Tokens are those that reach the layer while the model runs in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import call, evaluating, real_keys, real_queries
from repulsive.diagnostics.hooks.qkv import Layer, Projection
from repulsive.diagnostics.hooks.running import Real
from repulsive.diagnostics.hooks.torch_qkv import watch_torch
from repulsive.particles.gram import compute_dtype
from repulsive.particles.logits import centre_keys


@dataclass(eq=False)
class Projected:
    """Heads of one attention layer on sampled tokens.

    Args:
        layer: where they come from.
        samples: part -> blocks [N, M, d], one per pass; keys are centred per sequence, padding is left out.
        problem: why they cannot be read; "" where nothing is wrong.
    """

    layer: Layer
    samples: dict[str, list[Tensor]] = field(default_factory=dict)
    problem: str = ""

    def part(self, name: str) -> Tensor:
        """All sampled tokens of one part, [N, M, d]."""
        return torch.cat(self.samples[name])

    def count(self, name: str) -> int:
        """N"""
        return sum(len(block) for block in self.samples.get(name, ()))


@torch.no_grad()
def project(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Sequence[Layer],
    *,
    tokens: int = 2048,
    seed: int = 0,
    queries: Real = real_queries,
    keys: Real = real_keys,
) -> list[Projected]:
    """Run a model on all batches and keep queries, keys and values of some tokens.

    A layer that runs several times in a pass pools the tokens of its runs. Every layer keeps the same tokens.

    Args:
        model: its weights, flags and results stay as they are.
        batches: what the model takes, each a tensor, a tuple of arguments or a mapping of keyword arguments.
        layers: what `find_layers` returned.
        tokens: how many to keep of each part, at most; an equal share of each batch.
        seed: chooses the tokens.
        queries: says of a batch, and of "encoder", "decoder" or "cross", which query tokens count, bool [B, T].
        keys: the same for keys and values.
    """
    results = [Projected(layer) for layer in layers]
    for number, batch in enumerate(batches):
        draw = _Draw(tokens, len(batches) - number, seed + number)
        with evaluating(model), ExitStack() as stack:
            passes = []
            for each in results:
                if not each.problem:
                    where = each.layer.where
                    seen = _Pass(each, draw, queries(batch, where), keys(batch, where))
                    _watch(stack, seen)
                    passes.append(seen)
            call(model, batch)
        for seen in passes:
            seen.end()
    for each in results:
        unread = [part for part in each.layer.parts if not each.problem and not each.count(part)]
        if unread:
            each.problem = f"the model never called its {unread[0]} projection as a module, or read only padding"
    return results


@dataclass(frozen=True)
class _Draw:
    """Choose tokens: the same ones for every layer that has as many."""

    tokens: int
    batches_left: int
    seed: int

    def share(self, kept: int) -> int:
        """How many of this batch, if `kept` are kept already."""
        return -(-(self.tokens - kept) // self.batches_left)

    def sample(self, heads: Tensor, share: int) -> Tensor:
        """At most `share` of [N, M, d]."""
        if len(heads) <= share:
            return heads
        order = torch.randperm(len(heads), generator=torch.Generator().manual_seed(self.seed))
        return heads[order[:share].sort().values.to(heads.device)]


class _Pass:
    """One forward pass through one layer: reads results of projections and samples their tokens."""

    def __init__(self, projected: Projected, draw: _Draw, queries: Tensor | None, keys: Tensor | None) -> None:
        self.projected, self.draw = projected, draw
        self.real: Mapping[str, Tensor | None] = {"q": queries, "k": keys, "v": keys}
        self.blocks: dict[str, list[Tensor]] = {}
        self.pending: dict[str, Tensor] = {}  # results whose norm has not run yet
        self.unmatched_norms: set[str] = set()  # parts whose norm read something else

    def keep(self, part: str, heads: Tensor, real: Tensor | None) -> None:
        """Keep some of [S, n, M, d]; `real` [S, n] is False for padding."""
        heads = heads.detach().to(compute_dtype(heads))
        if part == "k":
            heads = centre_keys(heads, real)
        rows = heads.flatten(0, 1)  # [N, M, d]
        rows = rows if real is None else rows[real.flatten()]
        share = self.draw.share(self.projected.count(part))
        self.blocks.setdefault(part, []).append(self.draw.sample(rows, share))

    def projection_ran(self, part: str, out: object) -> None:
        """Read the result of a projection."""
        projection = self.projected.layer.parts[part]
        if not isinstance(out, Tensor) or out.shape[-1] != projection.features or out.ndim < 2:
            self.projected.problem = f"its {part} projection does not return [..., {projection.features}]"
            return
        out = out.unsqueeze(0) if out.ndim == 2 else out.flatten(1, -2)  # [S, n, features]
        real = self.real[part]
        if real is not None and out.shape[1] == len(real) != len(out):  # tokens come first
            if len(out) != real.shape[1]:
                self.projected.problem = f"it reads {len(out)} tokens of which the inputs' mask knows {real.shape[1]}"
                return
            out = out.transpose(0, 1)
        heads = out[..., projection.rows.to(out.device)]  # [S, n, M, d], a copy
        self.flush(part)
        if projection.norm is None:
            self.keep(part, heads, self.mask_of(part, heads))
        else:
            self.pending[part] = heads

    def norm_ran(self, part: str, before: Tensor, after: Tensor) -> None:
        """Replace the result of a projection by its norm, if that is what the norm read."""
        heads = self.pending.get(part)
        if heads is None:
            return  # it runs before the projection
        layouts = [(before, after)]
        if before.ndim == 4:
            layouts.append((before.transpose(1, 2), after.transpose(1, 2)))  # [S, M, n, d]
        for read, made in layouts:
            if read.numel() == heads.numel() and torch.equal(read.reshape(heads.shape), heads):
                del self.pending[part]
                self.keep(part, made.reshape(heads.shape), self.mask_of(part, heads))
                return
        self.unmatched_norms.add(part)

    def flush(self, part: str) -> None:
        """Keep a result whose norm did not run."""
        heads = self.pending.pop(part, None)
        if heads is not None and part in self.unmatched_norms:
            self.projected.problem = f"its {part} norm does not read the result of the projection"
        elif heads is not None:
            self.keep(part, heads, self.mask_of(part, heads))

    def mask_of(self, part: str, heads: Tensor) -> Tensor | None:
        """The mask of this part's tokens, bool [S, n]; None where none is known or it is that of other tokens."""
        real = self.real[part]
        return real.to(heads.device) if real is not None and real.shape == heads.shape[:2] else None

    def end(self) -> None:
        """Add the tokens of this pass to the samples."""
        for part in tuple(self.pending):
            self.flush(part)
        for part, blocks in self.blocks.items():
            kept = self.projected.samples.setdefault(part, [])
            kept.append(self.draw.sample(torch.cat(blocks), self.draw.share(self.projected.count(part))))


def _watch(stack: ExitStack, seen: _Pass) -> None:
    for part, projection in seen.projected.layer.parts.items():
        if isinstance(projection.module, nn.MultiheadAttention):
            watch_torch(stack, part, projection, seen.real[part], seen.keep)
        else:
            _hook(stack, part, projection, seen)


def _hook(stack: ExitStack, part: str, projection: Projection, seen: _Pass) -> None:
    def after(_module: nn.Module, _args: object, out: object) -> None:
        seen.projection_ran(part, out)

    def norm(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        seen.norm_ran(part, args[0] if args else out, out)

    stack.callback(projection.module.register_forward_hook(after).remove)
    if projection.norm is not None:
        stack.callback(projection.norm.register_forward_hook(norm).remove)
