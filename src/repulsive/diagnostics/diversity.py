r"""How alike heads are: in their weights, in what they look at, in what leaves them.

Every space gives one vector $x_{pi}$ per head i and position p: weights have one position, attention and outputs one
per item and query. With unit vectors $u_{pi} = x_{pi} / |x_{pi}|$ and P positions

$$d_{ij} = \frac1P \sum_p |x_{pi} - x_{pj}|, \qquad S_{ij} = \frac1P \sum_p u_{pi} \cdot u_{pj}, \qquad
  N = \exp\Bigl(-\sum_k \lambda_k \ln \lambda_k\Bigr),$$

where $\lambda$ are the eigenvalues of $S / \mathrm{tr}\, S$. N is the effective number of heads: the Vendi score
(Friedman and Dieng, 2023) of the cosine kernel, the effective rank (Roy and Vetterli, 2007) of the unit heads. It is 1
if all heads are parallel or antiparallel and M if they are orthogonal. Heads that repel beyond that, to the cosine
-1 / (M - 1), span M - 1 dimensions evenly: N = M - 1.

Tokens can collapse, too: where what leaves all heads of a layer is the same for every token of an item, the layers
above cannot tell tokens apart (Dong et al., 2021). Its measure is the mean cosine of two tokens of one item. An
untrained layer, which looks everywhere alike, has nearly 1 as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from repulsive.errors import DivergedError
from repulsive.heads import HeadGroup
from repulsive.particles.gram import wide_dtype

_AT_ONCE = 1 << 24  # numbers that are compared together


class Pair(NamedTuple):
    """Two heads of one layer and the cosine between them."""

    name: str
    first: int
    second: int
    cosine: float


@dataclass(frozen=True, eq=False)
class Diversity:
    """How alike the heads of one layer are in one space.

    Args:
        name: of the group or attention layer.
        space: "weights", "attention" or "outputs".
        distance: mean Euclidean distance of each pair, float64 [M, M].
        cosine: mean cosine of each pair, float64 [M, M]; a head of zeros has the cosine 0, with itself too.
        tokens: of outputs, mean cosine of two tokens of one item in what leaves all heads; nan where there are no two.
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
        """Over pairs i < j; nan for one head, which has no pairs."""
        return _over_pairs(self.distance)

    @property
    def mean_cosine(self) -> float:
        """Over pairs i < j; nan for one head, which has no pairs."""
        return _over_pairs(self.cosine)

    @property
    def effective_heads(self) -> float:
        return effective_number(self.cosine)

    def closest(self, count: int = 5) -> list[Pair]:
        """The pairs i < j with the largest cosines, most alike first."""
        i, j = torch.triu_indices(self.num_heads, self.num_heads, 1)
        cosines = self.cosine.cpu()[i, j]  # [M (M - 1) / 2]
        order = cosines.argsort(descending=True, stable=True)[:count]
        return [Pair(self.name, int(i[k]), int(j[k]), float(cosines[k])) for k in order]


def of_weights(groups: Sequence[HeadGroup]) -> list[Diversity]:
    """Diversity of the weights of each group, in the order given.

    Args:
        groups: what `find_heads` returned; with `particle="head"` one per layer.
    """
    return [_measure(group.name, "weights", [group.read().unsqueeze(0)]) for group in groups]


def of_attention(weights: Tensor, real: Tensor | None = None, name: str = "") -> Diversity:
    """Diversity of what heads look at: cosines and distances between their weights over keys, query by query.

    Args:
        weights: attention of each head [B, M, T, S].
        real: which queries count, bool [B, T]; None: all.
        name: of the layer.
    """
    return _measure(name, "attention", _positions(weights, real))


def of_outputs(outputs: Tensor, real: Tensor | None = None, name: str = "") -> Diversity:
    """Diversity of what leaves the heads, token by token (Li et al., 2018, average the same cosine).

    Args:
        outputs: what leaves each head [B, M, T, d].
        real: which tokens count, bool [B, T]; None: all.
        name: of the layer.
    """
    found = _measure(name, "outputs", _positions(outputs, real))
    return replace(found, tokens=_between_tokens(outputs, real))


