"""One forward pass, and what left every head on the way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.diversity import Diversity, merged, of_attention, of_outputs
from repulsive.diagnostics.hooks.attention import watched
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.layer_weights import MOST
from repulsive.diagnostics.hooks.outlets import Outlet, find_outlets, rerouted
from repulsive.errors import HeadLayoutError

_LOOKS = 1e-6  # a weight above it is attention; what a mask bars has next to none


@dataclass(frozen=True, eq=False)
class Captured:
    """What the heads of one attention layer did; a layer that ran several times in the pass has several entries.

    Args:
        outlet: the layer.
        outputs: what left each head, [B, T, M, d]: the input of the output projection.
        weights: attention weights [B, M, T, S]; empty where they were not asked for.
    """

    outlet: Outlet
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()

    def diversity(self, space: str, real: Tensor | None = None) -> Diversity:
        """How alike these heads were, over all runs of the layer.

        Args:
            space: "outputs" or "attention".
            real: which tokens (queries) count, bool [B, T]; it is left aside where it is not this layer's (`own`).
        """
        if space not in ("outputs", "attention"):
            raise ValueError(f"space={space!r}: choose 'outputs' or 'attention'")
        outputs = space == "outputs"
        tensors = [x.transpose(1, 2) for x in self.outputs] if outputs else self.weights  # [B, M, T, .]
        found = []
        for run, x in enumerate(tensors):
            found.append((of_outputs if outputs else of_attention)(x, self.own(real, run), self.outlet.name))
        if not found:
            raise ValueError(f"{self.outlet.name}: no {space} were captured; ask capture() for them")
        return merged([(each, 1.0) for each in found])

    def own(self, real: Tensor | None, run: int = 0) -> Tensor | None:
        """A mask of tokens if it is one of this layer's tokens, else None: a text's says nothing of an image.

        Lengths must agree; and where tokens look at each other, no real one may look at one that is none.

        Args:
            real: which tokens count, bool [B, T].
            run: which of the layer's runs.
        """
        if real is None or real.shape != self.outputs[run].shape[:2]:
            return None
        seen = self.weights[run] if self.weights and self.outlet.where != "cross" else None  # [B, M, T, S]
        if seen is not None and seen.shape[-1] == seen.shape[-2]:
            mask = real.to(seen.device)
            barred = mask[:, None, :, None] & ~mask[:, None, None, :]  # [B, 1, T, S]
            if float(seen.masked_fill(~barred, 0).amax()) > _LOOKS:
                return None
        return real


@dataclass(frozen=True, eq=False)
class Capture:
    """One forward pass.

    Args:
        layers: one entry per attention layer that ran, in model order.
        result: what the model returned.
        idle: names of the attention layers that the inputs did not reach.
        hidden: for each layer that kept its attention weights out of sight, what to do about it.
    """

    layers: list[Captured]
    result: Any
    idle: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


@torch.no_grad()
def capture(
    model: nn.Module,
    inputs: object,
    *,
    weights: bool = True,
    strict: bool = True,
    outlets: Sequence[Outlet] | None = None,
) -> Capture:
    """Run a model once in evaluation mode and keep what left every head, and what every head looked at.

    Args:
        model: any module with heads that `find_heads` finds. Its weights, flags and results stay as they are.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.
        weights: also keep attention weights.
        strict: refuse a layer that keeps its attention weights out of sight; False: it has none, and `hidden` says so.
        outlets: what `find_outlets` returned; None: found here.

    Raises:
        HeadLayoutError: no layer ran, or, where `strict`, one keeps its attention weights out of sight.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> seen = capture(attention, (torch.ones(3, 5, 8),) * 3).layers[0]
        >>> seen.outputs[0].shape, seen.weights[0].shape
        (torch.Size([3, 5, 2, 4]), torch.Size([3, 2, 5, 5]))
    """
    outlets = find_outlets(model) if outlets is None else outlets
    left: dict[str, list[Tensor]] = {outlet.name: [] for outlet in outlets}
    looked: dict[str, list[Tensor]] = {outlet.name: [] for outlet in outlets}

    def keep(outlet: Outlet, heads: Tensor) -> None:
        left[outlet.name].append(heads.detach().clone())

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if weights:
            stack.enter_context(watched(outlets, lambda outlet, seen: looked[outlet.name].append(seen.detach())))
        stack.enter_context(rerouted(outlets, keep))
        result = call(model, inputs)
    refuse_silence(outlets, {name for name, heads in left.items() if heads})
    ran = [outlet for outlet in outlets if left[outlet.name]]
    unseen = [outlet for outlet in ran if weights and len(looked[outlet.name]) != len(left[outlet.name])]
    hidden = tuple(_remedy(outlet) for outlet in unseen)
    if hidden and strict:
        raise HeadLayoutError(f"{hidden[0]}, or use capture(..., weights=False)")
    looked |= {outlet.name: [] for outlet in unseen}
    layers = [Captured(outlet, tuple(left[outlet.name]), tuple(looked[outlet.name])) for outlet in ran]
    return Capture(layers, result, tuple(outlet.name for outlet in outlets if not left[outlet.name]), hidden)


def _remedy(outlet: Outlet) -> str:
    told = f"{outlet.name or 'the model'} ({type(outlet.attention).__name__}): attention weights"
    if outlet.kind == "graph":
        return f"{told} are read from edges [2, E], for heads x nodes x nodes up to {MOST:,}; give it such a graph"
    return (
        f'{told} stay out of sight; if a kernel keeps them, load the model with attn_implementation="eager" (or call '
        'model.set_attn_implementation("eager"))'
    )


def refuse_silence(outlets: Sequence[Outlet], heard: set[str]) -> None:
    """Raise if no hook fired: then nothing was seen or changed, and every number would be wrong without a word.

    Raises:
        HeadLayoutError: with the first outlet that was to be heard.
    """
    if not heard & {outlet.name for outlet in outlets}:
        first = outlets[0].projection or outlets[0].name
        raise HeadLayoutError(
            f"nothing left any head: the model never called {first}. Check that the inputs run through attention, and "
            "name the right projections: find_outlets(model, out={...})"
        )
