"""The control without a kernel: its formula, and how little it differs from SVGD in many dimensions."""

import math

import pytest
import torch

from repulsive.errors import RuleError
from repulsive.particles import SVGD, CollapsedHeads, CosineLadder, KernelFree
from repulsive.particles.gram import gram
from tests.particles.oracle import close, median, particles

SETTINGS = {"stepsize": 0.1, "alpha": 0.01}


def phi(theta: torch.Tensor, grad: torch.Tensor, alpha: float, smoothing: float) -> torch.Tensor:
    """The formula in the docstring as a double loop, for one group [M, D] with M > 1."""
    m = len(theta)
    med = median([float((theta[i] - theta[j]).norm()) for i in range(m) for j in range(i)])
    mean = sum(theta) / m
    result = torch.zeros_like(theta)
    for i in range(m):
        for j in range(m):
            limit = 1.0 if i == j else 1 / m
            result[i] -= (smoothing * limit + (1 - smoothing) * (i == j)) * grad[j] / m
        result[i] += alpha * 2 * math.log(m) / (m * med**2) * (theta[i] - mean)
    return result


@pytest.mark.parametrize("m", [2, 3, 6])
@pytest.mark.parametrize("smoothing", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.01, 2.0])
def test_it_matches_the_double_loop(m, smoothing, alpha):
    theta, grad = particles(m, 5, (3,), m)
    found = KernelFree(0.1, alpha, smoothing=smoothing).gradient(theta, grad)
    truth = torch.stack([-0.1 * phi(t, g, alpha, smoothing) for t, g in zip(theta, grad, strict=True)])
    assert close(found, truth)


