"""Exact change of a model's output when single heads are ablated, without running what comes before each head.

The plain way is `head_ablation` with `OutputChange`: one complete pass over the text per head. Here each batch is read
once, and then only the modules behind an ablated head run again (`prefix_reuse.py`). The numbers are the same; one
head is checked against a complete pass, and if it differs, all heads are ablated the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.capture import check_hooks_ran
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.diagnostics.hooks.measured_layers import find_measured_layers
from repulsive.diagnostics.output_change import Output, output_change, read_output, real_tokens
from repulsive.diagnostics.prefix_reuse import RecordedPass, record_pass, reused_prefix
from repulsive.diagnostics.redundancy import Ablation, Head, ablate, heads_of
from repulsive.errors import SelectionError

_TOLERANCE = 1e-5  # relative difference from a complete pass


@dataclass(frozen=True, eq=False)
class OutputAblation:
    """Change of a model's output when each of some heads is ablated alone.

    Args:
        heads: (layer, head) of each ablated head.
        items: change of the output of each item, float64 [heads, N].
        metric: description of the change.
        is_reused: results of earlier modules were reused; False if the model was run completely for each head.
    """

    heads: tuple[Head, ...]
    items: Tensor
    metric: str
    is_reused: bool

    def as_ablation(self, layers: Sequence[AttentionLayer]) -> Ablation:
        """Arrange the changes by layer and head, as `head_ablation` returns them; nan for heads not ablated."""
        shape = (len(layers), max(layer.num_heads for layer in layers))
        items = torch.full((*shape, self.items.shape[1]), torch.nan, dtype=torch.float64, device="cpu")  # [L, M, N]
        for (row, head), values in zip(self.heads, self.items, strict=True):
            items[row, head] = values
        return Ablation(tuple(layer.name for layer in layers), 0.0, items.mean(-1), items)


@torch.no_grad()
def ablate_output(
    model: nn.Module,
    batches: Sequence[Any],
    heads: Sequence[Head] | None = None,
    *,
    layers: Sequence[AttentionLayer] | None = None,
    reuse: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> OutputAblation:
    """Measure the change of a model's output (`output_change`) when each head is ablated in turn.

    Args:
        model: any module with heads that `find_heads` finds; it runs in evaluation mode.
        batches: inputs, each a tensor, a tuple of arguments or a mapping.
        heads: (layer, head) pairs; None: all heads.
        layers: the result of `find_attention_layers`; None finds them, and proves guessed heads on the first batch.
        reuse: reuse results of modules that run before the ablated head.
        progress: called with the number of heads done and their total.

    Raises:
        SelectionError: there are no batches or heads.
        HeadLayoutError: no layer ran.
    """
    layers = find_measured_layers(model, batches[0] if batches else None) if layers is None else layers
    heads = heads_of(layers) if heads is None else heads
    if not batches or not heads:
        raise SelectionError(f"{len(batches)} batches and {len(heads)} heads: need at least one of each")
    columns, metric = [], ""
    with evaluating(model):
        for number, batch in enumerate(batches):
            of_layers = LayerMasks()
            with of_layers.recorded(layers):
                recorded = record_pass(model, batch, layers)
            check_hooks_ran(layers, set(recorded.results))
            before = read_output(recorded.output)
            change = partial(_change, model, batch, before, real_tokens(model, batch, before, of_layers), layers)
            metric = metric or before.metric
            if reuse and not number:
                reuse = _agrees(change, recorded, layers, heads)
            changes = []
            for done, head in enumerate(heads, 1):
                changes.append(change(head, recorded if reuse else None))
                if progress is not None:
                    progress((number * len(heads) + done) // len(batches), len(heads))
            if reuse and not recorded.is_unchanged():  # the model wrote into a recorded result
                return ablate_output(model, batches, heads, layers=layers, reuse=False, progress=progress)
            columns.append(torch.stack(changes).cpu())  # [heads, items]
    return OutputAblation(tuple(heads), torch.cat(columns, 1), metric, reuse)


def _change(
    model: nn.Module,
    batch: Any,
    before: Output,
    real: Tensor | None,
    layers: Sequence[AttentionLayer],
    head: Head,
    recorded: RecordedPass | None,
) -> Tensor:
    """Compute the change of each item's output without one head, float64 [B]; 0 if its layer does not run."""
    if recorded is not None and layers[head[0]].name not in recorded.results:
        return torch.zeros(len(before.values), dtype=torch.float64, device="cpu")
    with ablate(model, [head], layers=layers):
        if recorded is None:
            after = read_output(call(model, batch))
        else:
            with reused_prefix(recorded, layers[head[0]]):
                after = read_output(call(model, batch))
    return output_change(before, after, real).cpu()


def _agrees(
    change: Callable[[Head, RecordedPass | None], Tensor],
    recorded: RecordedPass,
    layers: Sequence[AttentionLayer],
    heads: Sequence[Head],
) -> bool:
    """Compare the head with the most reused results with a complete pass."""
    ran = [head for head in heads if layers[head[0]].name in recorded.results]
    if not ran:
        return True
    deepest = max(ran, key=lambda head: list(recorded.results).index(layers[head[0]].name))
    try:
        fast = change(deepest, recorded)
    except Exception:  # third-party code may need what the skipped modules do besides returning a result
        return False
    complete = change(deepest, None)
    return recorded.is_unchanged() and torch.allclose(fast, complete, rtol=_TOLERANCE, atol=1e-12)
