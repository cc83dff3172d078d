"""The Transformer (Vaswani et al., 2017) for sequence-to-sequence tasks, one file, top to bottom.

    model = Transformer(TransformerConfig.small(vocabulary=10_000))
    logits = model(source, target)                       # [B, S], [B, T] -> [B, T, V]
    logits, seen = model(source, target, collect="outputs")
    cache = model.start(source)                          # encoded once; then word by word, the same logits
    logits = model.step(tokens, cache)                   # [B, K] -> [B, K, V], K hypotheses of each sentence

`small` is the paper's IWSLT14 setting, `base` and `big` its WMT14 ones, `tiny` is for CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

COLLECT = ("outputs", "values", "weights")
LONGEST = 1024  # tokens that have a position


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a Transformer.

    Args:
        vocabulary: number of word types, shared by source, target and output.
        width: size of a token's state.
        heads: attention heads in every attention.
        layers: (encoder, decoder) layers.
        feed_forward: inner size of the feed-forward blocks.
        dropout: on embeddings and on what every block adds.
        pre_norm: normalise before a block; False is post-norm, as in the paper.
        padding: id of the padding token.
    """

    vocabulary: int
    width: int = 512
    heads: int = 4
    layers: tuple[int, int] = (6, 6)
    feed_forward: int = 1024
    dropout: float = 0.3
    pre_norm: bool = False
    padding: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.heads}")

    @classmethod
    def tiny(cls, vocabulary: int, **changes: Any) -> Self:
        config = cls(vocabulary, width=128, heads=4, layers=(2, 2), feed_forward=256, dropout=0.1)
        return replace(config, **changes)

    @classmethod
    def small(cls, vocabulary: int, **changes: Any) -> Self:
        return replace(cls(vocabulary), **changes)

    @classmethod
    def base(cls, vocabulary: int, **changes: Any) -> Self:
        return replace(cls(vocabulary, heads=8, feed_forward=2048, dropout=0.1), **changes)

    @classmethod
    def big(cls, vocabulary: int, **changes: Any) -> Self:
        return replace(cls(vocabulary, width=1024, heads=16, feed_forward=4096), **changes)


@dataclass
class Cache:
    """What decoding need not compute again: keys and values of K hypotheses for each of B sentences.

    Args:
        real: which source tokens are no padding, bool [B, 1, 1, S].
        memory: keys and values of the source for each decoder layer, [B, M, S, d]; hypotheses share them.
        past: keys and values of the tokens so far for each decoder layer, [B, K, M, T, d]; empty at first.
    """

    real: Tensor
    memory: list[tuple[Tensor, Tensor]]
    past: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.past[0][0].shape[3] if self.past else 0

    def keep(self, hypotheses: Tensor, sentences: Tensor | None = None) -> None:
        """Go on with some of the hypotheses.

        Args:
            hypotheses: which of each sentence's, and in which order, int64 [B, K]; one may be there twice.
            sentences: then, which of the sentences, int64; None: all of them.
        """
        rows = torch.arange(len(hypotheses), device=hypotheses.device).unsqueeze(1)  # [B, 1]
        if sentences is not None:
            rows, hypotheses = rows[sentences], hypotheses[sentences]
            self.real = self.real[sentences]
            self.memory = [(k[sentences], v[sentences]) for k, v in self.memory]
        self.past = [(k[rows, hypotheses], v[rows, hypotheses]) for k, v in self.past]


class Attention(nn.Module):
    """Multi-head scaled dot-product attention."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.width, config.width) for _ in range(4))
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))  # as if q, k, v were one packed matrix
            nn.init.zeros_(projection.bias)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool, seen: list[Tensor] | None, what: str | None
    ) -> Tensor:
        q, k, v = self._split(self.q_proj(x)), self._split(self.k_proj(memory)), self._split(self.v_proj(memory))
        if what == "weights":
            weights = self._weights(q, k, mask, causal)  # [B, M, T, S]
            heads = weights @ v  # [B, M, T, d]
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        if seen is not None:
            seen.append(weights if what == "weights" else v if what == "values" else heads)
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, width]

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, width] -> twice [B, M, S, d], for `step`."""
        return self._split(self.k_proj(memory)), self._split(self.v_proj(memory))

    def step(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """One more token of K hypotheses that share keys and values: [B, K, width], [B, M, S, d] -> [B, K, width]."""
        heads = F.scaled_dot_product_attention(self._split(self.q_proj(x)), k, v, attn_mask=mask)  # [B, M, K, d]
        return self.out_proj(heads.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, M, T, d]

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # [B, M, T, S]
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1)


