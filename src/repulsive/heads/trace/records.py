"""What a traced forward pass leaves: the outputs of projections, and attention calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Leaf:
    """The output of one projection, where gradients end.

    Args:
        tensor: the output, a leaf that requires grad.
        parameter: the projection's weight.
        name: the weight's dotted name.
        axis: the weight's dimension that counts output features.
        rows: int64 [features], the weight's row behind each output feature; features of one head may share a row.
        feature_axis: the output's dimension that counts features.
        inner: further output dimensions that come from the weight, if heads and features have separate axes.
    """

    tensor: Tensor
    parameter: nn.Parameter
    name: str
    axis: int
    rows: Tensor
    feature_axis: int
    inner: tuple[int, ...] = ()


@dataclass(eq=False)
class Call:
    """One recorded call of an attention function, or one softmax over scores.

    Args:
        owner: dotted name of the module that made the call.
        operands: q, k and v, for functions that take all three (such as scaled dot-product attention).
        scores: input of the softmax, for attention written as explicit tensor operations.
        dim: axis of that softmax.
        attended: number of entries with a weight above 0 in each row of the scores.
        weights: output of the softmax, a leaf; its gradient shows which heads an output depends on.
        outputs: pairs of (attention weights times values, the axes of that product that may count heads).
        is_graph: whether this is graph message passing, which does not distinguish q, k and v.
        has_softmax: whether a softmax makes the weights; otherwise they are another function of a product q k^T.
    """

    owner: str
    operands: dict[str, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None
    dim: int = -1
    attended: Tensor | None = None
    weights: Tensor | None = None
    outputs: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    is_graph: bool = False
    has_softmax: bool = True
