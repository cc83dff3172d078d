"""Duplicate heads under alpha="auto": a force that is made of rounding errors is not scaled up to the target ratio."""

import pytest
import torch

from repulsive.particles import SVGD
from repulsive.particles.gram import DOUBLE_ERROR, gram
from repulsive.particles.kernels import AnyKernel, Space

RATIO = 0.01


def relative_push(theta: torch.Tensor, grad: torch.Tensor, kernel: AnyKernel, space: Space = "sphere") -> float:
    """|repulsion| / |gradient| of an update, from the result itself."""
    rule = SVGD("heads", kernel=kernel, space=space, smoothing=0, alpha="auto", ratio=RATIO)
    return float((rule.gradient(theta, grad) - grad).norm() / grad.norm())


def pair_of_four(apart: float, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Four random heads, of which two differ by a given relative distance."""
    torch.manual_seed(seed)
    theta, grad = torch.randn(4, 64, dtype=dtype), torch.randn(4, 64, dtype=dtype)
    theta[1] = theta[0] + apart * torch.randn(64, dtype=dtype)
    return theta, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pair_of_equal_heads_is_not_pushed(dtype):
    """The hinge kernel has no other force here. Dividing by its norm of 4e-17 gave a push of 1e6 gradients."""
    for seed in range(10):
        assert relative_push(*pair_of_four(0.0, seed, dtype), "hinge") == 0


@pytest.mark.parametrize(("kernel", "apart"), [("hinge", 1e-6), ("hinge", 1e-4), ("cosine", 0.0), ("rbf", 0.0)])
def test_the_ratio_is_held_where_a_force_acts(kernel, apart):
    """With other kernels the other heads repel a pair of equal ones; with the hinge kernel, small distances suffice."""
    for seed in range(5):
        assert relative_push(*pair_of_four(apart, seed, torch.float32), kernel) == pytest.approx(RATIO, rel=0.02)


def gaussian(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(x - y).square().sum(-1) / 2)


@pytest.mark.parametrize("factor", [1.7, -1.7])
@pytest.mark.parametrize("kernel", ["hinge", "cosine", "rbf", "imq", gaussian])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_parallel_heads_are_not_pushed(kernel, dtype, factor):
    for seed in range(10):
        torch.manual_seed(seed)
        head, grad = torch.randn(64, dtype=dtype), torch.randn(2, 64, dtype=dtype)
        assert relative_push(torch.stack([head, factor * head]), grad, kernel) == 0


def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(x, y, dim=-1)


def cosine_by_norms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))


def cosine_above_half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (cosine(x, y) - 0.5).clamp(min=0)


@pytest.mark.parametrize("factors", [(1.0, 1.7), (1.0, -3.0, 0.3), (1.0, 2.0, 4.0), (1.0, 1.0, 5.0)], ids=str)
@pytest.mark.parametrize("kernel", ["cosine", cosine, cosine_by_norms, cosine_above_half])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [4, 64, 3000])
def test_parallel_heads_of_different_norms_are_not_pushed_by_a_cosine_between_weights(size, kernel, dtype, factors):
    """The rounding error of a callable kernel was scaled up to the ratio."""
    for seed in range(5):
        torch.manual_seed(seed)
        theta = torch.tensor(factors, dtype=dtype)[:, None] * torch.randn(size, dtype=dtype)
        assert relative_push(theta, torch.randn_like(theta), kernel, "weights") == 0


def wide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(-(x - y).square().sum(-1) / 1e6)


def narrow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.exp(-4 * (x - y).abs().sum(-1) / x.shape[-1])  # its slope jumps where two heads are equal


@pytest.mark.parametrize("kernel", [gaussian, wide, narrow, cosine, cosine_by_norms])
@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-4, 1e-5])
@pytest.mark.parametrize("equal", [1, 2])
def test_a_true_force_of_a_callable_kernel_between_weights_holds_the_ratio(kernel, apart, equal):
    """Also where it changes the kernel's values by less than their rounding error."""
    torch.manual_seed(0)
    theta = torch.randn(1, 64) + apart * torch.randn(4, 64)
    theta[:equal] = theta[0]
    assert relative_push(theta, torch.randn(4, 64), kernel, "weights") == pytest.approx(RATIO, rel=0.05)


def test_nearly_equal_heads_hold_the_ratio():
    """All heads differ by 1e-6 of their length; distances are accurate, because the mean is subtracted first."""
    torch.manual_seed(0)
    theta, grad = torch.randn(1, 64) + 1e-6 * torch.randn(4, 64), torch.randn(4, 64)
    assert relative_push(theta, grad, "rbf") == pytest.approx(RATIO, rel=0.05)


def test_the_rounding_error_of_row_sums_counts():
    """Heads are equal, so only the mean head is left, times row sums that are zero up to rounding."""
    weight = torch.rand(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = weight + weight.mT
    matrix = torch.diag_embed(weight.sum(-1)) - weight
    matrix[0] -= matrix[0].sum() / 12
    equal = gram(1e3 * torch.ones(12, 64, dtype=torch.float64))
    assert 0 < float(equal.norm_of(matrix)) < float(equal.rounding_of(matrix))
    exact = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64)
    assert float(gram(torch.ones(2, 64, dtype=torch.float64)).rounding_of(exact)) > 0


def test_the_rounding_error_of_a_norm_matches_the_plain_loop():
    torch.manual_seed(0)
    theta, matrix = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    mean = theta.mean(0)
    squares = 0.0
    for row in matrix:
        size = sum(float(abs(m) * (head - mean).norm()) for m, head in zip(row, theta, strict=True))
        squares += (size + float(abs(row.sum()) * mean.norm())) ** 2
    assert float(gram(theta).rounding_of(matrix)) == pytest.approx(DOUBLE_ERROR * squares**0.5)
