"""Stochastic particle-optimisation sampling (Zhang et al., 2018), equation 5 of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles.rule import check_number
from repulsive.particles.svgd import SVGD

Noise = Literal["langevin", "released"]
NOISES: tuple[str, ...] = get_args(Noise)


@dataclass(frozen=True)
class SPOS(SVGD):
    r"""SVGD plus Langevin dynamics for each head.

    $$\phi_i = \phi_i^{\mathrm{SVGD}} - \beta^{-1} \nabla U_i + \sqrt{2 T / (\beta\,\epsilon\,\eta)}\;\xi_i$$

    where $\eta$ is the learning rate: under plain SGD a parameter takes the step $\epsilon\eta\,\phi$, and with this
    noise the stationary distribution is exp(-U / T). Other optimizers rescale the noise together with the gradient,
    unless `repel(noise_in="optimizer")` is used.

    There are two temperatures: `alpha` is that of the interaction, because SVGD with repulsive weight alpha is made for
    exp(-U / alpha), and `temperature` is that of the noise. The published defaults, 0.01 and 1, differ; for one
    distribution give both the same value.

    Args:
        beta: inverse weight of the Langevin terms; the limit of large beta is SVGD.
        temperature: T; 1 if the loss is a sum over the data, 1 / N if it is a mean over N examples.
        noise: "langevin" as above; "released" multiplies it by the group's median |gradient|, as in the authors' code.

    Raises:
        RuleError: a setting is out of range or unknown.
    """

    beta: float = 1e6
    temperature: float = field(default=1.0, kw_only=True)
    noise: Noise = field(default="langevin", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "temperature", least=0)
        if self.noise not in NOISES:
            raise RuleError(f"SPOS(noise={self.noise!r}): choose one of {NOISES}")

    @property
    def own_drive(self) -> float:
        return 1 / self.beta

    def noise_scale(self, lr: float) -> float:
        # The sign is that of -epsilon * phi; for symmetric noise it makes no difference.
        return -self.stepsize * math.sqrt(2 * self.temperature / (self.beta * self.stepsize * lr)) if lr > 0 else 0.0

    @property
    def scales_noise(self) -> bool:
        return self.noise == "released"

    def noise_factor(self, grad: Tensor) -> Tensor:
        return grad.abs().flatten(-2).median(dim=-1).values
