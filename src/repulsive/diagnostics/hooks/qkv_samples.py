"""Queries, keys and values of attention layers for sampled tokens: the result of `sample_qkv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from repulsive.diagnostics.hooks.qkv_layers import QKVLayer


@dataclass(eq=False)
class QKVSamples:
    """Queries, keys and values of one attention layer for sampled tokens.

    Args:
        layer: the attention layer.
        samples: part (q, k or v) -> blocks [N, M, d], one per pass; keys are centred per sequence, padding is left out.
        sequences: part -> blocks [N], the number of the sequence that each sampled token belongs to.
        problem: why the layer could not be recorded; "" if it was.
        has_windows: the layer attends within windows of an item, as in Swin, whose order differs between layers.
    """

    layer: QKVLayer
    samples: dict[str, list[Tensor]] = field(default_factory=dict)
    sequences: dict[str, list[Tensor]] = field(default_factory=dict)
    problem: str = ""
    has_windows: bool = False

    def part(self, name: str) -> Tensor:
        """Concatenate all sampled tokens of one part (q, k or v), [N, M, d]."""
        return torch.cat(self.samples[name])

    def sequences_of(self, name: str) -> Tensor:
        """Concatenate the sequence numbers of all sampled tokens of one part, [N]."""
        return torch.cat(self.sequences[name])

    def all_sequences(self) -> list[Tensor]:
        """List the sequence numbers of all blocks that have tokens."""
        return [block for blocks in self.sequences.values() for block in blocks if len(block)]

    def count(self, name: str) -> int:
        """Count the sampled tokens N of one part (q, k or v)."""
        return sum(len(block) for block in self.samples.get(name, ()))


def check_recorded(results: Sequence[QKVSamples]) -> None:
    """Set the problem of every layer without any recorded token."""
    for each in results:
        missing = [part for part in each.layer.parts if not each.problem and not each.count(part)]
        if missing:
            each.problem = f"the model never called its {missing[0]} projection as a module, or only on padding"
