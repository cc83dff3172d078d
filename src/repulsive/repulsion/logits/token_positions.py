"""Choose the tokens of a batch to sample: evenly spaced over sequences and non-padding tokens, at random offsets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.particles import noise as counters

LEAST = 32  # smallest number of tokens from a sequence (if it has that many), to estimate its mean key


@dataclass(frozen=True)
class Positions:
    """Positions of the sampled tokens in a batch [B, T].

    Args:
        index: index into the flattened batch, int64 [N].
        weights: 1 for a real token, 0 for padding, [N].
        sequences: index of the sampled sequence that each token belongs to, int64 [N].
        count: number of sampled sequences.
        is_full: whether all weights are 1 and all sequences have equally many tokens, one sequence after the other.
    """

    index: Tensor
    weights: Tensor
    sequences: Tensor
    count: int
    is_full: bool = False


def choose(
    shape: tuple[int, int], tokens: int, valid: Tensor | None, device: torch.device, *, seed: int, step: int | None
) -> Positions:
    """Choose about `tokens` positions of a batch; the same seed and step give the same positions.

    Args:
        shape: (B, T), the number of sequences and of tokens per sequence.
        tokens: number of tokens to sample; a smaller batch is sampled completely.
        valid: bool [B, T], False for padding; None if there is no padding.
        device: device of the result.
        seed: seed of the random offsets.
        step: optimizer step that the sample is for; None for the same positions in every step, chosen without a copy
            from the host, which a CUDA graph could not capture.
    """
    batch, length = shape
    rows = max(1, min(batch, tokens // min(length, LEAST)))
    count = max(1, min(length, tokens // rows))
    if step is None:
        chosen = (torch.arange(rows, device=device) + 0.5) * (batch / rows)
        offsets = (torch.arange(count, device=device) + 0.5).expand(rows, count)
    else:
        generator = torch.Generator().manual_seed(counters.key(seed, step, "tokens") % 2**62)
        shift = torch.rand(rows, generator=generator, dtype=torch.float32, device="cpu")
        chosen = (torch.arange(rows, device="cpu") + shift) * (batch / rows)
        shifts = torch.rand(rows, count, generator=generator, dtype=torch.float32, device="cpu")
        offsets = torch.arange(count, device="cpu") + shifts  # [S, n], in units of length / n
    chosen = chosen.long().clamp(max=batch - 1)
    sequences = torch.arange(rows, device=device).repeat_interleave(count)
    if valid is None:
        positions = (offsets * (length / count)).long().clamp(max=length - 1)
        index = (chosen[:, None] * length + positions).flatten()
        # A blocking copy would wait for all work of the GPU. From memory that is not pinned, this one is safe, too.
        return Positions(
            index.to(device, non_blocking=True),
            torch.ones(rows * count, dtype=torch.float32, device=device),
            sequences,
            rows,
            True,
        )
    chosen, offsets = chosen.to(device, non_blocking=True), offsets.to(device, non_blocking=True)
    real = valid[chosen]  # [S, T]
    lengths = real.sum(1, keepdim=True)
    order = real.to(torch.int8).argsort(dim=1, descending=True, stable=True)  # real tokens first
    spread = (offsets * (lengths / count)).long()
    ranks = torch.where(lengths >= count, spread, torch.arange(count, device=device))
    weights = (ranks < lengths).float()
    positions = order.gather(1, ranks.clamp(max=length - 1))
    index = (chosen[:, None] * length + positions).flatten()
    return Positions(index, weights.flatten(), sequences, rows)
