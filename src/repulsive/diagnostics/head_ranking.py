"""Rank the heads of each layer for pruning: by gradient score, and by exact ablation next to the cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import label_free_loss
from repulsive.diagnostics.redundancy import Head
from repulsive.terminal.progress import Progress as Bar
from repulsive.terminal.progress import no_progress

BORDER = 2  # heads on each side of the cut that are ranked by exact ablation


def rank_heads(
    heads: Heads,
    batches: Sequence[dict[str, Any]],
    keep: float,
    seed: int = 0,
    border: int = BORDER,
    bar: Bar = no_progress,
) -> Tensor:
    """Rank the heads of each layer: by gradient score, and by exact ablation on both sides of the cut.

    Exact ablation runs the model up to 2 x border x layers times from the ablated layer on, gradient scores once.

    Returns:
        [layers, heads]: 0 for the least important head of a layer, 1 for the next, and so on.
    """
    loss = label_free_loss(torch.Generator().manual_seed(seed), heads.layers)
    scores = first_order_importance(heads.model, loss, batches, normalise=False, layers=heads.layers)

    def ablate_exactly(at_cut: Sequence[Head]) -> dict[Head, float]:
        ablation = ablate_output(
            heads.model,
            batches,
            at_cut,
            layers=heads.layers,
            progress=lambda done, total: bar("ablating heads", done, total),
        )
        return dict(zip(at_cut, ablation.items.mean(1).tolist(), strict=True))

    return merge_ranks(scores, [layer.num_heads for layer in heads.layers], keep, border, ablate_exactly)


def merge_ranks(
    scores: Tensor,
    num_heads: Sequence[int],
    keep: float,
    border: int,
    ablate_exactly: Callable[[Sequence[Head]], Mapping[Head, float]],
) -> Tensor:
    """Rank the heads of each layer by score, and those next to the cut by the change that their ablation causes.

    Args:
        scores: gradient scores [layers, heads].
        num_heads: number of heads of each layer.
        keep: share of the heads that stay; it sets the cut.
        border: heads on each side of the cut to order by exact ablation.
        ablate_exactly: returns the change of the output for each of the (layer, head) pairs it is given.

    Returns:
        [layers, heads]: 0 for the least important head of a layer, 1 for the next, and so on.
    """
    orders, borders = [], []
    for row, number in enumerate(num_heads):
        orders.append(sorted(range(number), key=lambda head: float(scores[row, head])))
        cut = number - round(keep * number)
        borders.append(slice(max(0, cut - border), min(number, cut + border)))
    at_cut = [(row, head) for row, order in enumerate(orders) for head in order[borders[row]]]
    exact = ablate_exactly(at_cut) if at_cut else {}
    ranks = torch.zeros_like(scores)
    for row, order in enumerate(orders):
        order[borders[row]] = sorted(order[borders[row]], key=lambda head: exact[row, head])
        for rank, head in enumerate(order):
            ranks[row, head] = rank
    return ranks
