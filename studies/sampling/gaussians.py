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
class Result:
    """Moments of samples relative to those of the target, with standard errors.

    Args:
        stiff: variance along the direction with the largest curvature, divided by that of the target.
        stiff_error: its standard error.
        slow: the same along the direction with the smallest curvature; for one dimension it is the same direction.
        slow_error: its standard error.
        mean: the coordinate of the mean that is furthest from zero, in standard deviations of the target.
        mean_error: its standard error.
        kurtosis: the largest over coordinates; 3 for a Gaussian.
    """

    stiff: float
    stiff_error: float
    slow: float
    slow_error: float
    mean: float
    mean_error: float
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
    every: int = 1,
    seed: int = 0,
) -> list[Result]:
    """Run chains from the targets themselves, and return the moments that they settle at.

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
        every=every,
        rms=torch.cat(deviations) if noise_in != "gradient" else (torch.cat(deviations).square() + 2 / lr).sqrt(),
        gradient_noise=torch.cat(noises),
        seed=seed,
    )
    results, first = [], 0
    for true in covariances:
        here = slice(first, first + len(true))
        first += len(true)
        values, directions = torch.linalg.eigh(true)  # smallest variance first
        squares = torch.einsum("cij,ik,jk->ck", moments.chain_squares[:, here, here], directions, directions)
        ratios, ratio_errors = _average(squares / values)
        means, mean_errors = _average(moments.chain_means[:, here] / true.diagonal().sqrt())
        far = int(means.abs().argmax())
        numbers = (ratios[0], ratio_errors[0], ratios[-1], ratio_errors[-1], means[far], mean_errors[far])
        results.append(Result(*(float(number) for number in numbers), float(moments.kurtosis[here].max())))
    return results


def _average(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard error over independent chains [C, D]."""
    return values.mean(0), values.std(0) / math.sqrt(len(values))
