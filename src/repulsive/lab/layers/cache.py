"""What decoding word by word need not compute again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_ALIGNED = 16  # numbers: where rows of a mask begin, or attention on a GPU copies it first
_TOKENS = 16  # there is room for so many at first
_HIDDEN = -1e30  # leaves exactly nothing in a softmax; infinities would do so too, but not in every kernel


class Cache:
    """Keys and values of K hypotheses for each of B sentences.

    Those of all hypotheses of a sentence, given up or not, lie side by side, and a mask says on which of them each one
    stands. So to choose hypotheses is to choose rows of the mask: no keys and values move.

    Args:
        real: which source tokens are no padding, bool [B, 1, 1, S].
        memory: keys and values of the source for each decoder layer, [B, M, S, d]; hypotheses share them.
    """

    def __init__(self, real: Tensor, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.length = 0  # tokens so far
        self.memory = torch.stack([x for pair in memory for x in pair]).unflatten(0, (-1, 2))  # [L, 2, B, M, S, d]
        self._past = self.memory[..., :0, :]  # [L, 2, B, M, room, d]
        self._source = self._hiding(real)  # [B, 1, 1, S, rounded up]
        self._own = self._source[..., :0]  # [B, 1, K, room]
        self._new = self._own  # [K, K]
        self._used = 0

    @property
    def source(self) -> Tensor:
        """What to add to scores of source tokens: 0, or what hides padding, [B, 1, 1, S]."""
        return self._source[..., : self.memory.shape[-2]]

    @property
    def own(self) -> Tensor:
        """What to add to scores of tokens so far: 0 for those a hypothesis stands on, [B, 1, K, N]."""
        return self._own[..., : self._used]

    def grow(self, hypotheses: int) -> None:
        """Make room for one more token of so many hypotheses of each sentence; each of them sees its own alone."""
        if self.length == 0:
            self._new = self._hiding(torch.eye(hypotheses, dtype=torch.bool, device=self.memory.device))[:, :hypotheses]
            self._own = self._own.new_zeros(len(self._own), 1, hypotheses, 0)
        start, self._used, self.length = self._used, self._used + hypotheses, self.length + 1
        room = self._past.shape[-2]
        if self._used > room:
            more = -(-max(self._used, 2 * room, _TOKENS * hypotheses) // _ALIGNED) * _ALIGNED - room
            self._past = F.pad(self._past, (0, 0, 0, more))
            self._own = F.pad(self._own, (0, more))
        self._own[..., start : self._used] = self._new

    def add(self, layer: int, k: Tensor, v: Tensor) -> Tensor:
        """Fill the room in a layer, [B, M, K, d] each; all its keys and values so far, [2, B, M, N, d]."""
        start = self._used - k.shape[-2]
        for kind, new in enumerate((k, v)):
            self._past[layer, kind, ..., start : self._used, :] = new
        return self._past[layer, ..., : self._used, :]

    def keep(self, hypotheses: Tensor, sentences: Tensor | None = None) -> None:
        """Go on with some of the hypotheses.

        Args:
            hypotheses: which of each sentence's, and in which order, int64 [B, K]; one may be there twice.
            sentences: then, which of the sentences, int64; None: all of them.
        """
        self._own = self._own.gather(2, hypotheses[:, None, :, None].expand(-1, -1, -1, self._own.shape[3]))
        if sentences is not None:
            self._own, self._source = self._own[sentences], self._source[sentences]
            self.memory, self._past = self.memory[:, :, sentences], self._past[:, :, sentences]

    def _hiding(self, seen: Tensor) -> Tensor:
        """0 where something may be seen; rows are filled up to where the next may begin."""
        hidden, dtype = F.pad(~seen, (0, -seen.shape[-1] % _ALIGNED)), self.memory.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, max(_HIDDEN, torch.finfo(dtype).min)
        )
