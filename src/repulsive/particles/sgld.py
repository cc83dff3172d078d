"""Stochastic gradient Langevin dynamics (Welling and Teh, 2011): noise without interaction between heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from repulsive.particles import priors
from repulsive.particles.gram import Gram
from repulsive.particles.kernels import SHORTEST
from repulsive.particles.logits import cosines, mean_and_largest
from repulsive.particles.priors import Prior, PriorName
from repulsive.particles.rule import Coefficients, Measure, RadialForm, Rule, check_number, mean_distance


@dataclass(frozen=True)
class SGLD(Rule):
    r"""Langevin dynamics for each head: it follows its own gradient, plus noise.

    $$\phi_i = -\nabla U_i + \sqrt{2 T / (\epsilon\,\eta)}\;\xi_i$$

    where $\eta$ is the learning rate. With this scale plain SGD samples exp(-U / T) at any learning rate.

    Args:
        stepsize: epsilon.
        temperature: T; 1 if the loss is a sum over the data, 1 / N if it is a mean over N examples.
        prior: "uniform", "gaussian", or `Gaussian(std, num_data)`.

    Raises:
        RuleError: a setting is out of range or unknown.
    """

    stepsize: float = 0.1
    temperature: float = 1.0
    prior: PriorName | Prior = field(default="uniform", kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "stepsize", above=0)
        check_number(self, "temperature", least=0)
        priors.resolve(self.prior)

    def coefficients(self, theta: Gram, grad: Gram | None = None, *, step: int = 0) -> Coefficients:
        products = theta.products
        eye = torch.eye(theta.num_particles, dtype=products.dtype, device=products.device)
        drive = self.stepsize * eye.expand(*products.shape[:-2], -1, -1)
        precision = priors.resolve(self.prior).precision
        measure = None
        if grad is not None:
            zero = torch.zeros_like(products[..., 0, 0])
            distance = mean_distance(theta.squared_distances)
            similarity = mean_and_largest(cosines(theta.inner, SHORTEST))
            measure = Measure(grad.norm_of(drive), zero, torch.full_like(zero, torch.nan), distance, zero, *similarity)
        return Coefficients(drive, precision * drive if precision else None, measure)

    @property
    def is_scheduled(self) -> bool:
        return False

    def radial_form(self, step: int) -> RadialForm | None:
        if type(self).coefficients is not SGLD.coefficients:
            return None
        return RadialForm(
            kernel="none",
            bandwidth="paper",
            on_sphere=False,
            stepsize=self.stepsize,
            alpha=0.0,
            own_drive=1.0,
            smoothing=0.0,
            precision=priors.resolve(self.prior).precision,
        )

    def direction(self, theta: Tensor, grad: Tensor, step: int) -> Tensor:
        precision = priors.resolve(self.prior).precision  # without interaction no Gram matrix is needed
        return self.stepsize * (grad + precision * theta if precision else grad)

    def drive_scale(self, heads: int) -> float:
        return self.stepsize

    def noise_scale(self, lr: float) -> float:
        return -self.stepsize * math.sqrt(2 * self.temperature / (self.stepsize * lr)) if lr > 0 else 0.0
