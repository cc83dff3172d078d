"""A decoder-only Transformer language model, one file, top to bottom.

    model = Decoder(DecoderConfig(vocabulary=256))
    logits = model(tokens)                               # [B, T] -> [B, T, V]: logits of each next token

Pre-norm RMSNorm (Zhang & Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020), no biases. Input
and output share the embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6  # epsilon of all norms
BASE = 10_000.0  # base of rotary positions: the slowest pair rotates by almost 1 / BASE radians per token


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes and choices of a decoder that do not depend on the data.

    Args:
        layers: number of layers.
        width: size of a token's state.
        heads: query heads of a layer.
        kv_heads: key-value heads of a layer, each shared by heads / kv_heads query heads; 0: as many as query heads.
        qk_norm: normalise the queries and keys of each head with RMSNorm.
        drop_heads: probability that a head is left out of a sequence in training (DropHead, Zhou et al., 2020).
    """

    layers: int = 8
    width: int = 512
    heads: int = 8
    kv_heads: int = 0
    qk_norm: bool = False
    drop_heads: float = 0.0


@dataclass(frozen=True)
class DecoderConfig(DecoderSizes):
    """Sizes and choices of a decoder.

    Args:
        vocabulary: number of tokens.
        length: longest sequence the model reads.
    """

    vocabulary: int
    length: int = 512

    def __post_init__(self) -> None:
        if min(self.vocabulary, self.layers, self.width, self.heads, self.length) < 1 or self.kv_heads < 0:
            raise ValueError("vocabulary, layers, width, heads and length must be at least 1, kv_heads at least 0")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} does not divide into heads={self.heads}")
        if self.head_width % 2:
            raise ValueError(f"width / heads = {self.head_width} must be even: rotary positions rotate pairs")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads={self.heads} does not divide into kv_heads={self.kv_heads}")
        if not 0 <= self.drop_heads < 1:
            raise ValueError(f"drop_heads={self.drop_heads} must be at least 0 and below 1")

    @property
    def head_width(self) -> int:
        """Number of features of one head."""
        return self.width // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key-value heads in a layer."""
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """Number of inner features of SwiGLU: 8/3 of the width, rounded up to a multiple of 32."""
        return -(-8 * self.width // 96) * 32


class CausalAttention(nn.Module):
    """Multi-head attention in which a token sees itself and the tokens before it."""

    is_causal = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.heads, config.num_kv_heads, config.head_width
        self.drop_heads = config.drop_heads
        shared = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, shared, bias=False)
        self.v_proj = nn.Linear(config.width, shared, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, EPS) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, EPS) if config.qk_norm else None

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q = self._split(self.q_proj(x))  # [B, M, T, d]
        k, v = self._split(self.k_proj(x)), self._split(self.v_proj(x))  # [B, K, T, d], K key-value heads
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles).to(v.dtype), rotate(k, angles).to(v.dtype)
        grouped = self.num_kv_heads < self.num_heads
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)  # [B, M, T, d]
        if self.drop_heads and self.training:
            heads = heads * F.dropout(heads.new_ones(*heads.shape[:2], 1, 1), self.drop_heads)
        return self.o_proj(heads.transpose(1, 2).flatten(2))  # [B, T, width]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, M, T, d]


class SwiGLU(nn.Module):
    """Feed-forward block, down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, T, width]


class Layer(nn.Module):
    """Attention and a feed-forward block, each pre-normalised and added to its input."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, EPS)
        self.attention = CausalAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, EPS)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)  # [B, T, width]
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Language model: token ids to logits of the next tokens."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, EPS)
        self.register_buffer("angles", rotary_angles(config.length, config.head_width), persistent=False)
        self.angles: Tensor
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of each next token: [B, T] -> [B, T, V]."""
        if tokens.shape[1] > self.config.length:
            raise ValueError(f"{tokens.shape[1]} tokens: the model reads at most {self.config.length}; cut them")
        x = self.embedding(tokens)  # [B, T, width]
        for layer in self.layers:
            x = layer(x, self.angles[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embedding.weight)

    def compile_layers(self) -> None:
        """Let torch's compiler fuse each layer, for batches of one shape."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def _initialise(self) -> None:
        """Draw normal weights; output projections are scaled down with the number of layers."""
        std = 0.02 * math.sqrt(512 / self.config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                last = name.endswith(("o_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.layers) if last else std)


def rotary_angles(length: int, width: int) -> Tensor:
    """Compute the rotation angle of each pair of features at each position, [length, width / 2]."""
    rates = BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)  # [width / 2]
    return (torch.arange(length)[:, None] * rates).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of features (i, i + d/2) by their angles: [B, M, T, d], [T, d/2] -> [B, M, T, d].

    Inner products of rotated vectors depend only on the distance between their positions.
    """
    first, second = x.chunk(2, -1)  # [B, M, T, d/2]
    cos, sin = angles.cos(), angles.sin()  # [T, d/2]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
