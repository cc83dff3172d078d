"""Find groups of heads that share weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup


def find_overlap(groups: Sequence[HeadGroup]) -> tuple[str, str] | None:
    """Return the names of the first two groups that share rows of a parameter; None if no groups do."""
    owners: dict[tuple[int, int], Tensor] = {}  # for each row of a parameter, the index of its group; -1 for none
    for index, group in enumerate(groups):
        for part in group.slices:
            parameter, rows = part.parameter(), part.rows.flatten().cpu()
            owner = owners.setdefault(
                (id(parameter), part.axis), torch.full((parameter.shape[part.axis],), -1, device="cpu")
            )
            other = int(owner[rows].max())
            if other >= 0:
                return groups[other].name, group.name
            owner[rows] = index
    return None
