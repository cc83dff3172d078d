"""The self-attentive sentence classifier (Lin et al., 2017, arXiv 1703.03130), one file, top to bottom.

    model = SentenceClassifier(SelfAttentiveConfig.yelp(vocabulary=50_000))
    logits = model(tokens)                                          # [B, T] -> [B, C]
    logits, attention, sentences = model(tokens, collect=True)      # [B, C], [B, M, T], [B, M, 2u]

`age`, `yelp` and `snli` are the published sizes, `tiny` is for tests. `PairClassifier` is the model for SNLI.
Sentences are padded at the end; padding does not change a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from repulsive.lab.layers.lstm import two_way


@dataclass(frozen=True, kw_only=True)
class SelfAttentiveSizes:
    """Sizes and choices of a self-attentive classifier that do not depend on the data.

    Args:
        embedding: size of a word vector.
        units: LSTM units in each direction, u.
        hidden: hidden units of the attention, d_a.
        heads: attention heads, r in the source.
        own_hidden: give each head its own hidden layer; False: all heads share one, as published.
        mlp: units of the ReLU layer before the classes.
        dropout: dropout probability before and after the ReLU layer.
        gate: output size of the row-wise products of a `PairClassifier`.
    """

    embedding: int = 300
    units: int = 300
    hidden: int = 350
    heads: int = 30
    own_hidden: bool = False
    mlp: int = 2000
    dropout: float = 0.5
    gate: int = 600

    def __post_init__(self) -> None:
        _check_positive(self, "units", "hidden", "heads", "mlp", "gate")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


def _check_positive(sizes: SelfAttentiveSizes, *names: str) -> None:
    for name in names:
        if getattr(sizes, name) < 1:
            raise ValueError(f"{name}={getattr(sizes, name)} must be at least 1")


@dataclass(frozen=True)
class SelfAttentiveConfig(SelfAttentiveSizes):
    """Sizes and choices of a self-attentive classifier.

    Args:
        vocabulary: number of word types.
        classes: number of classes.
        padding: id of the padding token.
    """

    vocabulary: int
    classes: int
    padding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "vocabulary", "classes", "embedding")
        if not 0 <= self.padding < self.vocabulary:
            raise ValueError(f"padding={self.padding} must be a token id below vocabulary={self.vocabulary}")

    @classmethod
    def age(cls, vocabulary: int, **changes: Any) -> Self:
        return replace(cls(vocabulary, classes=5), **changes)

    @classmethod
    def yelp(cls, vocabulary: int, **changes: Any) -> Self:
        return replace(cls(vocabulary, classes=5, mlp=3000), **changes)

    @classmethod
    def snli(cls, vocabulary: int, **changes: Any) -> Self:
        """Return the sizes for SNLI, with dropout 0.5 as in the released code; the paper says that none was used."""
        return replace(cls(vocabulary, classes=3, hidden=150, mlp=4000), **changes)

    @classmethod
    def tiny(cls, vocabulary: int, **changes: Any) -> Self:
        config = cls(vocabulary, classes=5, embedding=16, units=12, hidden=8, heads=4, mlp=20, dropout=0.1, gate=6)
        return replace(config, **changes)


class AdditiveAttention(nn.Module):
    r"""Additive attention without biases: $A = \mathrm{softmax}(W_2 \tanh(W_1 H^\top))$ over words, $M = A H$.

    All heads share W1, `hidden`; head i is row i of W2, `score`. With `own_hidden` each head has its own W1, and row i
    of `score`, [heads, d_a (2u + 1)], holds all weights of head i: for each hidden unit its row of W1 and entry of W2.
    """

    def __init__(self, width: int, hidden: int, heads: int, own_hidden: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.units = hidden
        self.score: nn.Linear | nn.Parameter
        first, second = math.sqrt(6 / (width + hidden)), math.sqrt(6 / (hidden + heads))  # bounds of Glorot and Bengio
        if own_hidden:
            weight = torch.empty(heads, hidden, width + 1)
            weight[..., :width].uniform_(-first, first)
            weight[..., width].uniform_(-second, second)
            self.score = nn.Parameter(weight.flatten(1))
        else:
            self.hidden = nn.Linear(width, hidden, bias=False)
            self.score = nn.Linear(hidden, heads, bias=False)
            nn.init.uniform_(self.hidden.weight, -first, first)
            nn.init.uniform_(self.score.weight, -second, second)

    def forward(self, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Map states [B, T, 2u] and a padding mask [B, T] to attention [B, M, T] and sentence vectors [B, M, 2u]."""
        scores = self._scores(states).transpose(1, 2)  # [B, M, T]
        attention = scores.masked_fill(~real.unsqueeze(1), -math.inf).softmax(-1)  # [B, M, T]
        return attention, attention @ states

    def _scores(self, states: Tensor) -> Tensor:
        if isinstance(self.score, nn.Linear):
            return self.score(torch.tanh(self.hidden(states)))  # [B, T, M]
        units = self.score.unflatten(1, (self.units, -1))  # [M, d_a, 2u + 1]
        inner = torch.tanh(torch.einsum("btu,mdu->btmd", states, units[..., :-1]))  # [B, T, M, d_a]
        return torch.einsum("btmd,md->btm", inner, units[..., -1])


