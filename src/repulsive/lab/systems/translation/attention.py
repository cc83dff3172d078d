"""Attention of the Transformer: from padded or packed tokens, or from one more token of each hypothesis."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.lab.layers.packed import Packed, attend, attend_to, call_padded


class Mask(NamedTuple):
    """Keys that each query may attend to.

    Args:
        attention_mask: False at padding, bool [B, 1, 1, S]; None: no padding. Of packed sentences, for hooks: the mask
            of the keys if they were padded to `Packed.longest`.
        causal: a query attends to keys up to its own position.
        packed: for packed sentences, the positions of the query sentences and of the key sentences.
        seeds: random seeds of a layer's dropout, int64 [blocks], if Triton kernels draw the dropout masks.
    """

    attention_mask: Tensor | None = None
    causal: bool = False
    packed: tuple[Packed, Packed] | None = None
    seeds: Tensor | None = None


class Attention(nn.Module):
    """Multi-head scaled dot-product attention, of padded or packed sentences.

    Args:
        width: size of a token's state.
        heads: number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))  # as if q, k and v were one matrix
            nn.init.zeros_(projection.bias)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, memory: Tensor, mask: Mask, seen: list[Tensor] | None, what: str | None) -> Tensor:
        if mask.packed is not None:
            return self._packed(x, memory, mask, seen, what)
        q, k, v = self._split(self.q_proj(x)), self._split(self.k_proj(memory)), self._split(self.v_proj(memory))
        if what == "weights":
            weights = self._weights(q, k, mask)  # [B, M, T, S]
            heads = weights @ v  # [B, M, T, d]
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.attention_mask, is_causal=mask.causal)
        if seen is not None:
            seen.append(weights if what == "weights" else v if what == "values" else heads)
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, width]

    def _packed(self, x: Tensor, memory: Tensor, mask: Mask, seen: list[Tensor] | None, what: str | None) -> Tensor:
        """Attend from packed [N, width] to [N', width]; collected tensors hold all sentences as one, [1, M, N, d]."""
        assert mask.packed is not None
        queries, keys = mask.packed
        if x is memory:
            qkv = self._joint(x, queries, self.q_proj, self.k_proj, self.v_proj)  # [N, 3, M, d]
            v, heads = qkv[:, 2], attend(qkv, queries, mask.causal)  # [N, M, d]
        else:
            q, kv = self._joint(x, queries, self.q_proj)[:, 0], self._joint(memory, keys, self.k_proj, self.v_proj)
            v, heads = kv[:, 1], attend_to(q, kv, queries, keys)
        if seen is not None:
            seen.append((v if what == "values" else heads).transpose(0, 1).unsqueeze(0))
        return self.out_proj(heads.flatten(1))

    def _joint(self, x: Tensor, side: Packed, *projections: nn.Linear) -> Tensor:
        """Apply several projections as one matrix product, [N, width] -> [N, projections, M, d].

        Projections with hooks are called as modules, so that the hooks run: q on all rows, k and v on padded sentences,
        because a hook may treat the keys of each sentence apart.
        """
        if any(projection._forward_hooks for projection in projections):
            rows = [p(x) if p is self.q_proj else call_padded(p, x, side) for p in projections]
            return torch.stack(rows, dim=1).unflatten(-1, (self.num_heads, -1))
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections])
        return F.linear(x, weight, bias).unflatten(-1, (len(projections), self.num_heads, -1))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project [B, S, width] to keys and values, each [B, M, S, d], for `step`."""
        return self._split(self.k_proj(memory)), self._split(self.v_proj(memory))

    def step(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend from one more token of K hypotheses, [B, K, width], to keys and values that they share, [B, M, S, d].

        The additive mask, [B, 1, 1 or K, S], hides the keys of other hypotheses.
        """
        heads = F.scaled_dot_product_attention(self._split(self.q_proj(x)), k, v, attn_mask=mask)  # [B, M, K, d]
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, M, T, d]

    def _weights(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, M, T, S]
        if mask.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if mask.attention_mask is not None:
            scores = scores.masked_fill(~mask.attention_mask, -math.inf)
        return scores.softmax(-1)
