"""Stochastic particle-optimisation sampling (Zhang et al., 2018), equation 5 of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles.rule import check_number
from repulsive.particles.svgd import SVGD
from repulsive.particles.svgd_settings import Unset

Noise = Literal["langevin", "released"]
NOISES: tuple[str, ...] = get_args(Noise)


@dataclass(frozen=True)
class SPOS(SVGD):
    r"""SVGD plus Langevin dynamics for each head.

    $$\phi_i = \phi_i^{\mathrm{SVGD}} - \beta^{-1} \nabla U_i + \sqrt{2 T / (\beta\,\epsilon\,\eta)}\;\xi_i$$

    where $\eta$ is the learning rate: under plain SGD a parameter takes the step $\epsilon\eta\,\phi$, and with this
    noise the stationary distribution is exp(-U / T). For other optimizers `repel` scales the noise to their step. With
    `noise_in="gradient"` they rescale it together with the gradient.

    There are two temperatures: `alpha` is that of the interaction, because SVGD with repulsive weight alpha is made for
    exp(-U / alpha), and `temperature` is that of the noise. By default both are equal. The published values differ:
    alpha = 0.01 and T = 1, which is `SPOS(temperature=1.0)`, or rule "spos-paper".

    Args:
        beta: inverse weight of the Langevin terms; the limit of large beta is SVGD.
        temperature: T; 1 if the loss is a sum over the data, 1 / N if it is a mean over N examples. None means alpha,
            but 1 if alpha is 0, "auto" or a schedule, which set no temperature, and with noise="released".
        noise: "langevin" as above; "released" multiplies it by the group's median |gradient|, as in the authors' code.

    Raises:
        RuleError: a setting is out of range or unknown.

    Example:
        >>> SPOS(alpha=0.01).temperature, SPOS(temperature=1.0).temperature, SPOS(alpha="auto").temperature
        (0.01, 1.0, 1.0)
    """

    beta: float = 1e6
    temperature: float = field(default=None, kw_only=True)  # type: ignore[assignment]  # __post_init__ sets it
    noise: Noise = field(default="langevin", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "stepsize", above=0)  # not "heads", as the noise depends on it
        check_number(self, "beta", above=0)
        if self.temperature is None or isinstance(self.temperature, Unset):  # Unset in copies with another alpha
            object.__setattr__(self, "temperature", Unset(self.default_temperature))
        check_number(self, "temperature", least=0)
        if self.noise not in NOISES:
            raise RuleError(f"SPOS(noise={self.noise!r}): choose one of {NOISES}")

    @property
    def default_temperature(self) -> float:
        """The value of `temperature` if the user does not set it."""
        alpha = self.alpha
        if isinstance(alpha, int | float) and alpha > 0 and self.noise == "langevin":
            return float(alpha)
        return 1.0

    @property
    def own_drive(self) -> float:
        return 1 / self.beta

    def noise_scale(self, lr: float) -> float:
        # The sign is that of -epsilon * phi; for symmetric noise it makes no difference.
        stepsize = float(self.stepsize)
        return -stepsize * math.sqrt(2 * self.temperature / (self.beta * stepsize * lr)) if lr > 0 else 0.0

    @property
    def scales_noise(self) -> bool:
        return self.noise == "released"

    def noise_factor(self, grad: Tensor) -> Tensor:
        return grad.abs().flatten(-2).median(dim=-1).values
