"""A rule: every head follows its own gradient, times stepsize / M."""

from dataclasses import dataclass

import torch

from repulsive.particles.gram import Gram
from repulsive.particles.rule import Coefficients, Rule


@dataclass(frozen=True)
class Scaled(Rule):
    stepsize: float = 0.1

    def coefficients(self, theta: Gram, grad: Gram | None = None, *, step: int = 0) -> Coefficients:
        heads = theta.num_particles
        eye = torch.eye(heads, dtype=theta.products.dtype, device=theta.products.device)
        drive = (self.stepsize / heads) * eye.expand(*theta.products.shape[:-2], -1, -1)  # [..., M, M]
        return Coefficients(drive, force=None, measure=None)
