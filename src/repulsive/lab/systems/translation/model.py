"""The Transformer (Vaswani et al., 2017) for sequence-to-sequence tasks. `attention` has its attention.

    model = Transformer(TransformerConfig.small(vocabulary=10_000))
    logits = model(source, target)                       # [B, S], [B, T] -> [B, T, V]
    logits, seen = model(source, target, collect="outputs")
    logits = model(source, target, packed=(a, b))        # [N], [N'] -> [N', V]: packed sentences, see `packed`
    cache = model.start(source)                          # encode once, then decode token by token: the same logits
    logits = model.step(tokens, cache)                   # [B, K] -> [B, K, V], K hypotheses of each sentence

`small` is the paper's IWSLT14 setting, `base` and `big` its WMT14 ones, `tiny` is for CPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.lab.layers import residual
from repulsive.lab.layers.cache import Cache
from repulsive.lab.layers.packed import Packed, padding_mask
from repulsive.lab.systems.translation.attention import Attention, Mask

COLLECT = ("outputs", "values", "weights")
LONGEST = 1024  # maximum number of tokens in a sentence


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and choices of a Transformer.

    Args:
        vocabulary: number of token ids, shared by source, target and output.
        width: size of a token's state.
        heads: heads of every attention.
        layers: (encoder, decoder) layers.
        feed_forward: hidden units of the feed-forward blocks.
        dropout: dropout probability on embeddings and on the output of every block.
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


class FeedForward(nn.Sequential):
    """Two linear maps with a ReLU in between."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(
            nn.Linear(config.width, config.feed_forward), nn.ReLU(), nn.Linear(config.feed_forward, config.width)
        )


class Layer(nn.Module):
    """Self-attention, in decoders cross-attention, and a feed-forward block, each with residual and norm."""

    def __init__(self, config: TransformerConfig, cross: bool) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.self_attention = Attention(config.width, config.heads)
        self.cross_attention = Attention(config.width, config.heads) if cross else None
        self.feed_forward = FeedForward(config)
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(3 if cross else 2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        memory: Tensor | None,
        to_memory: Mask,
        seen: list[Tensor] | None,
        what: str | None,
    ) -> Tensor:
        start, seeds = self._before(0, x), mask.seeds
        x = self._after(0, x, self.self_attention(start, start, mask, seen, what), seeds)
        if self.cross_attention is not None and memory is not None:
            x = self._after(1, x, self.cross_attention(self._before(1, x), memory, to_memory, seen, what), seeds)
        last = len(self.norms) - 1
        return self._after(last, x, self.feed_forward(self._before(last, x)), seeds)

    def step(self, x: Tensor, cache: Cache, number: int) -> Tensor:
        """Apply decoder layer `number` to one more token, after `cache.grow`: [B, K, width] -> [B, K, width]."""
        assert self.cross_attention is not None, "only decoder layers step"
        start = self._before(0, x)
        k, v = cache.add(number, *self.self_attention.keys_and_values(start))  # [B, M, N, d]
        x = self._after(0, x, self.self_attention.step(start, k, v, cache.own))
        k, v = cache.memory[number]  # [B, M, S, d]
        x = self._after(1, x, self.cross_attention.step(self._before(1, x), k, v, cache.source))
        return self._after(2, x, self.feed_forward(self._before(2, x)))

    def _before(self, block: int, x: Tensor) -> Tensor:
        return self.norms[block](x) if self.pre_norm else x

    def _after(self, block: int, x: Tensor, change: Tensor, seeds: Tensor | None = None) -> Tensor:
        norm = self.norms[block]
        if seeds is not None and isinstance(norm, nn.LayerNorm):
            return residual.add_norm(x, change, norm, self.dropout.p if self.training else 0.0, seeds[block])
        x = x + self.dropout(change)
        return x if self.pre_norm else norm(x).to(change.dtype)  # under autocast norms return float32


class Stack(nn.Module):
    """A stack of encoder or decoder layers."""

    def __init__(self, config: TransformerConfig, layers: int, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, cross) for _ in range(layers))
        self.norm = nn.LayerNorm(config.width) if config.pre_norm else nn.Identity()
        self.pre_norm = config.pre_norm
        self.run = _run  # calls a layer on packed sentences; may be compiled

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        memory: Tensor | None = None,
        to_memory: Mask = Mask(),  # noqa: B008
        seen: list[Tensor] | None = None,
        what: str | None = None,
    ) -> Tensor:
        run, seeds = (_run, None) if mask.packed is None else (self.run, self._seeds(x, mask.packed))
        for number, layer in enumerate(self.layers):
            own = mask if seeds is None else mask._replace(seeds=seeds[number])
            x = run(layer, x, own, memory, to_memory, seen, what)
        return self.norm(x)

    def _seeds(self, x: Tensor, packed: tuple[Packed, Packed]) -> Tensor | None:
        """Draw the dropout seeds of every block, int64 [layers, 3]; None if torch draws the dropout masks."""
        if self.pre_norm or not packed[0].kernels or not residual.supported(x):
            return None
        return torch.randint(2**62, (len(self.layers), 3), device=x.device)


