"""Gaussian targets, side by side in the columns of one set of chains.

The optimizer has one learning rate. Each target is scaled so that the step along its stiffest direction, times the
curvature, is as wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from studies.sampling.chains import Method, sample
from torch import Tensor

from repulsive.repulsion.settings import NoisePlace

CORRELATION = 0.6
SHAPES = {
    "N(0, 1)": torch.eye(1),
    "correlated": torch.tensor([[1.0, CORRELATION], [CORRELATION, 1.0]]),
}


@dataclass(frozen=True)
class Target:
    """A Gaussian, and noise in its gradients.

    Args:
        shape: key of `SHAPES`.
        step: step along the stiffest direction, times its curvature.
        noise: standard deviation of gradient noise, divided by that of the gradients.
    """

    shape: str
    step: float
    noise: float = 0.0

    def precision(self, method: Method, lr: float) -> Tensor:
        """The inverse covariance [D, D] that gives `step` at a learning rate."""
        unscaled = torch.linalg.inv(SHAPES[self.shape])
        stiffest = float(torch.linalg.eigvalsh(unscaled).max())
        ratio = self.step / (lr * method.sum_of_steps * stiffest)
        if method.is_normalised:
            ratio = (ratio * math.sqrt(float(unscaled[0, 0]) * (1 + self.noise**2))) ** 2
        return ratio * unscaled


@dataclass(frozen=True)
class Variances:
    """Variances of samples divided by those of the target, and how far the mean is off.

    Args:
        stiff: along the direction with the largest curvature.
        slow: along the one with the smallest; the same for one dimension.
        mean: the largest distance of the mean from zero, in standard deviations of the target.
        kurtosis: the largest over coordinates; 3 for a Gaussian.
    """

    stiff: float
    slow: float
    mean: float
    kurtosis: float


def measure(
    method: Method,
    noise_in: NoisePlace,
    targets: Sequence[Target],
    *,
    lr: float,
    chains: int,
    steps: int,
    burn_in: int,
    seed: int = 0,
) -> list[Variances]:
    """Run chains from the targets themselves, and return the variances that they settle at.

    Decoupled weight decay is a Gaussian prior with precision decay * (root mean square of gradients), which targets
    include.
    """
    precisions = [target.precision(method, lr) for target in targets]
    deviations, noises, covariances = [], [], []
    for target, precision in zip(targets, precisions, strict=True):
        own = precision.diagonal().sqrt()  # standard deviation of gradients under the target
        noises.append(target.noise * own)
        deviations.append(own * math.sqrt(1 + target.noise**2))
        covariances.append(torch.linalg.inv(precision + method.decay * torch.diag(deviations[-1])))
    joint, covariance = torch.block_diag(*precisions), torch.block_diag(*covariances)
    source = torch.Generator().manual_seed(seed + 1)
    start = torch.randn(chains, len(joint), generator=source) @ torch.linalg.cholesky(covariance).T
    moments = sample(
        method,
        noise_in,
        lambda theta: theta @ joint,
        start,
        lr=lr,
        steps=steps,
        burn_in=burn_in,
        rms=torch.cat(deviations) if noise_in != "gradient" else (torch.cat(deviations).square() + 2 / lr).sqrt(),
        gradient_noise=torch.cat(noises),
        seed=seed,
    )
    results, first = [], 0
    for true in covariances:
        here = slice(first, first + len(true))
        first += len(true)
        values, directions = torch.linalg.eigh(true)  # smallest variance first
        ratios = (directions.T @ moments.covariance[here, here] @ directions).diagonal() / values
        mean = (moments.mean[here] / true.diagonal().sqrt()).abs().max()
        kurtosis = moments.kurtosis[here].max()
        results.append(Variances(float(ratios[0]), float(ratios[-1]), float(mean), float(kurtosis)))
    return results
