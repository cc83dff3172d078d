r"""Penalties on attention that are added to the loss: the paper's baselines. Each takes tensors and returns a scalar.

`on_outputs`, `on_subspaces` and `on_positions` are the disagreement regularizers of Li et al. (2018), written as
losses: add $\lambda$ times the mean similarity of heads. Their sums run over all pairs i, j of M heads, so i = j adds a
constant 1 / M to the cosines. No pair is formed: for unit vectors $\sum_{ij} u_i \cdot u_j = |\sum_i u_i|^2$.

A zero vector has cosine 0 with all others, and receives no gradient. Positions that a mask excludes may hold NaN, and
receive no gradient. Cosines of half-precision tensors are computed in float32.
"""

import torch
from torch import Tensor

__all__ = ["cosine", "frobenius", "on_outputs", "on_positions", "on_subspaces"]


def cosine(theta: Tensor) -> Tensor:
    r"""$\frac1M \sum_{ij} \cos(\theta_i, \theta_j)$ between the weights of heads.

    The regularizer of the paper's GraphWriter baseline, and the first rung of the ladder in appendix C.6. Its gradient
    with respect to head i is twice the repulsive term of `CosineLadder("regulariser")`, which differentiates each head
    with the others held constant.

    Args:
        theta: heads [..., M, D], with gradient.

    Returns:
        A scalar, the mean over leading dimensions.
    """
    total = _unit(theta).sum(-2)  # [..., D]
    return (total.square().sum(-1) / theta.shape[-2]).mean()


def frobenius(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\|A A^\top - I\|_F^2$ of attention weights (Lin et al., 2017), averaged over sentences and query positions.

    As printed in the paper: the Gram matrix is heads x heads and the norm is squared. The authors' code penalises a
    words x words matrix instead, and a common port does not square the norm, so coefficients do not transfer.

    Args:
        weights: attention of every head over the words, [..., M, words]; each row sums to 1.
        mask: which entries of [...] to include, bool; None: all. Excluded entries may hold NaN. If none is included,
            the penalty is 0.

    Returns:
        A scalar; if all heads attend to the same single word it is M (M - 1).
    """
    if mask is not None:
        weights = torch.where(mask[..., None, None], weights, 0)
    gram = weights @ weights.mT  # [..., M, M]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    penalty = (gram - eye).square().sum((-2, -1))  # [...]
    return _masked_mean(penalty, mask)


def on_outputs(outputs: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} \cos(O_i, O_j)$ of head outputs, averaged over positions: the paper's "+ R".

    Args:
        outputs: output of each head, [B, M, T, d].
        mask: positions to include, bool [B, T]; None: all.

    Returns:
        A scalar between 0 and 1.
    """
    return _mean_cosine(outputs, mask)


def on_subspaces(values: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} \cos(V_i, V_j)$ of the heads' values, averaged over positions.

    Args:
        values: values of each head, [B, M, S, d].
        mask: positions to include, bool [B, S]; None: all.
    """
    return _mean_cosine(values, mask)


def on_positions(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} |A_i \odot A_j|$ of attention weights, summed over keys and averaged over queries.

    Args:
        weights: attention of each head, [B, M, T, S], not negative.
        mask: queries to include, bool [B, T]; None: all.
    """
    return _mean_square(_without_masked(weights, mask), mask)


def _mean_cosine(x: Tensor, mask: Tensor | None) -> Tensor:
    return _mean_square(_unit(_without_masked(x, mask)), mask)


def _mean_square(x: Tensor, mask: Tensor | None) -> Tensor:
    """Average the squared length of the mean over heads: [B, M, T, d] -> scalar."""
    return _masked_mean(x.sum(1).square().sum(-1) / x.shape[1] ** 2, mask)


def _unit(x: Tensor) -> Tensor:
    """Normalise rows to unit length; keep zero rows, with a gradient of zero.

    In float16, squares overflow, and the small number with which `F.normalize` protects zero rows is zero.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide / torch.where(norm == 0, torch.inf, norm)


def _without_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set positions [B, T] that a mask excludes to zero, so that NaN there has no gradient: [B, M, T, d]."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0)


def _masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the entries where `mask` is true, 0 if there are none; no indexing, which would synchronise a GPU."""
    if mask is None:
        return x.mean()
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)
