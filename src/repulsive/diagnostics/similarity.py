r"""Similarity of heads in their weights, attention weights and outputs.

Every space has one vector $x_{pi}$ per head i and position p: weights have one position, attention and outputs have
one per item and query. With unit vectors $u_{pi} = x_{pi} / |x_{pi}|$ and P positions

$$d_{ij} = \frac1P \sum_p |x_{pi} - x_{pj}|, \qquad S_{ij} = \frac1P \sum_p u_{pi} \cdot u_{pj}, \qquad
  N = \exp\Bigl(-\sum_k \lambda_k \ln \lambda_k\Bigr),$$

where $\lambda$ are the eigenvalues of $S / \mathrm{tr}\, S$. N is the effective number of heads: the Vendi score
(Friedman and Dieng, 2023) of the cosine kernel, the effective rank (Roy and Vetterli, 2007) of the unit heads. It is 1
if all heads are parallel or antiparallel and M if they are orthogonal. Heads that repel even further, to a cosine of
-1 / (M - 1), span M - 1 dimensions evenly: N = M - 1.

Tokens can become similar, too: if the head outputs of a layer are equal for all tokens of an item, the layers above
cannot distinguish tokens (Dong et al., 2021). This is measured by the mean cosine between two tokens of one item. An
untrained layer, whose attention is nearly uniform, also has a value near 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from repulsive.errors import DivergedError
from repulsive.heads import HeadGroup
from repulsive.particles.gram import wide_dtype

_BLOCK = 1 << 24  # largest number of elements that are compared at once


class Pair(NamedTuple):
    """Two heads of one layer and the cosine between them."""

    name: str
    first: int
    second: int
    cosine: float


@dataclass(frozen=True, eq=False)
class Diversity:
    """Similarity of the heads of one layer in one space.

    Args:
        name: name of the group or attention layer.
        space: "weights", "attention" or "outputs".
        distance: mean Euclidean distance of each pair of heads, float64 [M, M].
        cosine: mean cosine of each pair, float64 [M, M]; a zero head has cosine 0, also with itself.
        tokens: mean cosine between the head outputs of two tokens of one item; nan for other spaces and single tokens.
    """

    name: str
    space: str
    distance: Tensor
    cosine: Tensor
    tokens: float = math.nan

    @property
    def num_heads(self) -> int:
        return len(self.cosine)

    @property
    def mean_distance(self) -> float:
        """Mean distance over pairs i < j; nan for a single head."""
        return _over_pairs(self.distance)

    @property
    def mean_cosine(self) -> float:
        """Mean cosine over pairs i < j; nan for a single head."""
        return _over_pairs(self.cosine)

    @property
    def effective_heads(self) -> float:
        """Effective number of heads, between 1 and M."""
        return effective_number(self.cosine)

    def closest(self, count: int = 5) -> list[Pair]:
        """Return the most similar pairs i < j, largest cosine first."""
        i, j = torch.triu_indices(self.num_heads, self.num_heads, 1, device="cpu")
        cosines = self.cosine.cpu()[i, j]  # [M (M - 1) / 2]
        order = cosines.argsort(descending=True, stable=True)[:count]
        return [Pair(self.name, int(i[k]), int(j[k]), float(cosines[k])) for k in order]


def of_weights(groups: Sequence[HeadGroup]) -> list[Diversity]:
    """Measure the similarity of heads in their weights, for each group in the given order.

    Args:
        groups: the result of `find_heads`; with `particle="head"` there is one group per layer.
    """
    return [_measure(group.name, "weights", [group.read().unsqueeze(0)]) for group in groups]


def of_attention(weights: Tensor, real: Tensor | None = None, name: str = "") -> Diversity:
    """Measure the similarity of attention weights: cosine and distance over keys, averaged over queries.

    Args:
        weights: attention weights of each head [B, M, T, S].
        real: which queries count, bool [B, T]; None: all.
        name: name of the layer.
    """
    return _measure(name, "attention", _positions(weights, real))


def of_outputs(outputs: Tensor, real: Tensor | None = None, name: str = "") -> Diversity:
    """Measure the similarity of head outputs, averaged over tokens (the cosine of Li et al., 2018).

    Args:
        outputs: output of each head [B, M, T, d].
        real: which tokens count, bool [B, T]; None: all.
        name: name of the layer.
    """
    result = _measure(name, "outputs", _positions(outputs, real))
    return replace(result, tokens=token_similarity(outputs, real))


@torch.no_grad()
def mean_cosines(x: Tensor, real: Tensor | None = None, space: Literal["attention", "outputs"] = "outputs") -> Tensor:
    """Compute the mean cosine of each pair of heads over positions, float64 [M, M]; like `of_outputs`, but faster.

    Args:
        x: attention weights or outputs of each head [B, M, T, E].
        real: which tokens count, bool [B, T]; None: all.
        space: what `x` holds, for errors.
    """
    total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
    for block in _positions(x, real):
        unit = _unit(_finite(block, "", space))
        total, count = total + (unit @ unit.mT).sum(0).cpu().double(), count + len(unit)
    return (total / count).clamp(-1, 1)


def merged(parts: Sequence[tuple[Diversity, float]]) -> Diversity:
    """Compute the weighted mean of several measurements of the same heads."""
    total, first = sum(weight for _, weight in parts), parts[0][0]
    distance = torch.stack([part.distance * (weight / total) for part, weight in parts]).sum(0)
    cosine = torch.stack([part.cosine * (weight / total) for part, weight in parts]).sum(0)
    finite = [(part.tokens, weight) for part, weight in parts if not math.isnan(part.tokens)]
    tokens = sum(x * weight for x, weight in finite) / sum(weight for _, weight in finite) if finite else math.nan
    return Diversity(first.name, first.space, distance, cosine, tokens)


def effective_number(similarity: Tensor) -> float:
    r"""Effective number of heads, $\exp(-\sum_k \lambda_k \ln \lambda_k)$ for the eigenvalues of $S / \mathrm{tr}\, S$.

    Args:
        similarity: a Gram matrix [M, M]: symmetric, positive semidefinite. A zero matrix gives 1.

    Returns:
        A number between 1 and M.

    Example:
        >>> round(effective_number(torch.eye(4)), 6), round(effective_number(torch.ones(4, 4)), 6)
        (4.0, 1.0)
    """
    eigenvalues = torch.linalg.eigvalsh(similarity.double().cpu()).clamp(min=0)  # [M]; clamp rounding errors
    total = eigenvalues.sum()
    if total == 0:
        return 1.0
    return float(torch.special.entr(eigenvalues / total).sum().exp())


def _positions(x: Tensor, real: Tensor | None) -> Iterable[Tensor]:
    """Split [B, M, T, E] into blocks [P, M, E] without masked tokens, so that float64 copies stay small."""
    if x.ndim != 4 or not x.numel():
        raise ValueError(f"heads {list(x.shape)}: expected non-empty attention [B, M, T, S] or outputs [B, M, T, d]")
    if real is not None and (real.shape != (x.shape[0], x.shape[2]) or not real.any()):
        raise ValueError(
            f"real {list(real.shape)}: expected [B, T] = {[x.shape[0], x.shape[2]]} with at least one token"
        )
    for rows in _items(x, real):
        yield from rows.split(max(1, _BLOCK // (x.shape[1] * x.shape[3])))


def _items(x: Tensor, real: Tensor | None) -> Iterator[Tensor]:
    """Iterate over the items of [B, M, T, E], each [T, M, E] without masked tokens."""
    for item in range(len(x)):
        rows = x[item].transpose(0, 1)
        yield rows if real is None else rows[real[item].bool()]


@torch.no_grad()
def _measure(name: str, space: str, blocks: Iterable[Tensor]) -> Diversity:
    """Average distances and cosines over the positions of all blocks, each [P, M, E]."""
    distance = cosine = torch.zeros((), device="cpu")
    count = 0
    for block in blocks:
        x = _finite(block, name, space)
        unit = _unit(x)
        # The matrix-product form of cdist is inaccurate for nearly equal heads, which matter most here.
        distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")  # [P, M, M]
        distance, cosine = distance.to(x) + distances.sum(0), cosine.to(x) + (unit @ unit.mT).sum(0)
        count += len(x)
    return Diversity(name, space, distance / count, (cosine / count).clamp(-1, 1))


def _finite(block: Tensor, name: str, space: str) -> Tensor:
    """Convert to the wide dtype; raise DivergedError for NaN or infinity."""
    x = block.detach().to(wide_dtype(block.device))  # [P, M, E]
    if not x.isfinite().all():
        raise DivergedError(f"{name or 'heads'}: {space} contain NaN or infinity; load an earlier checkpoint")
    return x


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)


@torch.no_grad()
def token_similarity(x: Tensor, real: Tensor | None = None) -> float:
    """Compute the mean cosine between two tokens of an item, items weighted by length; nan for single tokens.

    Args:
        x: finite vectors of each token, in M parts, [B, M, T, d].
        real: which tokens count, bool [B, T]; None: all.
    """
    total, count = 0.0, 0
    for rows in _items(x, real):
        if len(rows) > 1:
            rows = rows.flatten(1).to(wide_dtype(rows.device))  # [T, M d]
            unit = _unit(rows)
            pairs = unit.sum(0).square().sum() - unit.square().sum()  # sum over s != t, without a [T, T] matrix
            total, count = total + float(pairs) / (len(rows) - 1), count + len(rows)
    return max(-1.0, min(1.0, total / count)) if count else math.nan


def _over_pairs(matrix: Tensor) -> float:
    i, j = torch.triu_indices(len(matrix), len(matrix), 1, device=matrix.device)
    return float(matrix[i, j].mean())
