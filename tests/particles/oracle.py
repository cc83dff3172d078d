"""Independent reference of the formulas: double loops in float64 with autograd of the kernel."""

import math

import torch
from torch import Tensor


def median(values: list[float]) -> float:
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


def paper_bandwidth(points: Tensor) -> float:
    m = len(points)
    if m == 1:
        return 1.0
    distances = [float((points[i] - points[j]).norm()) for i in range(m) for j in range(i + 1, m)]
    return median(distances) ** 2 / math.log(m)


def released_bandwidth(points: Tensor) -> float:
    m = len(points)
    if m == 1:
        return 1.0
    squares = [float((points[i] - points[j]).square().sum()) for i in range(m) for j in range(m)]
    return median(squares) / math.log(m + 1)


def released_lower_bandwidth(points: Tensor) -> float:
    m = len(points)
    if m == 1:
        return 1.0
    squares = sorted(float((points[i] - points[j]).square().sum()) for i in range(m) for j in range(m))
    floor = 1e-8 * float(points.square().sum(-1).mean())  # the lower median of two heads is zero
    return max(squares[(m * m - 1) // 2] / math.log(m + 1), floor)


def rbf(x: Tensor, y: Tensor, h: float) -> Tensor:
    return torch.exp(-(x - y).square().sum() / h)


def imq(x: Tensor, y: Tensor, h: float) -> Tensor:
    return 1 / torch.sqrt(1 + (x - y).square().sum() / h)


def cosine(x: Tensor, y: Tensor, h: float) -> Tensor:
    return x @ y / (x.norm() * y.norm())


def hinge(x: Tensor, y: Tensor, h: float) -> Tensor:
    return (cosine(x, y, h) - 0.5).clamp(min=0)


KERNELS = {"rbf": rbf, "imq": imq, "cosine": cosine, "hinge": hinge}
BANDWIDTHS = {
    "paper": paper_bandwidth,
    "released": released_bandwidth,
    "released-lower": released_lower_bandwidth,
}


def phi(
    theta: Tensor,
    grad: Tensor,
    *,
    alpha: float,
    kernel: str = "rbf",
    bandwidth: str | float = "paper",
    precision: float = 0.0,
    smoothing: float = 1.0,
    space: str = "weights",
    beta: float = math.inf,
) -> Tensor:
    """The direction of SVGD (and SPOS's drift) for one group [M, D]."""
    m = len(theta)
    unit = theta / theta.norm(dim=-1, keepdim=True)
    seen = unit if space == "sphere" else theta
    h = bandwidth if isinstance(bandwidth, float) else BANDWIDTHS[bandwidth](seen)
    k = KERNELS[kernel]
    potential = grad + precision * theta
    result = torch.zeros_like(theta)
    for i in range(m):
        for j in range(m):
            if space == "weights":
                moving = theta[j].clone().requires_grad_()
                value = k(moving, theta[i], h)
                (slope,) = torch.autograd.grad(value, moving)
            else:
                moving = theta[i].clone().requires_grad_()
                value = k(unit[j], moving / moving.norm(), h)
                slope = -torch.autograd.grad(value, moving)[0]
            if i == j:
                slope = torch.zeros_like(slope)
            weight = smoothing * float(value.detach()) + (1 - smoothing) * (i == j)
            result[i] += (-weight * potential[j] + alpha * slope) / m
        result[i] -= potential[i] / beta
    return result


def particles(m: int, d: int, batch: tuple[int, ...], seed: int, scale: float = 1.0):
    source = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(*batch, m, d, generator=source, dtype=torch.float64)  # noqa: E731
    return scale * draw(), draw()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm().clamp(min=1e-300))
