"""Plain parameters in place of sharded ones: the part of a weight that this rank works on."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.sharding.local_weights import LocalWeight
from repulsive.repulsion.sharding.shard_layout import MeshDims


class StandIn(nn.Module):
    """A plain parameter and gradient that hold this rank's part of a sharded weight during an update.

    The tables of the fused update read it as they read any unsharded weight. If the rank's part is empty, it is one
    column of zeros, which is not counted.

    Args:
        source: the sharded weight.
    """

    def __init__(self, source: LocalWeight) -> None:
        super().__init__()
        self.source = source
        self.weight = nn.Parameter(torch.empty(0))
        self._empty: tuple[Tensor, Tensor] | None = None

    @property
    def id(self) -> int:
        """Id of the sharded parameter, for learning rates."""
        return id(self.source.part.parameter())

    @property
    def local_id(self) -> int:
        """Id of the plain parameter."""
        return id(self.weight)

    def load(self) -> None:
        """Hold the weight and gradient that the source has loaded: themselves if contiguous, otherwise as copies."""
        theta, grad = _waited(self.source.weights()), _waited(self.source.gradients())
        if theta.numel() == 0:
            theta, grad = self._one_column(theta)
        self.weight.data = theta.contiguous()
        self.weight.grad = grad.contiguous().to(theta.dtype)

    def write_back(self) -> None:
        """Write the new gradient to the source, if `load` made a copy."""
        grad, target = self.weight.grad, _waited(self.source.gradients())
        if grad is not None and target.numel() and grad.data_ptr() != target.data_ptr():
            target.copy_(grad)

    def release(self) -> None:
        """Drop weight and gradient: keeping them would keep their memory in use until the next update."""
        self.weight.grad = None
        self.weight.data = torch.empty(0)

    def _one_column(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        if self._empty is None:
            shape = [max(1, size) for size in theta.shape]
            self._empty = theta.new_zeros(shape), theta.new_zeros(shape)
        return self._empty


def place_in_head(part: HeadSlice, weight: LocalWeight) -> tuple[int, int, int, int]:
    """Return the place of this rank's part of a head in the whole head, as `combine_kernel` needs it.

    Row-major, the part consists of runs of adjacent elements, one for each index before the sharded dimension.

    Returns:
        Length of a run, distance between the starts of two runs, index of the first element, elements of a whole head.
    """
    if weight.layout is None or weight.layout.columns.numel() == 0:
        return 1, 1, 0, part.dim
    shape, local = part.parameter().shape, weight.weights().shape
    sizes = [(shape[dim], local[dim]) for dim in range(len(shape)) if dim != part.axis]
    split = next((index for index, (whole, own) in enumerate(sizes) if whole != own), 0)
    run, distance = math.prod(own for _, own in sizes[split:]), math.prod(whole for whole, _ in sizes[split:])
    return run, distance, int(weight.layout.columns[0]), part.dim


def is_counted(weight: LocalWeight, dims: MeshDims) -> bool:
    """Check whether this rank counts the products of a weight in a sum over mesh dimensions.

    Of a weight with copies along one of these dimensions, only the first rank does. An empty part counts nowhere.
    """
    is_empty = weight.layout is not None and weight.layout.columns.numel() == 0
    copied = [(mesh, dim) for mesh, dim in dims if (mesh, dim) not in weight.summed_dims]
    return not is_empty and all(mesh.get_local_rank(dim) == 0 for mesh, dim in copied)


def _waited(tensor: Tensor) -> Tensor:
    """Return a tensor that may be the pending result of a collective call as a plain one, with the same memory."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()
