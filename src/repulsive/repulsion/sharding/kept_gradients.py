"""Gradients that stay on their ranks while weights are moved, for rules that do not mix the gradients of heads.

Such a rule multiplies all gradients of a group by one number. If weights have whole heads on different ranks, only the
weights have to be moved, and the force back: two shares of the weights instead of three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.sharding.local_weights import LocalWeight
from repulsive.repulsion.sharding.shard_layout import has_heads_on_other_ranks, local_rows

ParameterKey = tuple[int, str]


def can_be_kept(part: HeadSlice) -> bool:
    """Check whether the gradient of a slice's weight can stay on its ranks: each element lies on one rank of a sum."""
    return has_heads_on_other_ranks(part) and part.parameter().ndim > 1


@dataclass(frozen=True)
class Rows:
    """The stored rows of one weight on this rank that belong to one group: their positions, None for all rows."""

    group: int
    positions: Tensor | None


class KeptGradients:
    """Stored gradients of weights whose rows are sharded.

    Args:
        groups: the groups of heads.
        weights: their weights by module and attribute; `can_be_kept` is True for each.
    """

    def __init__(self, groups: Sequence[HeadGroup], weights: Mapping[ParameterKey, LocalWeight]) -> None:
        self._weights = list(weights.values())
        self._heads = [group.num_heads for group in groups]
        self._rows: dict[LocalWeight, list[Rows]] = {weight: [] for weight in self._weights}
        for index, group in enumerate(groups):
            for part in group.slices:
                rows = _stored_rows(part)
                if rows is None or rows.numel():
                    self._rows[weights[id(part.module), part.attribute]].append(Rows(index, rows))

    def squared_norms(self) -> Tensor:
        """Compute this rank's part of the squared norm of each group's gradients: float64 [groups]."""
        norms: list[Tensor] = []
        groups: list[int] = []
        for weight in self._weights:
            grad = weight.stored("grad")
            for rows in self._rows[weight]:
                own = grad if rows.positions is None else grad.index_select(weight.part.axis, rows.positions)
                norms.append(torch.linalg.vector_norm(own, dtype=torch.float64))
                groups.append(rows.group)
        device = self._weights[0].stored("grad").device
        if not norms:
            return torch.zeros(len(self._heads), dtype=torch.float64, device=device)
        squares = torch.stack(norms).square().unbind()
        totals = [torch.zeros((), dtype=torch.float64, device=device)] * len(self._heads)
        for group, square in zip(groups, squares, strict=True):
            totals[group] = totals[group] + square
        return torch.stack(totals)

    def factors(self, by_heads: Mapping[int, float]) -> dict[LocalWeight, float | Tensor]:
        """Return the factor on each stored gradient: one number, or a tensor of one column if rows differ.

        Args:
            by_heads: number of heads of a group -> factor on its gradients. Rows outside of all groups get 1.
        """
        result: dict[LocalWeight, float | Tensor] = {}
        for weight in self._weights:
            members = self._rows[weight]
            if len(members) == 1 and members[0].positions is None:
                result[weight] = by_heads[self._heads[members[0].group]]
                continue
            local = weight.stored("grad")
            shape = [1] * local.ndim
            shape[weight.part.axis] = local.shape[weight.part.axis]
            factor = torch.ones(shape, dtype=torch.float32, device=local.device)  # also for weights in half precision
            for rows in members:
                assert rows.positions is not None
                factor.index_fill_(weight.part.axis, rows.positions, by_heads[self._heads[rows.group]])
            result[weight] = factor
        return result


def _stored_rows(part: HeadSlice) -> Tensor | None:
    """Return the positions of a slice's rows among the rows that this rank stores; None if they are all rows."""
    parameter = part.parameter()
    assert is_sharded(parameter)
    if part.rows.numel() == parameter.shape[part.axis]:
        return None
    here = local_rows(part, parameter)  # [stored rows]
    return torch.isin(here, part.rows.to(here.device)).nonzero().flatten()
