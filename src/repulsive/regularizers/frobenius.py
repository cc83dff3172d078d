"""The penalty of Lin et al. (2017) on attention weights."""

import torch
from torch import Tensor


def frobenius(weights: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""$\|A A^\top - I\|_F^2$, averaged over sentences (and query positions): heads should look at different words.

    As printed in the paper: the Gram matrix is heads x heads and the norm is squared. The authors' code penalises words
    x words instead, and a common port does not square: coefficients do not transfer.

    Args:
        weights: attention of every head over the words, [..., M, words], summing to 1.
        mask: which of [...] count, bool; None: all.

    Returns:
        A scalar; all heads on one word cost M (M - 1).
    """
    gram = weights @ weights.mT  # [..., M, M]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    penalty = (gram - eye).square().sum((-2, -1))  # [...]
    return penalty.mean() if mask is None else penalty[mask].mean()
