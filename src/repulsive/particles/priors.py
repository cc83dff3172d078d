"""Priors over one head's weights. What a rule needs of a prior is the gradient of -log p, linear in theta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from repulsive.errors import RuleError


@dataclass(frozen=True)
class Uniform:
    """Every weight is as likely as every other: the paper's choice. Its gradient is zero."""

    @property
    def precision(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Gaussian:
    r"""$p_0 = N(0, \mathrm{std}^2 I)$, so $\nabla U$ gains $\theta / (N\,\mathrm{std}^2)$.

    Args:
        std: standard deviation of one weight.
        num_data: N, the number of data the loss is a *mean* over; 1 where the loss is a sum.
    """

    std: float = 1.0
    num_data: float = 1.0

    def __post_init__(self) -> None:
        for name in ("std", "num_data"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise RuleError(f"Gaussian({name}={value!r}): must be a positive number")

    @property
    def precision(self) -> float:
        return 1 / (self.num_data * self.std**2)


Prior = Uniform | Gaussian
PriorName = Literal["uniform", "gaussian"]
NAMED: dict[str, Prior] = {"uniform": Uniform(), "gaussian": Gaussian()}


def resolve(prior: PriorName | Prior) -> Prior:
    """A prior by name or as given."""
    if isinstance(prior, str):
        if prior not in NAMED:
            raise RuleError(f"prior={prior!r} is unknown; choose {sorted(NAMED)} or give Gaussian(std, num_data)")
        return NAMED[prior]
    if isinstance(prior, type) or not hasattr(prior, "precision"):
        raise RuleError(f"prior={prior!r} is no prior; choose {sorted(NAMED)} or give Gaussian(std, num_data)")
    return prior
