"""The parameters behind many slices, looked up by name at every step: the one loop the host runs there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice


class Owners:
    """The distinct parameters of slices, in order of appearance."""

    def __init__(self, parts: Iterable[HeadSlice]) -> None:
        first: dict[tuple[int, str], HeadSlice] = {}
        for part in parts:
            first.setdefault((id(part.module), part.attribute), part)
        self.parts = list(first.values())
        self._numbers = {key: number for number, key in enumerate(first)}
        self._slots = [(part.module, part.attribute) for part in self.parts]

    def number(self, part: HeadSlice) -> int:
        """Which of the parameters a slice lies in."""
        return self._numbers[id(part.module), part.attribute]

    def look(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Parameters and gradients as they are now; wrappers replace the former, every backward pass the latter.

        Raises:
            UnsupportedWeights: a module no longer has a tensor of that name.
        """
        try:  # registered parameters are read where modules keep them: a fifth of the time of an attribute
            parameters: list[Tensor] = [module._parameters[name] for module, name in self._slots]  # type: ignore[misc]
            return parameters, [parameter.grad for parameter in parameters]
        except (KeyError, AttributeError):
            parameters = [part.parameter() for part in self.parts]
            return parameters, [parameter.grad for parameter in parameters]


def claimed_twice(groups: Sequence[HeadGroup]) -> tuple[str, str] | None:
    """The names of the first two groups that have rows of a parameter in common, if there are any."""
    claims: dict[tuple[int, int], Tensor] = {}  # of a parameter's features: the number of the group, -1 for none
    for number, group in enumerate(groups):
        for part in group.slices:
            parameter, rows = part.parameter(), part.rows.flatten().cpu()
            claim = claims.setdefault((id(parameter), part.axis), torch.full((parameter.shape[part.axis],), -1))
            taken = int(claim[rows].max())
            if taken >= 0:
                return groups[taken].name, group.name
            claim[rows] = number
    return None
