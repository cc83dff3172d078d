r"""Heads as functions: the similarity of their attention logits, and the force that drives them apart.

Head i is the bilinear function $f_i(x, y) = q_i(x) \cdot k_i(y)$ of a query token x and a key token y. Over N query
tokens and N' key tokens drawn independently, two heads have the inner product

$$\langle f_i, f_j \rangle = \frac{1}{N N'} \sum_{x, y} f_i(x, y)\, f_j(x, y)
  = \sum_{a, b} \Big(\tfrac1N q_i^\top q_j\Big)_{ab} \Big(\tfrac1{N'} k_i^\top k_j\Big)_{ab},$$

a sum over d x d numbers: no T x T attention map is needed. Softmax ignores terms that are constant over keys, so keys
are centred per sequence first. Unlike weights, these inner products do not change under an invertible map between q
and k that leaves the attention of a head unchanged.

The same form serves value-output circuits: a head adds $W_O^i v_i(x)$ to the residual stream, and
$\langle g_i, g_j \rangle = \sum_{ab} (\tfrac1N v_i^\top v_j)_{ab} ({W_O^i}^\top W_O^j)_{ab}$: values replace queries,
and columns of the output projection replace keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles.gram import Gram, wide_dtype


@dataclass(frozen=True)
class Circuits:
    """M bilinear functions, given by their two factors on sampled tokens.

    Args:
        left: queries, or values [..., N, M_left, d].
        right: centred keys, or rows of the output projection [..., N', M_right, d].
        left_of: index of the left factor of each of the M heads; None if head i has factor i.
        right_of: index of the right factor of each of the M heads, for key-value heads that several query heads share.
    """

    left: Tensor
    right: Tensor
    left_of: tuple[int, ...] | None = None
    right_of: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.left.shape[-1] != self.right.shape[-1]:
            raise RuleError(
                f"queries have width {self.left.shape[-1]} and keys {self.right.shape[-1]}; they must be equal"
            )
        if len({self._heads(self.left, self.left_of), self._heads(self.right, self.right_of)}) != 1:
            raise RuleError(
                f"there are {self._heads(self.left, self.left_of)} query heads and "
                f"{self._heads(self.right, self.right_of)} key heads; give left_of or right_of to pair them"
            )

    @staticmethod
    def _heads(factor: Tensor, of: Sequence[int] | None) -> int:
        return factor.shape[-2] if of is None else len(of)

    @property
    def num_heads(self) -> int:
        """M, the number of heads."""
        return self._heads(self.left, self.left_of)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Compute second moments of both factors, [..., M, d, M, d] each."""
        return self.left_moments(), self.right_moments()

    def left_moments(self) -> Tensor:
        """Compute second moments of the left factor, [..., M, d, M, d]."""
        return _moments(self.left, self.left_of)

    def right_moments(self) -> Tensor:
        """Compute second moments of the right factor, [..., M, d, M, d]."""
        return _moments(self.right, self.right_of)

    def products(self) -> Tensor:
        """Compute inner products of the M functions, [..., M, M]."""
        left, right = self.moments()
        return _contract(left, right)

    def pull_back(self, matrix: Tensor, moments: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        r"""Gradient of $\sum_i \langle f_i, \sum_j R_{ij} \bar f_j \rangle$ by both factors, with $\bar f$ fixed.

        Args:
            matrix: R [..., M, M], such as the repulsion of a kernel.
            moments: the result of `moments`, to save computing it again.

        Returns:
            Tensors shaped as `left` and `right`.
        """
        left, right = self.moments() if moments is None else moments
        weight = matrix.to(left.dtype)[..., :, None, :, None]  # [..., M, 1, M, 1]
        return (
            _combine(self.left, (weight / self.left.shape[-3]) * right, self.left_of),
            _combine(self.right, (weight / self.right.shape[-3]) * left, self.right_of),
        )

    def are_rounding_errors(
        self, forces: tuple[Tensor, Tensor], matrix: Tensor, moments: tuple[Tensor, Tensor], error: float | Tensor
    ) -> Tensor:
        r"""Check whether the forces on all heads are rounding errors, as between parallel functions: [...].

        The force on head i is a sum of M terms. It is a rounding error if it is much shorter than these terms would be
        for parallel functions: $|R_{ij}|\,|g_i|\,|f_j| / |f_i|$, where g_i is the gradient of
        $\langle f_i, \bar f_i \rangle$.

        Args:
            forces: the result of `pull_back`.
            matrix: R [..., M, M].
            moments: the result of `moments`.
            error: largest share of the terms that counts as rounding error, a number or [..., 1].
        """
        wide = wide_dtype(moments[0].device)  # the squares below underflow in float32 if heads are small
        left, right = (both.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).to(wide) for both in moments)  # [..., M, d, d]
        norms2 = (left * right).sum((-2, -1))  # |f_i|^2, [..., M]
        norms = torch.where(norms2 > 0, norms2, 1).sqrt()
        shares = (matrix.to(wide).abs() @ norms.unsqueeze(-1)).squeeze(-1) / norms  # [..., M]
        product = left @ right
        are_small = []
        sides = (self.left, right, self.left_of), (self.right, left, self.right_of)
        for force, (factor, other, of) in zip(forces, sides, strict=True):
            own = (product * other).sum((-2, -1)).clamp(min=0) / factor.shape[-3]  # |g_i|^2, [..., M]
            terms = shares * own.sqrt()
            if of is not None:
                shared = terms.new_zeros(*terms.shape[:-1], factor.shape[-2])
                terms = shared.index_add_(-1, _index(tuple(of), terms.device), terms)
            are_small.append(torch.linalg.vector_norm(force, dim=(-3, -1)) <= error * terms)
        return torch.cat(are_small, dim=-1).all(-1)


def centre_keys(keys: Tensor, weights: Tensor | None = None) -> Tensor:
    """Subtract the mean key of every sequence.

    Args:
        keys: [..., S, n, M, d], n tokens of each of S sequences.
        weights: [..., S, n], 0 for padding; None if there is no padding.

    Returns:
        Centred keys [..., S, n, M, d]; zero where the weight is zero.
    """
    if weights is None:
        return keys - keys.mean(-3, keepdim=True)
    share = weights.to(keys.dtype)[..., None, None]  # [..., S, n, 1, 1]
    mean = (keys * share).sum(-3, keepdim=True) / share.sum(-3, keepdim=True).clamp(min=1)
    return (keys - mean) * share


def function_gram(products: Tensor) -> Gram:
    """Convert inner products of functions [..., M, M] to a centred `Gram`, with the mean, as kernels expect."""
    wide = products.to(wide_dtype(products.device))
    wide = (wide + wide.mT) / 2  # `Gram.inner` assumes symmetry; large functions would lend their error to small ones
    rows = _centring(wide.shape[-1], wide.dtype, wide.device)
    return Gram(rows @ wide @ rows.mT, resolution=math.sqrt(16 * torch.finfo(products.dtype).eps))


def cosines(products: Tensor, shortest: float = 0.0) -> Tensor:
    """Compute cosines between functions or heads, [..., M, M]; a zero one has cosine 0 with all others.

    Args:
        products: inner products, [..., M, M].
        shortest: norms up to this share of the root mean square count as zero.
    """
    norms2 = products.diagonal(dim1=-2, dim2=-1).clamp(min=0)  # [..., M]
    is_zero = norms2 <= shortest**2 * norms2.mean(-1, keepdim=True)
    inverse = torch.where(is_zero, 0, torch.where(is_zero, 1, norms2).rsqrt())
    return products * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)


