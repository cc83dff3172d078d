r"""Repulsion between the outputs of networks, instead of between their weights.

Two networks with different weights can compute the same function, so distance between weights says little about
distance between functions. D'Angelo and Fortuin (2021), "Repulsive deep ensembles are Bayesian", compare members of an
ensemble by their outputs on a batch, and send the repulsion back through each network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles import bandwidths, kernels
from repulsive.particles.bandwidths import Bandwidth
from repulsive.particles.collapse import warn_if_equal
from repulsive.particles.gram import apply_matrix, compute_dtype, full_precision, gram
from repulsive.particles.kernels import KernelName, Radial


def function_repulsion(outputs: Tensor, kernel: KernelName | Radial = "rbf", bandwidth: Bandwidth = "paper") -> Tensor:
    r"""Gradient of the log density of members in function space, which a descent step lowers.

    $$g_i = \nabla_{f_i} \log \sum_j \kappa(f_i, f_j) = \frac{\sum_j \nabla_{f_i} \kappa(f_i, f_j)}
      {\sum_j \kappa(f_i, f_j)}$$

    with the $f_j$ of the other members and the bandwidth held fixed. It is the repulsive term of their Wasserstein
    gradient flow, with a kernel density estimate of the members.

    Args:
        outputs: [M, ...]: outputs of M members on the same inputs. All dimensions after the first are one vector.
        kernel: "rbf" or "imq", or another `Radial` kernel.
        bandwidth: "paper", "released", "released-lower", a number h, or a callable from squared distances to h.

    Returns:
        A gradient shaped as `outputs`, without a graph. Add it, times a weight, to the gradient of the loss:
        `torch.autograd.backward([loss, outputs], [None, weight * function_repulsion(outputs)])`. With a loss that is a
        mean over N training examples for each member, weight = 1 / N samples the posterior at temperature 1.

    Raises:
        RuleError: the kernel is not a function of the distance, or `outputs` has fewer than two dimensions.

    Example:
        >>> outputs = torch.tensor([[0.0], [1.0]])
        >>> function_repulsion(outputs, bandwidth=1.0)
        tensor([[ 0.5379],
                [-0.5379]])
    """
    chosen = kernels.resolve(kernel)
    if not isinstance(chosen, Radial):
        raise RuleError(f"kernel={kernel!r}: expected a kernel of the distance between outputs, 'rbf' or 'imq'")
    if outputs.ndim < 2:
        raise RuleError(f"expected outputs [M, ...] of M members on a batch, got shape {list(outputs.shape)}")
    theta = outputs.detach().flatten(1)
    theta = theta.to(compute_dtype(theta))  # [M, F]
    warn_if_equal(theta)
    with torch.no_grad(), full_precision(theta.device):
        interaction = chosen.interact(gram(theta), bandwidths.check(bandwidth), "weights")
        force = interaction.repulsion / interaction.values.sum(-1, keepdim=True)  # [M, M]
        result = -apply_matrix(force, theta)
    return result.view_as(outputs).to(outputs.dtype)
