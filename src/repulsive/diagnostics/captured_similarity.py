"""Similarity of heads in attention weights and in outputs, with intervals over sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.cka import cka_of_grams, token_grams
from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, output_weight
from repulsive.diagnostics.hooks.calling import items_in, real_queries
from repulsive.diagnostics.hooks.capture import Captured, capture
from repulsive.diagnostics.sequence_jackknife import count_groups
from repulsive.diagnostics.similarity import of_attention, of_outputs
from repulsive.particles.gram import wide_dtype

CapturedSpace = Literal["attention", "outputs", "cka"]


def captured_similarity(
    model: nn.Module, batches: Sequence[Any], layers: Sequence[AttentionLayer], space: CapturedSpace
) -> list[Similarity]:
    """Measure the similarity of heads on batches, averaged over tokens, for each layer that ran.

    Args:
        model: any module with heads; it does not change.
        batches: inputs of the model, each a tensor, a tuple of arguments or a mapping.
        layers: the result of `find_attention_layers`.
        space: "attention" (attention weights minus uniform attention), "outputs" (contributions after the output
            projection) or "cka" (linear CKA of these contributions, computed for each batch).
    """
    count = count_groups(sum(items_in(batch) for batch in batches))
    sums: dict[str, _Sums] = {}
    first = 0  # number of the batch's first sequence
    for batch in batches:
        items = items_in(batch)
        for each in capture(model, batch, weights=True, strict=space == "attention", layers=layers).layers:
            own = sums.setdefault(each.name, _Sums(each.layer.num_heads, count))
            mask = real_queries(batch, each.layer.where)
            values = list(each.weights) if space == "attention" else [x.transpose(1, 2) for x in contributions(each)]
            for run, x in enumerate(values):  # [B, M, T, S] or [B, M, T, d_model]
                real = each.own_mask(mask, run)
                if space == "attention":
                    x, real = centre_attention(x, real)
                windows = len(x) // items if len(x) > items and len(x) % items == 0 else 1  # of one item, as in Swin
                groups = (first + torch.arange(len(x)) // windows) % count  # [B]
                own.add(x, real, space, groups)
        first += items
    return [own.similarity(name, space) for name, own in sums.items()]


@torch.no_grad()
def centre_attention(weights: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Subtract uniform attention over the keys that a query can attend to.

    All attention weights are positive, so heads that attend nearly uniformly have cosines near 1 although they may
    have nothing else in common. Without the uniform part their cosine can be anything from -1 to 1.

    Args:
        weights: attention weights [B, M, T, S].
        real: which queries count, bool [B, T]; None: all.

    Returns:
        Centred weights [B, M, T, S], 0 for keys that no head attends to; and the queries that have at least two keys.
    """
    allowed = (weights > 0).any(1, keepdim=True)  # [B, 1, T, S]
    count = allowed.sum(-1, keepdim=True)  # [B, 1, T, 1]
    has_choice = count[:, 0, :, 0] > 1  # [B, T]
    real = has_choice if real is None else has_choice & real.to(has_choice.device)
    wide = weights.to(wide_dtype(weights.device))
    return torch.where(allowed, wide - wide.sum(-1, keepdim=True) / count.clamp(min=1), 0), real


@torch.no_grad()
def contributions(captured: Captured) -> list[Tensor]:
    """Compute head outputs after the output projection, [B, T, M, d_model] for each run."""
    if captured.layer.kind in ("result", "graph"):
        return list(captured.outputs)
    weight = output_weight(captured.layer)  # [d_model, M d]
    blocks = weight.unflatten(-1, (captured.layer.num_heads, -1))  # [d_model, M, d]
    return [torch.einsum("btmd,omd->btmo", x, blocks.to(x)) for x in captured.outputs]


class _Sums:
    """Similarity matrices times tokens: of all sequences, and of all but those of each of K groups."""

    def __init__(self, heads: int, groups: int) -> None:
        self.matrix = torch.zeros(heads, heads, dtype=torch.float64)
        self.left_out = torch.zeros(groups, heads, heads, dtype=torch.float64)
        self.tokens = 0
        self.tokens_left = torch.zeros(groups, dtype=torch.float64)

    def add(self, x: Tensor, mask: Tensor | None, space: CapturedSpace, groups: Tensor) -> None:
        """Add the heads of one run of a layer, [B, M, T, ...]; `groups` [B] is the group of each sequence."""
        if space == "cka":
            self._add_cka(x, mask, groups)
            return
        compare = of_attention if space == "attention" else of_outputs
        for item, group in enumerate(groups.tolist()):
            real = None if mask is None else mask[item : item + 1]
            tokens = x.shape[2] if real is None else int(real.sum())
            if tokens:
                cosine = compare(x[item : item + 1], real).cosine.cpu().double() * tokens
                others = torch.arange(len(self.left_out)) != group
                self.matrix += cosine
                self.left_out[others] += cosine
                self.tokens += tokens
                self.tokens_left[others] += tokens

    def _add_cka(self, x: Tensor, mask: Tensor | None, groups: Tensor) -> None:
        """Add the CKA of all sequences of a batch, which is not a mean over sequences."""
        grams, items = token_grams(x, mask)
        tokens = x.shape[0] * x.shape[2] if mask is None else int(mask.sum())
        self.matrix += cka_of_grams(grams).cpu().double() * tokens
        self.tokens += tokens
        for group in range(len(self.left_out)):
            kept = (groups.to(items.device)[items] != group).nonzero()[:, 0]
            if len(kept):
                weight = tokens * len(kept) / len(items)
                self.left_out[group] += cka_of_grams(grams[:, kept][:, :, kept]).cpu().double() * weight
                self.tokens_left[group] += weight

    def similarity(self, name: str, space: str) -> Similarity:
        left_out = self.left_out / self.tokens_left[:, None, None] if len(self.left_out) > 1 else self.left_out[:0]
        return Similarity(name, space, self.matrix / self.tokens, self.tokens, left_out)
