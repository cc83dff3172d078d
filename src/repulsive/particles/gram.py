r"""Gram matrices of particles: one pass over the particles gives every number that kernels need.

With c_i = theta_i - mu and mu the mean particle, the rows x = [c_1, ..., c_M, mu] have the Gram matrix

$$G = x x^\top, \qquad |\theta_i - \theta_j|^2 = G_{ii} + G_{jj} - 2 G_{ij}, \qquad
  \theta_i \cdot \theta_j = G_{ij} + G_{i\mu} + G_{j\mu} + G_{\mu\mu}.$$

The mean is subtracted and products are summed in float64. For nearly equal heads the plain float32 form loses every
digit of the distances (65,536 numbers per head, heads 0.1 % apart: relative error above 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 particles, float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of M x M matrices: float64 if the device supports it."""
    return torch.float32 if device.type == "mps" else torch.float64


_SINGLE = torch.finfo(torch.float32).eps
# Relative size below which the norm of a sum of heads is rounding error. The square of the norm is a difference of
# products: with products in float32 (single), the norm has a relative error of the square root of theirs. With
# products in float64 (double), what remains is the error of the heads and of the update, which have float32 numbers.
SINGLE_ERROR, DOUBLE_ERROR = math.sqrt(_SINGLE), 2 * _SINGLE  # 3.5e-4, 2.4e-7


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Turn autocast and TF32 off: either would round distances to three digits."""
    return matmul_precision(device, tf32=False)


@contextmanager
def matmul_precision(device: torch.device, *, tf32: bool) -> Iterator[None]:
    """Turn autocast off, and TF32 on or off."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        matmul, mode = torch.backends.cuda.matmul, "tf32" if tf32 else "ieee"
        name, value = ("fp32_precision", mode) if hasattr(matmul, "fp32_precision") else ("allow_tf32", tf32)
        before = getattr(matmul, name)
        setattr(matmul, name, value)
        try:
            yield
        finally:
            setattr(matmul, name, before)


@dataclass(frozen=True)
class Gram:
    """Inner products of M particles and of their mean.

    Args:
        products: [..., M + 1, M + 1], the matrix G above; the last row and column belong to the mean.
        resolution: distance of unit vectors below which distances are rounding errors of the products; a median
            bandwidth on the sphere stays above it.
    """

    products: Tensor
    resolution: float = 0.0

    @property
    def num_particles(self) -> int:
        return self.products.shape[-1] - 1

    @property
    def squared_distances(self) -> Tensor:
        """Squared distances [..., M, M]: zero on the diagonal, never negative."""
        centred = self.products[..., :-1, :-1]  # [..., M, M]
        own = centred.diagonal(dim1=-2, dim2=-1)  # [..., M]
        d2 = own.unsqueeze(-1) + own.unsqueeze(-2) - 2 * centred
        d2 = d2 - torch.diag_embed(d2.diagonal(dim1=-2, dim2=-1))
        return torch.where(d2 < 0, torch.zeros_like(d2), d2)  # NaN stays NaN

    @property
    def squared_norms(self) -> Tensor:
        """Squared norms [..., M]."""
        return self.inner.diagonal(dim1=-2, dim2=-1)

    @property
    def inner(self) -> Tensor:
        """Inner products theta_i . theta_j, [..., M, M]."""
        to_mean = self.products[..., :-1, -1]  # [..., M]
        mean = self.products[..., -1, -1]  # [...]
        return self.products[..., :-1, :-1] + to_mean.unsqueeze(-1) + to_mean.unsqueeze(-2) + mean[..., None, None]

    def norm_of(self, matrix: Tensor) -> Tensor:
        """Frobenius norm of matrix @ theta, without reading theta: [..., M, M] -> [...]."""
        rows = torch.cat([matrix, matrix.sum(-1, keepdim=True)], dim=-1)  # [..., M, M + 1], multiplies [c, mu]
        return ((rows @ self.products) * rows).sum((-2, -1)).clamp(min=0).sqrt()

    def rounding_of(self, matrix: Tensor) -> Tensor:
        r"""Estimate the norm of matrix @ theta below which `norm_of` is rounding error: [..., M, M] -> [...].

        It is $\tau$ times the norm of $S$, the same sum without cancellation: $S_i = \sum_j |m_{ij}|\,|c_j| +
        |\sum_j m_{ij}|\,|\mu|$. The sum in the last term counts as at least its own rounding error.
        """
        is_single = self.products.dtype == torch.float32
        eps, tau = torch.finfo(self.products.dtype).eps, SINGLE_ERROR if is_single else DOUBLE_ERROR
        lengths = self.products.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()  # |c_1|, ..., |c_M|, |mu|
        sizes = matrix.abs()
        sums = torch.maximum(matrix.sum(-1).abs(), 64 * eps / tau * sizes.sum(-1))  # [..., M]
        terms = (sizes @ lengths[..., :-1, None]).squeeze(-1) + sums * lengths[..., -1:]
        return tau * terms.square().sum(-1).sqrt()


def centre(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Split particles [..., M, D] into their mean [..., 1, D] and deviations from it; return (deviations, mean)."""
    mean = theta.mean(dim=-2, keepdim=True)
    return theta - mean, mean


def gram(theta: Tensor) -> Gram:
    """Compute the Gram matrix of particles [..., M, D] and of their mean."""
    centred, mean = centre(theta)
    rows = torch.cat([centred, mean], dim=-2).to(wide_dtype(theta.device))  # [..., M + 1, D]
    return Gram(rows @ rows.mT)


def apply_matrix(matrix: Tensor, theta: Tensor) -> Tensor:
    """Compute matrix @ theta as matrix @ c + (row sums) mu, which is accurate for nearly equal heads: [..., M, D]."""
    centred, mean = centre(theta)
    row_sums = matrix.sum(-1, keepdim=True).to(theta.dtype)  # [..., M, 1], in float64 before rounding
    return matrix.to(theta.dtype) @ centred + row_sums * mean
