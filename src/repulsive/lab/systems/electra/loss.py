"""Compute the inputs and losses of ELECTRA and of BERT's objective."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from repulsive.lab.systems.electra.blocks import unpack
from repulsive.lab.systems.electra.masking import mask


def draw_masks(
    rows: Tensor,
    length: int,
    padded: bool,
    marks: dict[str, int],
    share: float,
    kept: float,
    draw: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Draw masks for some rows of a data split; return tokens, segment ids, padding mask and the fields of `Masked`."""
    tokens, first, ends = unpack(rows, length)
    along = torch.arange(length, device=rows.device)
    types = ((along >= first.unsqueeze(1)) & (along < ends.unsqueeze(1))).long()  # [B, T]
    seen = (along < ends.unsqueeze(1))[:, None, None] if padded else None  # [B, 1, 1, T]
    masked = mask(tokens, ends, marks, share, kept, draw)
    return tokens, types, seen, (masked.tokens, masked.places, masked.counts, masked.first, masked.answers)


def total_loss(
    logits: Tensor,
    corrupted: Tensor | None,
    replaced: Tensor | None,
    tokens: Tensor,
    answers: Tensor,
    counts: Tensor,
    seen: Tensor | None,
    places: Tensor | int,
    pieces: Tensor | int,
    weight: float,
) -> Tensor:
    """Compute the loss of a batch: sums of losses divided by the numbers of masked positions and of word pieces."""
    predicted, detected = losses(logits, corrupted, replaced, tokens, answers)
    generator = (predicted * counts).sum() / places
    if detected is None:
        return generator
    real = detected if seen is None else detected * seen.flatten(1)  # [B, T]
    return generator + weight * real.sum() / pieces


def losses(
    logits: Tensor, corrupted: Tensor | None, replaced: Tensor | None, tokens: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the NLL of the masked tokens, [B, N], and of the detection of replaced tokens, [B, T], in float32."""
    predicted = F.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)
    if corrupted is None or replaced is None:
        return predicted, None
    changed = (corrupted != tokens).float()  # a sample equal to the original is not a replacement
    return predicted, F.binary_cross_entropy_with_logits(replaced.float(), changed, reduction="none")


def means_of(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute mean NLL and accuracy over all counted tokens, given their sums over blocks."""
    means = {}
    for prefix in ("", "generator_"):
        if f"{prefix}count" in totals:
            count = totals[f"{prefix}count"].sum()
            means[f"{prefix}nll"] = float(totals[f"{prefix}nll"].sum() / count)
            means[f"{prefix}accuracy"] = float(totals[f"{prefix}correct"].sum() / count)
    return means