def test_it_equals_svgd_where_all_distances_are_equal():
    """Two heads have one distance, and the corners of a simplex have one: there the limit is exact."""
    simplex = torch.eye(5, 7, dtype=torch.float64) + 3
    for theta in (particles(2, 3, (), 1)[0], simplex):
        grad = torch.randn(theta.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        assert close(KernelFree(0.1, 1.0).gradient(theta, grad), SVGD(0.1, 1.0).gradient(theta, grad))


@pytest.mark.parametrize("rule", [KernelFree(alpha=1.0), KernelFree(alpha="auto"), KernelFree(smoothing=0)])
def test_permuting_heads_permutes_the_result(rule):
    theta, grad = particles(6, 5, (2,), 7)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    assert close(rule.gradient(theta[:, order], grad[:, order]), rule.gradient(theta, grad)[:, order])


def test_one_head_gets_stepsize_times_gradient():
    theta, grad = particles(1, 8, (3,), 2)
    assert torch.equal(KernelFree(0.1, 5.0).gradient(theta, grad), 0.1 * grad)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_equal_heads_get_no_force_and_a_warning(value):
    theta, grad = torch.full((4, 6), value), particles(4, 6, (), 0)[1].float()
    with pytest.warns(CollapsedHeads, match="all heads of a group are equal"):
        found = KernelFree(0.1, 1.0).gradient(theta, grad)
    limit = torch.eye(4) + (1 - torch.eye(4)) / 4
    assert torch.allclose(found, 0.1 * limit @ grad / 4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    theta, grad = (x.to(dtype) for x in particles(4, 300, (), 1))
    found = KernelFree().gradient(theta, grad)
    assert found.dtype == dtype
    assert torch.equal(found, KernelFree().gradient(theta.float(), grad.float()).to(dtype))


@pytest.mark.parametrize("where", ["theta", "grad"])
def test_nan_reaches_its_own_group_only(where):
    dirty = dict(zip(("theta", "grad"), particles(4, 5, (2,), 1), strict=True))
    dirty[where][0, 2, 3] = math.nan
    found = KernelFree().gradient(**dirty)
    assert found[0].isnan().any(-1).all() and found[1].isfinite().all()


def test_the_ratio_holds():
    theta, grad = particles(4, 30, (3,), 1)
    drive = KernelFree(0.1, 0.0).gradient(theta, grad)
    pushed = KernelFree(0.1, "auto", ratio=0.05).gradient(theta, grad) - drive
    found = pushed.flatten(1).norm(dim=1) / drive.flatten(1).norm(dim=1)
    assert torch.allclose(found, torch.full_like(found, 0.05))


def test_it_has_a_matrix_form_of_its_own():
    rule = KernelFree()
    assert rule.has_matrix_form and rule.radial_form(0).kernel == "constant"  # not SVGD's formula with an RBF kernel
    assert rule.coefficients(gram(particles(4, 5, (2,), 0)[0])).force.shape == (2, 4, 4)


@pytest.mark.parametrize("option", [{"kernel": "imq"}, {"bandwidth": "released"}, {"space": "sphere"}])
def test_settings_of_a_kernel_are_errors(option):
    with pytest.raises(RuleError, match="KernelFree has no kernel"):
        KernelFree(**option)


def compare(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Cosine between two directions, and |difference| / |first|."""
    cosine = torch.cosine_similarity(first.flatten(), second.flatten(), 0)
    return float(cosine), float((first - second).norm() / first.norm())


@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_in_many_dimensions_the_kernel_does_not_matter(m, seed):
    theta, grad = particles(m, 16_384, (), seed, scale=0.05)
    rule = SVGD(**SETTINGS)
    off_diagonal = rule.interact(gram(theta)).values[~torch.eye(m, dtype=torch.bool)]
    assert (off_diagonal * m - 1).abs().max() < 0.1  # the pair farthest from the median
    assert (off_diagonal * m - 1).abs().mean() < 0.025
    for g, limit in ((grad, 0.01), (torch.zeros_like(grad), 0.02)):  # the whole update, and repulsion alone
        cosine, residual = compare(rule.gradient(theta, g), KernelFree(**SETTINGS).gradient(theta, g))
        assert cosine > 0.999 and residual < limit, (cosine, residual)


@pytest.mark.parametrize("m", [4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_in_few_dimensions_it_does(m, seed):
    theta, grad = particles(m, 4, (), seed)
    cosine, residual = compare(*(rule(**SETTINGS).gradient(theta, 0 * grad) for rule in (SVGD, KernelFree)))
    assert cosine < 0.99 and residual > 0.1


def test_the_residual_falls_with_the_dimension():
    """Distances between random heads deviate from each other by about 1 / sqrt(D)."""
    residuals = []
    for d in (64, 1024, 16_384):
        groups = [particles(4, d, (), seed)[0] for seed in range(10)]
        pairs = [[rule(**SETTINGS).gradient(theta, 0 * theta) for rule in (SVGD, KernelFree)] for theta in groups]
        residuals.append(sum(compare(*pair)[1] for pair in pairs) / 10)
    assert residuals[0] / residuals[1] == pytest.approx(4, rel=0.5)
    assert residuals[1] / residuals[2] == pytest.approx(4, rel=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_on_the_sphere_the_rbf_kernel_is_the_cosine_regularizer(seed):
    """Repulsion of the recommended rule has the direction of -grad of the sum of cosines between heads."""
    theta, _ = particles(4, 65_536, (), seed)
    zero = torch.zeros_like(theta)
    sphere = SVGD(1.0, 1.0, space="sphere", smoothing=0).gradient(theta, zero)
    moving = theta.clone().requires_grad_()
    unit = torch.nn.functional.normalize(moving, dim=-1)
    (slope,) = torch.autograd.grad((unit @ unit.T).sum(), moving)
    assert compare(sphere, slope)[0] > 0.9999
    assert compare(sphere, CosineLadder(1.0, 1.0, rung="regulariser").gradient(theta, zero))[0] > 0.9999
    few = theta[:, :4] + 1  # similar heads of few dimensions: not the same
    ladder = CosineLadder(1.0, 1.0, rung="regulariser").gradient(few, zero[:, :4])
    assert compare(SVGD(1.0, 1.0, space="sphere", smoothing=0).gradient(few, zero[:, :4]), ladder)[0] < 0.99
