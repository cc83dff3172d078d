"""The penalty of Lin et al. (2017) on attention weights."""

import torch
from torch import Tensor

from repulsive.regularizers.masked import mean_of


def frobenius(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\|A A^\top - I\|_F^2$, averaged over sentences (and query positions): heads should look at different words.

    As printed in the paper: the Gram matrix is heads x heads and the norm is squared. The authors' code penalises words
    x words instead, and a common port does not square: coefficients do not transfer.

    Args:
        weights: attention of every head over the words, [..., M, words], summing to 1.
        mask: which of [...] count, bool; None: all. Where none does, the penalty is 0; what the others hold, NaN
            included, plays no part.

    Returns:
        A scalar; all heads on one word cost M (M - 1).
    """
    if mask is not None:
        weights = torch.where(mask[..., None, None], weights, 0)
    gram = weights @ weights.mT  # [..., M, M]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    penalty = (gram - eye).square().sum((-2, -1))  # [...]
    return mean_of(penalty, mask)