def _run(layer: nn.Module, *arguments: Any) -> Tensor:
    output: Tensor = layer(*arguments)
    return output


class Transformer(nn.Module):
    """Encoder and decoder with shared embeddings and sinusoidal positions."""

    longest = LONGEST

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

    def forward(
        self, source: Tensor, target: Tensor, collect: str | None = None, packed: tuple[Packed, Packed] | None = None
    ) -> Any:
        """Compute the logits of each next target token: [B, S], [B, T] -> [B, T, V].

        Args:
            source: source tokens.
            target: target tokens so far, starting with the beginning of sentence.
            collect: also return, for every attention (encoder first, then self- and cross-attention of each decoder
                layer), "outputs" [B, M, T, d], "values" [B, M, S, d] or "weights" [B, M, T, S].
            packed: positions of packed sentences: source [N] and target [N'] have them end to end, and logits are
                [N', V]. Collected tensors have all sentences as one; "weights" cannot be collected.
        """
        known = COLLECT if packed is None else COLLECT[:2]
        if collect is not None and collect not in known:
            raise ValueError(f"collect={collect!r}: choose one of {known}")
        seen: list[Tensor] | None = None if collect is None else []
        if packed is None:
            to_source, among_target = Mask(self._real(source)), Mask(causal=True)
            among_source, x, y = to_source, self.embed(source), self.embed(target)
        else:
            a, b = packed
            of_source, of_target = (padding_mask(side)[:, None, None] for side in packed)  # for hooks
            among_source, among_target, to_source = (
                Mask(of_source, packed=(a, a)),
                Mask(of_target, True, (b, b)),
                Mask(of_source, packed=(b, a)),
            )
            x, y = (
                self._with_places(tokens, self.positions[side.places]) for tokens, side in ((source, a), (target, b))
            )
        memory = self.encoder(x, among_source, seen=seen, what=collect)
        states = self.decoder(y, among_target, memory, to_source, seen=seen, what=collect)
        logits = F.linear(states, self.embedding.weight)
        return logits if seen is None else (logits, seen)

    def start(self, source: Tensor) -> Cache:
        """Encode sentences [B, S] for `step`; the model should be in evaluation mode."""
        real = self._real(source)
        memory = self.encoder(self.embed(source), Mask(real))
        attentions: list[Any] = [layer.cross_attention for layer in self.decoder.layers]
        return Cache(real, [attention.keys_and_values(memory) for attention in attentions])

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Add one token of each hypothesis to the cache, and compute the next logits: [B, K] -> [B, K, V]."""
        x = self.embed(tokens.reshape(-1, 1), cache.length).view(*tokens.shape, -1)  # [B, K, width]
        cache.grow(tokens.shape[1])
        layers: Any = self.decoder.layers
        for number, layer in enumerate(layers):
            x = layer.step(x, cache, number)
        return F.linear(self.decoder.norm(x), self.embedding.weight)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Embed tokens whose positions begin at `start`: [B, T] -> [B, T, width]."""
        end = start + tokens.shape[1]
        if end > LONGEST:
            raise ValueError(f"a sentence of {end} tokens: expected at most {LONGEST}; cut it, or split it")
        return self._with_places(tokens, self.positions[start:end])

    def compile_layers(self) -> None:
        """Compile the layers for packed sentences of one size, which saves kernel launches."""
        self.encoder.run = self.decoder.run = torch.compile(_run, dynamic=False)

    def _with_places(self, tokens: Tensor, places: Tensor) -> Tensor:
        words = self.embedding(tokens) * math.sqrt(self.config.width)
        return self.dropout(words + places.to(words.dtype))

    def _real(self, source: Tensor) -> Tensor:
        return (source != self.config.padding)[:, None, None, :]  # [B, 1, 1, S]


def sinusoids(length: int, width: int) -> Tensor:
    """Compute sinusoidal position embeddings, sines and cosines of falling frequency, [length, width]."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))  # [width / 2]
    angles = torch.arange(length)[:, None] * rates  # [length, width / 2]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]