def merged(parts: Sequence[tuple[Diversity, float]]) -> Diversity:
    """The mean of several measurements of the same heads, each with its weight."""
    total, first = sum(weight for _, weight in parts), parts[0][0]
    distance = torch.stack([found.distance * (weight / total) for found, weight in parts]).sum(0)
    cosine = torch.stack([found.cosine * (weight / total) for found, weight in parts]).sum(0)
    known = [(found.tokens, weight) for found, weight in parts if not math.isnan(found.tokens)]
    tokens = sum(x * weight for x, weight in known) / sum(weight for _, weight in known) if known else math.nan
    return Diversity(first.name, first.space, distance, cosine, tokens)


def effective_number(similarity: Tensor) -> float:
    r"""$\exp(-\sum_k \lambda_k \ln \lambda_k)$ for the eigenvalues of $S / \mathrm{tr}\, S$, between 1 and M.

    Args:
        similarity: a Gram matrix [M, M]: symmetric, no negative eigenvalues. All zeros, heads of zeros, count as 1.

    Example:
        >>> round(effective_number(torch.eye(4)), 6), round(effective_number(torch.ones(4, 4)), 6)
        (4.0, 1.0)
    """
    eigenvalues = torch.linalg.eigvalsh(similarity.double().cpu()).clamp(min=0)  # [M]; rounding can go below zero
    total = eigenvalues.sum()
    if total == 0:
        return 1.0
    return float(torch.special.entr(eigenvalues / total).sum().exp())


def _positions(x: Tensor, real: Tensor | None) -> Iterable[Tensor]:
    """[B, M, T, E] as blocks of [P, M, E], so that float64 copies stay small; tokens that do not count are cut."""
    if x.ndim != 4 or not x.numel():
        raise ValueError(f"heads {list(x.shape)}: need [B, M, T, S] attention or [B, M, T, d] outputs, not empty")
    if real is not None and (real.shape != (x.shape[0], x.shape[2]) or not real.any()):
        raise ValueError(f"real {list(real.shape)} must choose at least one of [B, T] = {[x.shape[0], x.shape[2]]}")
    for rows in _items(x, real):
        yield from rows.split(max(1, _AT_ONCE // (x.shape[1] * x.shape[3])))


def _items(x: Tensor, real: Tensor | None) -> Iterator[Tensor]:
    """[B, M, T, E] item by item, each [T, M, E] without the tokens that do not count."""
    for item in range(len(x)):
        rows = x[item].transpose(0, 1)
        yield rows if real is None else rows[real[item].bool()]


@torch.no_grad()
def _measure(name: str, space: str, blocks: Iterable[Tensor]) -> Diversity:
    """Means over the positions of all blocks, each [P, M, E]."""
    distance = cosine = torch.zeros(())
    count = 0
    for block in blocks:
        x = block.detach().to(wide_dtype(block.device))  # [P, M, E]
        if not x.isfinite().all():
            raise DivergedError(f"{name or 'heads'}: {space} hold NaN or infinity; load a checkpoint from before")
        unit = torch.nn.functional.normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny)
        # The product form of cdist loses nearly equal heads to rounding, and those are the ones that matter here.
        apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")  # [P, M, M]
        distance, cosine = distance.to(x) + apart.sum(0), cosine.to(x) + (unit @ unit.mT).sum(0)
        count += len(x)
    return Diversity(name, space, distance / count, (cosine / count).clamp(-1, 1))


@torch.no_grad()
def _between_tokens(x: Tensor, real: Tensor | None) -> float:
    """Mean cosine of two tokens of an item, each item as heavy as it has tokens; [B, M, T, d], finite."""
    total, count = 0.0, 0
    for rows in _items(x, real):
        if len(rows) > 1:
            rows = rows.flatten(1).to(wide_dtype(rows.device))  # [T, M d]
            unit = torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)
            pairs = unit.sum(0).square().sum() - unit.square().sum()  # over s != t: no [T, T] is made
            total, count = total + float(pairs) / (len(rows) - 1), count + len(rows)
    return max(-1.0, min(1.0, total / count)) if count else math.nan


def _over_pairs(matrix: Tensor) -> float:
    i, j = torch.triu_indices(len(matrix), len(matrix), 1, device=matrix.device)
    return float(matrix[i, j].mean())
