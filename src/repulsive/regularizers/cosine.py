"""Cosine similarity between the weights of heads: the regulariser the paper's GraphWriter baseline and ladder use."""

from torch import Tensor
from torch.nn import functional as F


def cosine(theta: Tensor) -> Tensor:
    r"""$\frac1M \sum_{i < j} 2 \cos(\theta_i, \theta_j) + 1$, that is $\frac1M \sum_{ij} \cos(\theta_i, \theta_j)$.

    Its gradient with respect to head i is twice the repulsive term of `CosineLadder("regulariser")`, where every head
    is derived with the others held still.

    Args:
        theta: heads [..., M, D], with gradient.

    Returns:
        A scalar, the mean over leading dimensions.
    """
    total = F.normalize(theta, dim=-1).sum(-2)  # [..., D]
    return (total.square().sum(-1) / theta.shape[-2]).mean()