class SentenceEncoder(nn.Module):
    """Word vectors, a bidirectional LSTM and additive attention: a sentence becomes one vector per head."""

    def __init__(self, config: SelfAttentiveConfig, vectors: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.embedding, padding_idx=config.padding)
        self.forwards = nn.LSTM(config.embedding, config.units, batch_first=True)
        self.backwards = nn.LSTM(config.embedding, config.units, batch_first=True)
        for lstm in (self.forwards, self.backwards):
            for name, parameter in lstm.named_parameters():
                nn.init.zeros_(parameter) if "bias" in name else nn.init.normal_(parameter, std=0.1)
        self.attention = AdditiveAttention(2 * config.units, config.hidden, config.heads, config.own_hidden)
        if vectors is not None:
            self._start_from(vectors)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map tokens [B, T], padded at the end, to attention [B, M, T] and sentence vectors [B, M, 2u]."""
        lengths = self._lengths(tokens) if lengths is None else lengths.to(tokens.device, non_blocking=True)
        lengths = lengths.clamp(min=1)  # an empty sentence has one padding word: a softmax over nothing is nan
        states = two_way(self.embedding(tokens), lengths, self.forwards, self.backwards)  # [B, T, 2u]
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)  # [B, T]
        return self.attention(states, real)

    def _lengths(self, tokens: Tensor) -> Tensor:
        real = tokens != self.config.padding  # [B, T]
        ends = (real * torch.arange(1, tokens.shape[1] + 1, device=tokens.device)).amax(1)  # [B]
        counts = real.sum(1)
        if not torch.equal(counts, ends):
            row = int((counts != ends).nonzero()[0])
            raise ValueError(f"sentence {row} has padding ({self.config.padding}) before its last word; pad at the end")
        return counts

    def _start_from(self, vectors: Tensor) -> None:
        if vectors.shape != self.embedding.weight.shape:
            shape = list(self.embedding.weight.shape)
            raise ValueError(f"expected vectors of shape {shape}, [vocabulary, embedding], got {list(vectors.shape)}")
        with torch.no_grad():
            self.embedding.weight.copy_(vectors)
            self.embedding.weight[self.config.padding].zero_()


class SentenceClassifier(nn.Module):
    """Classifier of single sentences.

    Args:
        config: sizes of the model.
        vectors: initial word vectors, [vocabulary, embedding]; they are trained.
    """

    def __init__(self, config: SelfAttentiveConfig, vectors: Tensor | None = None) -> None:
        super().__init__()
        self.encoder = SentenceEncoder(config, vectors)
        self.classify = _classifier(config, 2 * config.units * config.heads)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, collect: bool = False) -> Any:
        """Compute class logits: [B, T] -> [B, C].

        Args:
            tokens: word ids, padded at the end.
            lengths: number of words of each sentence, [B]; None: count them, which synchronises with a GPU.
            collect: also return the attention [B, M, T] and each head's representation [B, M, 2u].
        """
        attention, sentences = self.encoder(tokens, lengths)
        logits = self.classify(sentences.flatten(1))  # [B, C]
        return (logits, attention, sentences) if collect else logits


class PairClassifier(nn.Module):
    r"""Classifier of sentence pairs with one encoder for both: row i is $(M^p_i W^p_i) \odot (M^h_i W^h_i)$.

    Args:
        config: sizes of the model.
        vectors: initial word vectors, [vocabulary, embedding]; they are trained.
    """

    def __init__(self, config: SelfAttentiveConfig, vectors: Tensor | None = None) -> None:
        super().__init__()
        self.encoder = SentenceEncoder(config, vectors)
        width, bound = 2 * config.units, math.sqrt(6 / (2 * config.units + config.gate))
        self.premise_gate = nn.Parameter(torch.empty(config.heads, width, config.gate).uniform_(-bound, bound))
        self.hypothesis_gate = nn.Parameter(torch.empty(config.heads, width, config.gate).uniform_(-bound, bound))
        self.classify = _classifier(config, config.gate * config.heads)

    def forward(
        self,
        premise: Tensor,
        hypothesis: Tensor,
        premise_lengths: Tensor | None = None,
        hypothesis_lengths: Tensor | None = None,
        collect: bool = False,
    ) -> Any:
        """Compute class logits, [B, S], [B, T] -> [B, C]; `collect` adds attention and vectors of both sentences."""
        attention_p, states_p = self.encoder(premise, premise_lengths)  # [B, M, S], [B, M, 2u]
        attention_h, states_h = self.encoder(hypothesis, hypothesis_lengths)  # [B, M, T], [B, M, 2u]
        left = torch.einsum("bmu,muk->bmk", states_p, self.premise_gate)  # [B, M, k]
        right = torch.einsum("bmu,muk->bmk", states_h, self.hypothesis_gate)  # [B, M, k]
        logits = self.classify((left * right).flatten(1))  # [B, C]
        return (logits, (attention_p, attention_h), (states_p, states_h)) if collect else logits


def _classifier(config: SelfAttentiveConfig, width: int) -> nn.Sequential:
    inner, outer = nn.Linear(width, config.mlp), nn.Linear(config.mlp, config.classes)
    for layer in (inner, outer):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Dropout(config.dropout), inner, nn.ReLU(), nn.Dropout(config.dropout), outer)
