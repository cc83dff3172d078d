r"""Variances that are known in advance, as multiples of the target's.

Along a direction with effective step s (step times curvature), samples have three known errors:

- *Steps are finite.* Plain SGD has 1 / (1 - s / 2) times the variance; momentum changes the formula.
- *Gradients are noisy.* Gradient noise with variance V multiplies the temperature by 1 + eta V / (2 T).
- *The second moment v follows the weights.* The time that chains spend at a place is proportional to sqrt(v), which is
  large where gradients are large. If v averages over W steps, and gradient noise is r times as large as gradients, then
  the variance of a Gaussian in one dimension is, to first order in the fluctuations of v,

$$1 + \frac{1}{(1 + r^2)(1 + 2 s W)}$$
"""

from __future__ import annotations

import torch
from studies.sampling.chains import Method
from studies.sampling.gaussians import SHAPES, Target


def known_variances(method: Method, target: Target) -> tuple[float, float]:
    """Variances along the stiff and the slow direction, by finite steps and gradient noise: as if v were constant."""
    precision = torch.linalg.inv(SHAPES[target.shape].double())
    curvatures = torch.linalg.eigvalsh(precision)
    stiffest = float(curvatures.max())
    temperature = 1 + target.step * target.noise**2 * float(precision[0, 0]) / stiffest / 2
    stiff, slow = (
        temperature * discretised(method, target.step * float(curvature) / stiffest)
        for curvature in (curvatures[-1], curvatures[0])
    )
    return stiff, slow


def discretised(method: Method, step: float) -> float:
    """Variance of samples at an effective step, solved from the linear recursion of (weight, momentum buffer)."""
    mu = method.momentum
    lr = step * (1 - mu)
    # buffer' = mu buffer + theta + n;  theta' = theta - lr buffer', or theta - lr (theta + n + mu buffer') for Nesterov
    into_buffer = torch.tensor([1.0, mu, 1.0], dtype=torch.float64)  # from theta, buffer, n
    gradient = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    direction = gradient + mu * into_buffer if method.options.get("nesterov") else into_buffer
    into_theta = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) - lr * direction
    both = torch.stack([into_theta, into_buffer])  # [2, 3]
    matrix, gain = both[:, :2], both[:, 2]
    system = torch.eye(4, dtype=torch.float64) - torch.kron(matrix, matrix)
    return float(torch.linalg.solve(system, torch.outer(gain, gain).flatten() * 2 / step)[0])


def second_moment_excess(method: Method, target: Target) -> float:
    """Additional variance of a Gaussian in one dimension, because the second moment follows the weights."""
    if not method.is_normalised or method.is_fixed:
        return 0.0
    return 1 / ((1 + target.noise**2) * (1 + 2 * target.step * method.window))
