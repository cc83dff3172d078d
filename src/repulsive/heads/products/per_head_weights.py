"""Weights in einsum notation, [heads, inputs, features] in any order, seen as the rows of a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from repulsive.heads.layout import HeadSlice, consecutive_rows


@dataclass(frozen=True, eq=False)
class PerHeadSlice(HeadSlice):
    """All heads of a weight with separate axes for heads, features and inputs, in the order of `nn.Linear`: [M, d, D].

    Args:
        module: as in `HeadSlice`.
        attribute: as in `HeadSlice`.
        parameter_name: as in `HeadSlice`.
        rows: int64 [M, d]; feature j of head i has the number i d + j.
        axis: the axis of the parameter that counts heads.
        along: the axis of the parameter that counts the features of a head.
    """

    along: int = 2  # required here

    def __post_init__(self) -> None:
        object.__setattr__(self, "_strides", None)

    @classmethod
    def of(cls, part: HeadSlice, along: int | None = None) -> PerHeadSlice:
        """Build the slice from one that knows only the axis of heads; `along` is its `feature_axis` by default."""
        along = part.feature_axis if along is None else along
        assert along is not None
        heads, width = part.parameter().shape[part.axis], part.parameter().shape[along]
        rows = consecutive_rows(heads, width)
        return cls(part.module, part.attribute, part.parameter_name, rows, part.axis, along)

    @property
    def feature_axis(self) -> int | None:
        """None: the rows already are features."""
        return None

    @property
    def features(self) -> int:
        return self.rows.numel()

    @property
    def inputs(self) -> int:
        return self.parameter().shape[3 - self.axis - self.along]

    @property
    def dim(self) -> int:
        return self.rows.shape[1] * self.inputs

    @property
    def is_whole(self) -> bool:
        return False  # it covers the parameter, but in another order

    def view(self, tensor: Tensor) -> Tensor:
        """View `tensor`, shaped as the parameter, as [M, d, D]."""
        return tensor.movedim((self.axis, self.along), (0, 1))

    def put(self, tensor: Tensor, heads: Tensor) -> None:
        """Write `heads` [M, d D] into `tensor`, shaped as the parameter."""
        view = self.view(tensor)
        view.copy_(heads.reshape(view.shape))