class FeedForward(nn.Sequential):
    """Two linear maps with a ReLU between."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            nn.Linear(config.width, config.feed_forward), nn.ReLU(), nn.Linear(config.feed_forward, config.width)
        )


class Layer(nn.Module):
    """Self-attention, in decoders attention to the encoder, and a feed-forward block, each with residual and norm."""

    def __init__(self, config: TransformerConfig, cross: bool) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attention = Attention(config)
        self.cross_attention = Attention(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None, memory_mask: Tensor | None,
        seen: list[Tensor] | None, what: str | None,
    ) -> Tensor:  # fmt: skip
        causal = memory is not None
        start = self._before(0, x)
        x = self._after(0, x, self.self_attention(start, start, mask, causal, seen, what))
        if self.cross_attention is not None and memory is not None:
            x = self._after(1, x, self.cross_attention(self._before(1, x), memory, memory_mask, False, seen, what))
        last = len(self.norms) - 1
        return self._after(last, x, self.feed_forward(self._before(last, x)))

    def step(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None, memory: tuple[Tensor, Tensor], real: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A decoder layer for one more token: [B, K, width] -> the same, and keys and values with this token's."""
        assert self.cross_attention is not None, "encoders see all their tokens at once"
        batch, size = x.shape[:2]
        start = self._before(0, x)
        single = start.flatten(0, 1).unsqueeze(1)  # [B K, 1, width]: each hypothesis has a past of its own
        k, v = self.self_attention.keys_and_values(single)  # [B K, M, 1, d]
        if past is not None:
            k, v = (torch.cat([old.flatten(0, 1), new], dim=2) for old, new in zip(past, (k, v), strict=True))
        x = self._after(0, x, self.self_attention.step(single, k, v, None).view(batch, size, -1))
        x = self._after(1, x, self.cross_attention.step(self._before(1, x), *memory, real))
        x = self._after(2, x, self.feed_forward(self._before(2, x)))
        return x, (k.unflatten(0, (batch, size)), v.unflatten(0, (batch, size)))  # [B, K, M, T, d]

    def _before(self, block: int, x: Tensor) -> Tensor:
        return self.norms[block](x) if self.pre_norm else x

    def _after(self, block: int, x: Tensor, change: Tensor) -> Tensor:
        x = x + self.dropout(change)
        return x if self.pre_norm else self.norms[block](x)


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, config: TransformerConfig, layers: int, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, cross) for _ in range(layers))
        self.norm = nn.LayerNorm(config.width) if config.pre_norm else nn.Identity()

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, memory_mask: Tensor | None = None,
        seen: list[Tensor] | None = None, what: str | None = None,
    ) -> Tensor:  # fmt: skip
        for layer in self.layers:
            x = layer(x, mask, memory, memory_mask, seen, what)
        return self.norm(x)


class Transformer(nn.Module):
    """Encoder and decoder with shared embeddings and sinusoidal positions."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width, padding_idx=config.padding)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        with torch.no_grad():
            self.embedding.weight[config.padding].zero_()
        self.encoder = Stack(config, config.layers[0], cross=False)
        self.decoder = Stack(config, config.layers[1], cross=True)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sinusoids(LONGEST, config.width), persistent=False)
        self.positions: Tensor

    def forward(self, source: Tensor, target: Tensor, collect: str | None = None) -> Any:
        """Logits of the next target token, [B, S], [B, T] -> [B, T, V].

        Args:
            source: source tokens.
            target: target tokens so far, beginning of sentence first.
            collect: also give, for every attention (encoder first, then self and cross of each decoder layer),
                "outputs" [B, M, T, d], "values" [B, M, S, d] or "weights" [B, M, T, S].
        """
        if collect is not None and collect not in COLLECT:
            raise ValueError(f"collect={collect!r}: choose one of {COLLECT}")
        seen: list[Tensor] | None = None if collect is None else []
        real = self._real(source)
        memory = self.encoder(self.embed(source), real, seen=seen, what=collect)
        states = self.decoder(self.embed(target), None, memory, real, seen=seen, what=collect)
        logits = F.linear(states, self.embedding.weight)
        return logits if seen is None else (logits, seen)

    def start(self, source: Tensor) -> Cache:
        """What `step` needs of some sentences, [B, S]; the model should be in evaluation mode."""
        real = self._real(source)
        memory = self.encoder(self.embed(source), real)
        attentions: list[Any] = [layer.cross_attention for layer in self.decoder.layers]
        return Cache(real, [attention.keys_and_values(memory) for attention in attentions])

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits after one more token of each hypothesis, which the cache then holds: [B, K] -> [B, K, V]."""
        place = cache.length
        x = self.embed(tokens.reshape(-1, 1), place).view(*tokens.shape, -1)  # [B, K, width]
        grown = []
        layers: Any = self.decoder.layers
        for i, (layer, memory) in enumerate(zip(layers, cache.memory, strict=True)):
            x, past = layer.step(x, cache.past[i] if cache.past else None, memory, cache.real)
            grown.append(past)
        cache.past = grown
        return F.linear(self.decoder.norm(x), self.embedding.weight)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens that begin at a place: [B, T] -> [B, T, width]."""
        end = start + tokens.shape[1]
        if end > LONGEST:
            raise ValueError(f"a sentence of {end} tokens: positions end at {LONGEST}; cut it, or split it")
        words = self.embedding(tokens) * math.sqrt(self.config.width)
        return self.dropout(words + self.positions[start:end].to(words.dtype))

    def _real(self, source: Tensor) -> Tensor:
        return (source != self.config.padding)[:, None, None, :]  # [B, 1, 1, S]


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as sines and cosines of falling frequency, [length, width]."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))  # [width / 2]
    angles = torch.arange(length)[:, None] * rates  # [length, width / 2]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