def mean_and_largest(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean and the largest value over pairs i < j: [..., M, M] -> [...], [...]; NaN for one head.

    The mean alone hides duplicates: heads u, u, -u, -u have the smallest mean of four heads, -1/3.
    """
    heads = similarity.shape[-1]
    if heads < 2:
        alone = torch.full_like(similarity[..., 0, 0], torch.nan)
        return alone, alone
    row, column = torch.triu_indices(heads, heads, offset=1, device=similarity.device)
    pairs = similarity[..., row, column]
    return pairs.mean(-1), pairs.amax(-1)


def _moments(factor: Tensor, of: Sequence[int] | None) -> Tensor:
    """Compute the second moments of one factor: [..., N, M', d] -> [..., M, d, M, d]."""
    flat = factor.flatten(-2)  # [..., N, M' d]
    square = (flat.mT @ flat) / factor.shape[-3]
    both: Tensor = square.unflatten(-1, factor.shape[-2:]).unflatten(-3, factor.shape[-2:])
    if of is None:
        return both
    index = _index(tuple(of), factor.device)
    return both.index_select(-4, index).index_select(-2, index)


@lru_cache(maxsize=64)
def _index(of: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy indices to a device, once: a copy would wait for all work of a GPU."""
    with torch.inference_mode(False):
        return torch.tensor(of, device=device)


def _centring(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix that maps M functions to their deviations from the mean, and to the mean: [M + 1, M]."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return _make_centring(heads, dtype, device)  # its values exist only when the graph is replayed
    return _kept_centring(heads, dtype, device)


def _make_centring(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        eye = torch.eye(heads, dtype=dtype, device=device)
        return torch.cat([eye - 1 / heads, torch.full_like(eye[:1], 1 / heads)])


_kept_centring = lru_cache(maxsize=64)(_make_centring)


def _contract(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum((-3, -1))


def _combine(factor: Tensor, matrix: Tensor, of: Sequence[int] | None) -> Tensor:
    """Compute matrix @ factor for every token, summed over heads that share a factor.

    Args:
        factor: [..., N, M', d].
        matrix: [..., M, d, M, d].
        of: index of the factor of each head.
    """
    if of is not None:
        index = _index(tuple(of), factor.device)
        count = factor.shape[-2]
        rows = matrix.new_zeros(*matrix.shape[:-4], count, *matrix.shape[-3:]).index_add_(-4, index, matrix)
        matrix = rows.new_zeros(*rows.shape[:-2], count, rows.shape[-1]).index_add_(-2, index, rows)
    square = matrix.flatten(-2).flatten(-3, -2)  # [..., M' d, M' d]
    moved: Tensor = (factor.flatten(-2) @ square.mT).unflatten(-1, factor.shape[-2:])
    return moved
