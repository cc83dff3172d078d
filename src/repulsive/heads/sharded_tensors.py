"""Recognise tensors that are distributed over ranks, without importing torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:  # torch.distributed.tensor is imported only where weights are sharded
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Check whether a tensor is distributed over ranks (FSDP2, tensor parallel)."""
    return hasattr(tensor, "placements")
