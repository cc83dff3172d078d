"""Capture the output and the attention weights of every head in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention import recorded_attention
from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.diagnostics.hooks.measured_layers import find_measured_layers
from repulsive.diagnostics.hooks.returned_weights import MAX_GRAPH_WEIGHTS
from repulsive.diagnostics.similarity import Diversity, merged, of_attention, of_outputs
from repulsive.errors import HeadLayoutError

_ATTENDS = 1e-6  # smaller weights count as masked


@dataclass(frozen=True, eq=False)
class Captured:
    """Head outputs and attention weights of one layer, with one entry for each time that the layer ran.

    Args:
        layer: the attention layer.
        outputs: output of each head, [B, T, M, d]: the input of the output projection.
        weights: attention weights [B, M, T, S]; empty if they were not captured.
        masks: tokens that are not padding, bool [B, T], from the masks that the layer was called with; None if unknown.
    """

    layer: AttentionLayer
    outputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    masks: tuple[Tensor | None, ...] = ()

    @property
    def name(self) -> str:
        """Dotted name of the attention module."""
        return self.layer.name

    def diversity(self, space: str, real: Tensor | None = None) -> Diversity:
        """Measure the similarity of the layer's heads, averaged over all runs of the layer.

        Args:
            space: "outputs" or "attention".
            real: which tokens (queries) count, bool [B, T]; ignored if the mask is for other tokens (see `own_mask`).
        """
        if space not in ("outputs", "attention"):
            raise ValueError(f"space={space!r}: choose 'outputs' or 'attention'")
        outputs = space == "outputs"
        tensors = [x.transpose(1, 2) for x in self.outputs] if outputs else self.weights  # [B, M, T, .]
        measured = []
        for run, x in enumerate(tensors):
            measured.append((of_outputs if outputs else of_attention)(x, self.own_mask(real, run), self.name))
        if not measured:
            raise ValueError(f"{self.name}: no {space} were captured; call capture(..., weights=True)")
        return merged([(each, 1.0) for each in measured])

    def own_mask(self, real: Tensor | None, run: int = 0) -> Tensor | None:
        """Return the mask if it masks this layer's tokens; a text mask does not apply to an image.

        The mask must have as many tokens as the layer; otherwise that of the layer's own call is used. In
        self-attention, no real token may attend to a masked token. None if there is no such mask.

        Args:
            real: which tokens count, bool [B, T].
            run: index of the layer's run.
        """
        if real is None or real.shape != self.outputs[run].shape[:2]:
            real = self.masks[run] if self.masks else None
        if real is None:
            return None
        weights = self.weights[run] if self.weights and self.layer.where != "cross" else None  # [B, M, T, S]
        if weights is not None and weights.shape[-1] == weights.shape[-2]:
            mask = real.to(weights.device)
            masked = mask[:, None, :, None] & ~mask[:, None, None, :]  # [B, 1, T, S]
            if float(weights.masked_fill(~masked, 0).amax()) > _ATTENDS:
                return None
        return real


@dataclass(frozen=True, eq=False)
class Capture:
    """Everything that `capture` recorded in one forward pass.

    Args:
        layers: one entry per attention layer that ran, in model order.
        result: what the model returned.
        idle: names of the attention layers that did not run.
        hidden: for each layer whose attention weights could not be captured, a message with a remedy.
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
    layers: Sequence[AttentionLayer] | None = None,
) -> Capture:
    """Run a model once in evaluation mode and capture the output and the attention weights of every head.

    Args:
        model: any module with heads that `find_heads` finds. Its weights, flags and results do not change.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.
        weights: also capture attention weights.
        strict: raise an error if the weights of a layer cannot be captured; False lists the layer in `hidden`.
        layers: the result of `find_attention_layers`; None finds them, and proves guessed heads on the inputs.

    Raises:
        HeadLayoutError: no layer ran; or, if `strict`, the attention weights of a layer cannot be captured.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> captured = capture(attention, (torch.ones(3, 5, 8),) * 3).layers[0]
        >>> captured.outputs[0].shape, captured.weights[0].shape
        (torch.Size([3, 5, 2, 4]), torch.Size([3, 2, 5, 5]))
    """
    layers = find_measured_layers(model, inputs) if layers is None else layers
    outputs: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
    masks: dict[str, list[Tensor | None]] = {layer.name: [] for layer in layers}
    of_layers = LayerMasks()
    attention: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def keep_outputs(layer: AttentionLayer, heads: Tensor) -> None:
        outputs[layer.name].append(heads.detach().clone())
        masks[layer.name].append(of_layers.queries(layer, heads.shape))

    def keep_attention(layer: AttentionLayer, weights: Tensor) -> None:
        attention[layer.name].append(weights.detach())

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if weights:
            stack.enter_context(recorded_attention(layers, keep_attention))
        stack.enter_context(of_layers.recorded(layers))
        stack.enter_context(replaced_head_outputs(layers, keep_outputs))
        result = call(model, inputs)
    check_hooks_ran(layers, {name for name, heads in outputs.items() if heads})
    ran = [layer for layer in layers if outputs[layer.name]]
    incomplete = [layer for layer in ran if weights and len(attention[layer.name]) != len(outputs[layer.name])]
    hidden = tuple(_remedy(layer) for layer in incomplete)
    if hidden and strict:
        raise HeadLayoutError(f"{hidden[0]}, or use capture(..., weights=False)")
    attention |= {layer.name: [] for layer in incomplete}
    captured = [
        Captured(layer, tuple(outputs[layer.name]), tuple(attention[layer.name]), tuple(masks[layer.name]))
        for layer in ran
    ]
    return Capture(captured, result, tuple(layer.name for layer in layers if not outputs[layer.name]), hidden)


def _remedy(layer: AttentionLayer) -> str:
    problem = f"{layer.name or 'the model'} ({type(layer.attention).__name__}): cannot capture attention weights"
    if layer.kind == "graph":
        limit = f"{MAX_GRAPH_WEIGHTS:,} weights (heads x nodes x nodes)"
        return f"{problem}; use a graph with edges [2, E] and at most {limit}"
    if "BlockSparse" in type(layer.attention).__name__:
        return f'{problem} of blocks; load the model with attention_type="original_full"'
    return (
        f'{problem}; if a fused kernel computes them, load the model with attn_implementation="eager" (or call '
        'model.set_attn_implementation("eager"))'
    )


def check_hooks_ran(layers: Sequence[AttentionLayer], ran: set[str]) -> None:
    """Raise an error if no hook ran: nothing was recorded or changed, and results would be silently wrong.

    Args:
        layers: the layers that were hooked.
        ran: names of the layers whose hooks ran.

    Raises:
        HeadLayoutError: no hook ran; the message names the first hooked module.
    """
    if not ran & {layer.name for layer in layers}:
        first = layers[0].projection or layers[0].name
        raise HeadLayoutError(
            f"no head output was recorded: the model never called {first}. Check that the inputs pass through "
            "attention, and name the right projections: out={layer: projection}"
        )
