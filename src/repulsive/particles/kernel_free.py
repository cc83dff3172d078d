"""SVGD without its kernel: a control that shows what the kernel contributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from repulsive.errors import RuleError
from repulsive.particles import bandwidths
from repulsive.particles.gram import Gram
from repulsive.particles.kernels import Interaction
from repulsive.particles.rule import RadialForm
from repulsive.particles.svgd import SVGD


@dataclass(frozen=True)
class KernelFree(SVGD):
    r"""SVGD with its kernel replaced by the limit for heads of many dimensions, where all distances are equal.

    With the paper's bandwidth, $h = \mathrm{med}^2 / \log M$, two heads at the median distance have $\kappa = 1/M$.
    With this value for every pair, and $\bar\theta$ the mean head,

    $$\phi_i = -\frac1M \sum_j \left(s\,\bar K_{ij} + (1 - s)\,\delta_{ij}\right) \nabla U_j
      + \alpha\,\frac{2 \log M}{M\,\mathrm{med}^2}\,(\theta_i - \bar\theta), \qquad
      \bar K_{ii} = 1,\; \bar K_{ij} = \frac1M.$$

    No pair of heads is treated differently from another: the repulsion is weight decay with a negative sign on the
    deviation from the mean head. Settings are those of `SVGD`, except for kernel, bandwidth and space.

    Raises:
        RuleError: a setting is out of range, or a kernel, bandwidth or space is given.

    Example:
        >>> theta = torch.eye(4)
        >>> push = KernelFree(stepsize=1.0, alpha=1.0).gradient(theta, torch.zeros(4, 4))
        >>> bool(torch.allclose(push / (theta - theta.mean(0)), push[0, 0] / (1 - 1 / 4)))
        True
    """

    def __post_init__(self) -> None:
        if self.kernel != "rbf" or self.bandwidth != "paper" or self.space != "weights":
            raise RuleError(
                "KernelFree has no kernel, takes the paper's bandwidth and acts between weights; "
                "leave kernel, bandwidth and space out, or use SVGD"
            )
        super().__post_init__()

    def interact(self, theta: Gram) -> Interaction:
        heads, d2 = theta.num_particles, theta.squared_distances
        h = bandwidths.resolve(self.bandwidth, d2, theta.squared_norms.mean(-1))  # [...]
        eye = torch.eye(heads, dtype=d2.dtype, device=d2.device)
        values = (eye + (1 - eye) / heads).expand_as(d2)
        weight = 2 / torch.where(h == 0, 1, h)  # h is zero only if all heads are, and then there is no force
        return Interaction(values, weight[..., None, None] * (eye - 1 / heads), h)

    def radial_form(self, step: int) -> RadialForm | None:
        return self._form(KernelFree, "constant", step)
