"""The query and key projections that form a layer's attention logits, and the parameters that receive the force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.products.per_head_weights import PerHeadSlice


@dataclass(frozen=True, eq=False)
class Target:
    """A parameter that receives a share of the force.

    Args:
        slice: the parameter's rows for each head; a row of a bias is one number.
        factor: scaling of the parameter's output (for LoRA).
        is_bias: whether the parameter is a bias.
    """

    slice: HeadSlice
    factor: float = 1.0
    is_bias: bool = False


@dataclass(frozen=True, eq=False)
class Projection:
    """The q or k projection of one attention layer.

    Args:
        group: the heads of the projection.
        output: the module whose output contains the projected tokens. For `nn.MultiheadAttention` and for weights in
            einsum notation, whose projections are not modules, the attention module itself.
        targets: parameters that receive the force: the weight and its bias, or the weights of LoRA adapters; then the
            bias that the attention module adds.
        width: number of features of a head that enter the dot product; fewer than its rows if other rows encode
            positions.
        added: bias that the attention module adds to the output of the projection, or None.
        norm: norm between the projection and the dot product, or None.
        clip: limit to which values are clipped after the norm, or None.
        is_time_first: whether tokens are [T, B, D] instead of [B, T, D].
        bias: bias of a weight in einsum notation, or None.
    """

    group: HeadGroup
    output: nn.Module
    targets: tuple[Target, ...]
    width: int
    added: HeadSlice | None = None
    norm: nn.Module | None = None
    clip: float | None = None
    is_time_first: bool = False
    bias: HeadSlice | None = None

    @property
    def weight(self) -> PerHeadSlice | None:
        """The weight if it is a parameter in einsum notation, else None."""
        part = self.group.slices[0]
        return part if isinstance(part, PerHeadSlice) else None

    @property
    def is_torch(self) -> bool:
        """Whether the projection belongs to `nn.MultiheadAttention`."""
        return isinstance(self.output, nn.MultiheadAttention)

    @property
    def rows(self) -> torch.Tensor:
        """Output features of each head that enter the dot product, int64 [M, d]."""
        return self.group.slices[0].rows[:, : self.width]


@dataclass(frozen=True, eq=False)
class LogitLayer:
    """One attention layer: the pair of projections whose dot product is its logits.

    Args:
        name: dotted name of the attention module.
        attention: the attention module.
        where: "encoder", "decoder" or "cross".
        query: the query projection.
        key: the key projection.
        reads: the key-value head of each query head, or None if each query head has its own.
    """

    name: str
    attention: nn.Module
    where: str
    query: Projection
    key: Projection
    reads: tuple[int, ...] | None = None

    @property
    def num_heads(self) -> int:
        return self.query.group.num_heads

    @property
    def watched(self) -> dict[str, Projection]:
        """Projections whose tokens are sampled, by part ("q", "k")."""
        return {"q": self.query, "k": self.key}

    @property
    def sides(self) -> tuple[tuple[HeadGroup, tuple[Target, ...]], ...]:
        """The two groups of heads that the force moves (q, then k), each with the parameters that receive the force."""
        return (self.query.group, self.query.targets), (self.key.group, self.key.targets)


class CircuitLayer(Protocol):
    """Interface of `LogitLayer` (queries and keys) and `ValueLayer` (values and outputs)."""

    @property
    def name(self) -> str: ...

    @property
    def attention(self) -> nn.Module: ...

    @property
    def where(self) -> str: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def watched(self) -> dict[str, Projection]: ...

    @property
    def sides(self) -> tuple[tuple[HeadGroup, tuple[Target, ...]], ...]: ...
