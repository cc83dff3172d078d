"""Find the parameter behind a weight tensor, which may be a view of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from repulsive.heads.products.reshaped_weights import elements_of, parameter_of


class WeightRows(NamedTuple):
    """Rows of a parameter.

    Args:
        parameter: the parameter.
        name: its dotted name.
        axis: the parameter's dimension that counts the rows.
        rows: their indices, int64 [rows]; an index is repeated if several features of a weight share it.
    """

    parameter: nn.Parameter
    name: str
    axis: int
    rows: Tensor


class ParameterIndex:
    """The parameters of a model by their storage.

    Args:
        parameters: (dotted name, parameter) pairs.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    def find(self, weight: Tensor, axis: int) -> WeightRows | None:
        """Find the parameter that `weight` is, views or copies, and its rows along `axis`; None if there is none."""
        first = int(weight.storage_offset())
        last = first + sum((n - 1) * stride for n, stride in zip(weight.shape, weight.stride(), strict=True))
        for name, parameter in self._by_storage.get(weight.untyped_storage().data_ptr(), ()):
            # Parameters may share a storage, such as q, k and v that were split from one weight of a checkpoint.
            if not (_contains(parameter, first) and _contains(parameter, last)):
                continue
            stride, size = weight.stride(axis), weight.shape[axis]
            axes = [a for a in range(parameter.ndim) if parameter.stride(a) == stride and parameter.shape[a] >= size]
            if axes:
                along = max(axes, key=lambda a: parameter.shape[a])
                start = (weight.storage_offset() - parameter.storage_offset()) // max(stride, 1)
                start %= parameter.shape[along]
                if start + size <= parameter.shape[along]:
                    return WeightRows(parameter, name, along, torch.arange(start, start + size, device="cpu"))
        return self._find_reshaped(weight, axis)

    def _find_reshaped(self, weight: Tensor, axis: int) -> WeightRows | None:
        """Find the rows behind a reshaped copy of a parameter; a row that `axis` passes several times is repeated."""
        original = parameter_of(weight)
        source = None if original is None or original is weight else self.find(original, 0)
        if source is None:
            return None
        elements = elements_of(weight).movedim(axis, 0).flatten(1)[:, 0]
        for along, places in enumerate(torch.unravel_index(elements, source.parameter.shape)):
            if len(places.unique()) > 1:
                return WeightRows(source.parameter, source.name, along, places)
        return None


def _contains(parameter: Tensor, offset: int) -> bool:
    """Check whether the element of the storage at `offset` belongs to the parameter."""
    offset -= int(parameter.storage_offset())
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True), reverse=True):
        if size > 1 and stride:
            if not 0 <= offset < stride * size:
                return False
            offset %= stride
    return offset == 0
