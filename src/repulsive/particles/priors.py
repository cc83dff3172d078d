"""Priors over the weights of one head. Rules use the gradient of -log p, which is `precision` times theta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from repulsive.errors import RuleError


@dataclass(frozen=True)
class Uniform:
    """The uniform prior, as in the paper: its gradient is zero."""

    @property
    def precision(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Gaussian:
    r"""The prior $p_0 = N(0, \mathrm{std}^2 I)$, which adds $\theta / (N\,\mathrm{std}^2)$ to $\nabla U$.

    Args:
        std: standard deviation of one weight.
        num_data: N, the number of examples the loss is a *mean* over; 1 if the loss is a sum.
    """

    std: float = 1.0
    num_data: float = 1.0

    def __post_init__(self) -> None:
        for name in ("std", "num_data"):
            value = getattr(self, name)
            try:
                is_valid = bool(value > 0) and math.isfinite(value) and not isinstance(value, bool)
            except TypeError:
                is_valid = False
            if not is_valid:
                raise RuleError(f"Gaussian({name}={value!r}): must be a positive number")

    @property
    def precision(self) -> float:
        return 1 / (self.num_data * self.std**2)


Prior = Uniform | Gaussian
PriorName = Literal["uniform", "gaussian"]
NAMED: dict[str, Prior] = {"uniform": Uniform(), "gaussian": Gaussian()}


def resolve(prior: PriorName | Prior) -> Prior:
    """Resolve a prior setting: look up a name, and return a prior unchanged.

    Raises:
        RuleError: the name is unknown, or the setting is neither a name nor a prior.
    """
    if isinstance(prior, str):
        if prior not in NAMED:
            raise RuleError(f"prior={prior!r} is unknown; choose {sorted(NAMED)} or give Gaussian(std, num_data)")
        return NAMED[prior]
    if isinstance(prior, type) or not hasattr(prior, "precision"):
        raise RuleError(f"prior={prior!r} is not a prior; choose {sorted(NAMED)} or give Gaussian(std, num_data)")
    return prior
