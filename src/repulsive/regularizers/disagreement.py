r"""Disagreement regularisation (Li et al., 2018), as losses to add: $+\lambda$ times the mean similarity of heads.

Sums run over all pairs i, j of M heads, so i = j adds a constant 1 / M to the cosines. No pair is formed: for unit
vectors $\sum_{ij} u_i \cdot u_j = |\sum_i u_i|^2$. Where `real` is given, padding does not count.
"""

from torch import Tensor
from torch.nn import functional as F

from repulsive.regularizers.masked import mean_of


def on_outputs(outputs: Tensor, real: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} \cos(O_i, O_j)$ per position, averaged over positions: the paper's "+ R".

    Args:
        outputs: what leaves each head, [B, M, T, d].
        real: positions that count, bool [B, T]; None: all.

    Returns:
        A scalar between 0 and 1.
    """
    return _mean_cosine(outputs, real)


def on_subspaces(values: Tensor, real: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} \cos(V_i, V_j)$ per position, averaged over positions.

    Args:
        values: each head's values, [B, M, S, d].
        real: positions that count, bool [B, S]; None: all.
    """
    return _mean_cosine(values, real)


def on_positions(weights: Tensor, real: Tensor | None = None) -> Tensor:
    r"""$\frac{1}{M^2} \sum_{ij} |A_i \odot A_j|$, the entries added up per query and averaged over queries.

    Args:
        weights: attention of each head, [B, M, T, S], not negative.
        real: queries that count, bool [B, T]; None: all.
    """
    heads = weights.shape[1]
    return mean_of(weights.sum(1).square().sum(-1) / heads**2, real)


def _mean_cosine(x: Tensor, real: Tensor | None) -> Tensor:
    unit = F.normalize(x, dim=-1)  # [B, M, T, d]
    return mean_of(unit.sum(1).square().sum(-1) / x.shape[1] ** 2, real)
