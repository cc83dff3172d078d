"""What ELECTRA and BERT are shown of blocks, and what their answers cost."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from repulsive.lab.systems.electra.blocks import unpack
from repulsive.lab.systems.electra.masking import mask


def drawn(
    rows: Tensor,
    length: int,
    padded: bool,
    marks: dict[str, int],
    share: float,
    kept: float,
    draw: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
    """What a model is shown of rows of a part; of what is to be guessed the fields."""
    tokens, first, ends = unpack(rows, length)
    along = torch.arange(length, device=rows.device)
    types = ((along >= first.unsqueeze(1)) & (along < ends.unsqueeze(1))).long()  # [B, T]
    seen = (along < ends.unsqueeze(1))[:, None, None] if padded else None  # [B, 1, 1, T]
    masked = mask(tokens, ends, marks, share, kept, draw)
    return tokens, types, seen, (masked.tokens, masked.places, masked.counts, masked.first, masked.answers)


def total(
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
    """The loss of a batch: sums / numbers of places and of pieces."""
    guessed, detected = losses(logits, corrupted, replaced, tokens, answers)
    wrong = (guessed * counts).sum() / places
    if detected is None:
        return wrong
    real = detected if seen is None else detected * seen.flatten(1)  # [B, T]
    return wrong + weight * real.sum() / pieces


def losses(
    logits: Tensor, corrupted: Tensor | None, replaced: Tensor | None, tokens: Tensor, answers: Tensor
) -> tuple[Tensor, Tensor | None]:
    """NLL of what is to be guessed [B, N], and of which tokens were replaced [B, T], in float32."""
    guessed = F.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)
    if corrupted is None or replaced is None:
        return guessed, None
    changed = (corrupted != tokens).float()  # a sample that is right by chance is no replacement
    return guessed, F.binary_cross_entropy_with_logits(replaced.float(), changed, reduction="none")


def means_of(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums over everything / what was counted."""
    found = {}
    for who in ("", "generator_"):
        if f"{who}count" in totals:
            count = totals[f"{who}count"].sum()
            found[f"{who}nll"] = float(totals[f"{who}nll"].sum() / count)
            found[f"{who}accuracy"] = float(totals[f"{who}correct"].sum() / count)
    return found
