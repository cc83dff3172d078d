"""Cache of keys and values for decoding one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNED = 16  # rows of a mask start at multiples of this, or attention on a GPU copies the mask first
_TOKENS = 16  # initial capacity, in tokens
_HIDDEN = -1e30  # exactly zero after a softmax; not every attention kernel accepts infinity


class Cache:
    """Keys and values of K hypotheses for each of B sentences.

    The keys and values of all hypotheses of a sentence, also of dropped ones, are stored side by side. A mask says
    which of them belong to a hypothesis. Selecting hypotheses selects rows of the mask, without copying keys or values.

    Args:
        real: padding mask of the source, False at padding, bool [B, 1, 1, S].
        memory: keys and values of the source for each decoder layer, [B, M, S, d], shared by the hypotheses.
    """

    def __init__(self, real: Tensor, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.length = 0  # number of tokens stored so far
        self.memory = torch.stack([x for pair in memory for x in pair]).unflatten(0, (-1, 2))  # [L, 2, B, M, S, d]
        self._past = self.memory[..., :0, :]  # [L, 2, B, M, room, d]
        self._source = self._additive(real)  # [B, 1, 1, S, rounded up]
        self._own = self._source[..., :0]  # [B, 1, K, room]
        self._new = self._own  # [K, K]
        self._used = 0

    @property
    def source(self) -> Tensor:
        """Additive mask over source tokens: 0, or `_HIDDEN` at padding, [B, 1, 1, S]."""
        return self._source[..., : self.memory.shape[-2]]

    @property
    def own(self) -> Tensor:
        """Additive mask over target tokens: 0 at the tokens of a hypothesis, [B, 1, K, N]."""
        return self._own[..., : self._used]

    def grow(self, hypotheses: int) -> None:
        """Make room for one more token of each hypothesis, visible to that hypothesis alone."""
        if self.length == 0:
            self._new = self._additive(torch.eye(hypotheses, dtype=torch.bool, device=self.memory.device))[
                :, :hypotheses
            ]
            self._own = self._own.new_zeros(len(self._own), 1, hypotheses, 0)
        start, self._used, self.length = self._used, self._used + hypotheses, self.length + 1
        room = self._past.shape[-2]
        if self._used > room:
            more = -(-max(self._used, 2 * room, _TOKENS * hypotheses) // _ALIGNED) * _ALIGNED - room
            self._past = F.pad(self._past, (0, 0, 0, more))
            self._own = F.pad(self._own, (0, more))
        self._own[..., start : self._used] = self._new

    def add(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Store keys and values of the new tokens, [B, M, K, d] each; return all keys and values, [2, B, M, N, d]."""
        start = self._used - k.shape[-2]
        for kind, new in enumerate((k, v)):
            self._past[layer, kind, ..., start : self._used, :] = new
        return self._past[layer, ..., : self._used, :]

    def keep(self, hypotheses: Tensor, sentences: Tensor | None = None) -> None:
        """Keep some of the hypotheses and sentences.

        Args:
            hypotheses: indices of the hypotheses of each sentence, in order, int64 [B, K]; may have duplicates.
            sentences: indices of the sentences, int64; None: all.
        """
        self._own = self._own.gather(2, hypotheses[:, None, :, None].expand(-1, -1, -1, self._own.shape[3]))
        if sentences is not None:
            self._own, self._source = self._own[sentences], self._source[sentences]
            self.memory, self._past = self.memory[:, :, sentences], self._past[:, :, sentences]

    def _additive(self, visible: Tensor) -> Tensor:
        """Convert a boolean mask to an additive mask, with rows padded to a multiple of `_ALIGNED`."""
        hidden, dtype = F.pad(~visible, (0, -visible.shape[-1] % _ALIGNED)), self.memory.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, max(_HIDDEN, torch.finfo(dtype).min)
        )
