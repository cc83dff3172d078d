"""Norms of the gradients of all layers, in a few calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadSlice, as_slice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.backends.pieces import split_by_size
from repulsive.repulsion.parameter_lookup import ParameterLookup
from repulsive.repulsion.sharding.shard_layout import gradient_of

MOST_COPIED = 2**28  # largest number of bytes of gradients that are copied at a time


class _Rows(NamedTuple):
    """Rows of a parameter that belong to one layer.

    Args:
        layer: number of the layer.
        part: a slice of the parameter.
        parameter: index of the parameter in the lookup.
        read: function that selects the rows from the gradient of the parameter; None for all rows.
    """

    layer: int
    part: HeadSlice
    parameter: int
    read: Callable[[Tensor], Tensor] | None


class GradientNorms:
    """Joint gradient norm of the slices of each layer; sharded gradients are gathered.

    Args:
        layers: the slices of each layer.
    """

    def __init__(self, layers: Sequence[Sequence[HeadSlice]]) -> None:
        self._count = len(layers)
        self._lookup = ParameterLookup(part for parts in layers for part in parts)
        of_layers = [_rows_of(number, parts, self._lookup) for number, parts in enumerate(layers)]
        # The first rows of all layers, then the second ones, ...: usually those are gradients of one shape.
        most = max(map(len, of_layers), default=0)
        self._rows = [rows[place] for place in range(most) for rows in of_layers if place < len(rows)]
        self._order: tuple[list[int], Tensor | None] | None = None  # layer of each norm; on the device if irregular

    def __call__(self) -> Tensor:
        """Compute the norms, float32 [layers]."""
        parameters, gradients = self._lookup.current()
        whole: list[Tensor] = []
        strided: dict[torch.Size, list[Tensor]] = defaultdict(list)  # by shape
        layers: list[int] = []  # those of `whole`, then those of `strided`
        layers_of_strided: dict[torch.Size, list[int]] = defaultdict(list)
        for layer, part, index, read in self._rows:
            grad = gradients[index]
            if grad is None:
                continue
            if grad.is_sparse or (type(parameters[index]) is not nn.Parameter and is_sharded(parameters[index])):
                local = gradient_of(part).detach()
                grad = local.full_tensor() if is_sharded(local) else local
            if read is not None:
                grad = read(grad)
            if grad.is_contiguous():
                whole.append(grad)
                layers.append(layer)
            else:
                strided[grad.shape].append(grad)
                layers_of_strided[grad.shape].append(layer)
        norms = [_norms(whole)] if whole else []
        for shape, some in strided.items():
            norms += [_norms_of_strided(chunk) for chunk in split_by_size(some, MOST_COPIED, lambda grad: grad.nbytes)]
            layers += layers_of_strided[shape]
        if not norms:
            return torch.zeros(self._count, dtype=torch.float32, device="cpu")
        return self._by_layer(layers, (norms[0] if len(norms) == 1 else torch.cat(norms)).float())

    def _by_layer(self, layers: list[int], norms: Tensor) -> Tensor:
        """Join the norms of each layer's gradients.

        Args:
            layers: layer of each norm.
            norms: [len(layers)].
        """
        if self._order is None or self._order[0] != layers:
            is_regular = layers == list(range(self._count)) * (len(layers) // self._count)
            self._order = layers, None if is_regular else torch.tensor(layers, device="cpu").to(norms.device)
        index = self._order[1]
        if index is None:
            joined: Tensor = torch.linalg.vector_norm(norms.view(-1, self._count), dim=0)
            return joined
        return norms.new_zeros(self._count).index_add_(0, index.to(norms.device), norms.square()).sqrt()


def _norms(tensors: list[Tensor]) -> Tensor:
    """Compute the norm of each tensor, [len(tensors)]."""
    return torch.stack(torch._foreach_norm(tensors, dtype=_dtype(tensors)))


def _norms_of_strided(tensors: list[Tensor]) -> Tensor:
    """Compute the norm of each tensor; they have one shape, and are copied: norms in place would be a call for each."""
    norms: Tensor = torch.linalg.vector_norm(torch.stack(tensors).flatten(1), dim=1, dtype=_dtype(tensors))
    return norms


def _dtype(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the dtype of norms: float32 for half precision, in which a norm would have only three digits."""
    return torch.float32 if all(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors) else None


def _rows_of(layer: int, parts: Sequence[HeadSlice], lookup: ParameterLookup) -> list[_Rows]:
    """Join the slices of a layer in the same parameter if their rows follow each other, such as q and k of GPT-2."""
    by_parameter: dict[int, list[HeadSlice]] = defaultdict(list)
    for part in parts:
        by_parameter[lookup.index_of(part)].append(part)
    result = []
    for index, own in by_parameter.items():
        if len(own) == 1 and own[0].num_heads * own[0].dim == own[0].parameter().numel():
            result.append(_Rows(layer, own[0], index, None))
        elif (rows := _joint_rows(own)) is not None:
            result.append(_Rows(layer, own[0], index, partial(_narrow, own[0].axis, rows)))
        else:
            result += [_Rows(layer, part, index, part.take) for part in own]
    return result


def _joint_rows(parts: Sequence[HeadSlice]) -> slice | None:
    """Return the rows of some slices if they follow each other without gaps; else None."""
    if {type(part) for part in parts} != {HeadSlice} or len({part.axis for part in parts}) != 1:
        return None
    return as_slice(torch.cat([part.rows.flatten() for part in parts]).sort().values)


def _narrow(axis: int, rows: slice, grad: Tensor) -> Tensor:
    return grad.narrow(axis, rows.start, rows.stop - rows.start)
