"""Activation patching: replace outputs of heads by those on other inputs, or by their mean over other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import token_masks, with_hooks
from repulsive.diagnostics.hooks.capture import Captured, capture, check_hooks_ran
from repulsive.diagnostics.redundancy import head_masks
from repulsive.errors import SelectionError


@contextmanager
def patched_outputs(
    model: nn.Module,
    layers: Sequence[AttentionLayer],
    heads: Sequence[tuple[int, int]],
    mode: Literal["mean", "patch"],
    source: object,
) -> Iterator[None]:
    """Replace the outputs of heads in forward passes inside this context.

    Args:
        model: the model.
        layers: its attention layers.
        heads: (layer, head) pairs; an empty list changes nothing.
        mode: "mean": the head's mean output over the tokens of `source`; "patch": its outputs on `source`, token by
            token.
        source: inputs that the new outputs are taken from.

    Raises:
        SelectionError: there is no such head, the source does not reach its layer, or the patched inputs have another
            shape.
    """
    if not heads:
        yield
        return
    masks = head_masks(layers, heads)
    captured = {each.name: each for each in capture(model, source, weights=False, layers=layers).layers}
    if missing := [name for name in masks if name not in captured]:
        raise SelectionError(f"{missing[0]}: the source inputs do not reach this layer")
    chosen = {name: captured[name] for name in masks}
    # The new outputs of each layer, one for each time that the layer runs.
    values = _outputs(chosen) if mode == "patch" else _mean_outputs(model, chosen, source)
    runs = dict.fromkeys(masks, 0)

    def replace(layer: AttentionLayer, outputs: Tensor) -> Tensor:
        new = values[layer.name][runs[layer.name] % len(values[layer.name])]
        runs[layer.name] += 1
        if mode == "patch" and new.shape != outputs.shape:
            sizes = f"head outputs are {list(new.shape)} on the source and {list(outputs.shape)} on these inputs"
            raise SelectionError(f"{layer.name}: {sizes}; patch with inputs of the same shape")
        mask = masks[layer.name].to(outputs.device).unsqueeze(-1)  # [M, 1]
        return torch.where(mask, new.to(outputs), outputs)

    hooked = [layer for layer in layers if layer.name in masks]
    with with_hooks(model), replaced_head_outputs(hooked, replace):
        yield
    check_hooks_ran(hooked, {name for name, count in runs.items() if count})


def _outputs(captured: Mapping[str, Captured]) -> dict[str, list[Tensor]]:
    return {name: list(each.outputs) for name, each in captured.items()}  # [B, T, M, d] each


def _mean_outputs(model: nn.Module, captured: Mapping[str, Captured], source: object) -> dict[str, list[Tensor]]:
    """Average the outputs of each run of each layer over tokens that are not padding, [M, d] each."""
    real_queries, _ = token_masks(model)
    means: dict[str, list[Tensor]] = {}
    for name, each in captured.items():
        real = real_queries(source, each.layer.where)
        for run, outputs in enumerate(each.outputs):
            mask = each.own_mask(real, run)
            tokens = outputs.flatten(0, 1) if mask is None else outputs[mask.to(outputs.device)]  # [N, M, d]
            means.setdefault(name, []).append(tokens.mean(0))
    return means
