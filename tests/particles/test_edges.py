"""Zero and equal heads, and settings that are callables, numpy or torch numbers, or invalid."""

import warnings

import pytest
import torch

from repulsive.errors import RuleError
from repulsive.particles import SVGD, Cosine, Gaussian, Hinge
from repulsive.particles.collapse import CollapsedHeads
from repulsive.particles.gram import gram
from repulsive.particles.kernels import SHORTEST
from repulsive.particles.logits import cosines
from repulsive.particles.schedules import Until
from tests.particles import oracle
from tests.particles.oracle import close, particles


def test_a_callable_kernel_takes_heads_that_are_zero():
    """They have no direction, so on the sphere they do not move, as with the named kernels."""
    torch.manual_seed(0)
    theta, grad = torch.randn(4, 6).double(), torch.randn(4, 6).double()
    theta[1] = 0
    rule = SVGD(kernel=lambda x, y: torch.exp(-(x - y).square().sum(-1) / 2), space="sphere", alpha=0.1)
    known = SVGD(kernel="rbf", bandwidth=2.0, space="sphere", alpha=0.1)
    assert close(rule.gradient(theta, grad), known.gradient(theta, grad))


@pytest.mark.parametrize("length", [0.0, 1e-9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kernel", "space"), [("rbf", "sphere"), ("imq", "sphere"), ("cosine", "sphere"), ("cosine", "weights")]
)
def test_a_zero_head_exerts_and_receives_no_force(kernel, space, dtype, length):
    """The other heads move as without it. Its computed squared norm is about +-1e-17 instead of 0."""
    for seed in range(10):
        theta, grad = particles(5, 30, (), seed)
        theta[1] *= length
        bandwidth = {} if kernel == "cosine" else {"bandwidth": 1.5}
        rule = SVGD(1.0, 0.7, kernel=kernel, smoothing=0.0, space=space, **bandwidth)
        found = 5 * rule.gradient(theta.to(dtype), grad.to(dtype)).double()
        others = [0, 2, 3, 4]
        alone = oracle.phi(
            theta[others], grad[others], alpha=0.7, kernel=kernel, bandwidth=1.5, smoothing=0.0, space=space
        )
        assert close(found[others], -4 * alone, 1e-5 if dtype == torch.float32 else 1e-12)
        assert close(found[1], grad[1], 1e-6)


@pytest.mark.parametrize("kernel", ["rbf", "cosine", "hinge"])
def test_a_head_counts_as_zero_below_a_share_of_the_other_norms(kernel):
    """Force on each head with norms just below and just above the bound, on a group of nearly parallel heads."""
    base, theta = particles(1, 30, (), 0)[0], particles(4, 30, (), 1)[0]
    theta = torch.nn.functional.normalize(base + 0.3 * theta, dim=-1)
    others = theta[1:].square().sum(-1).sum() / 4  # mean square norm of all four, if the first one is short
    grad = torch.zeros_like(theta)
    for share, is_zero in ((0.9, True), (1.1, False)):
        short = torch.cat([share * SHORTEST * others.sqrt() * theta[:1], theta[1:]])
        push = SVGD("heads", 1.0, kernel=kernel, space="sphere", smoothing=0).gradient(short, grad)
        assert bool((push[0] == 0).all()) is is_zero
        assert push[1:].any(-1).all()
    assert cosines(gram(short).inner, SHORTEST)[0, 1] > 0.5
    short[0] *= 0.9 / 1.1
    assert not cosines(gram(short).inner, SHORTEST)[0].any()


def test_the_recommended_rule_holds_its_ratio_beside_a_zero_head():
    theta, grad = particles(4, 50, (), 3)
    theta[2] = 0
    rule = SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0)
    plain = SVGD(alpha=0.0, space="sphere", smoothing=0).gradient(theta, grad)
    pushed = rule.gradient(theta, grad) - plain
    assert float(pushed.norm() / plain.norm()) == pytest.approx(0.03) and not pushed[2].any()


@pytest.mark.filterwarnings("ignore:all heads")
@pytest.mark.parametrize("space", ["weights", "sphere"])
@pytest.mark.parametrize("heads", [1, 2, 5, 12])
def test_equal_heads_are_not_pushed_to_hold_a_ratio(heads, space):
    """The norm of no force is about 1e-9 instead of 0; alpha must not divide by it."""
    theta, grad = torch.randn(1, 50).expand(heads, 50), torch.randn(heads, 50)
    measure = SVGD(alpha="auto", space=space).coefficients(gram(theta), gram(grad)).measure
    assert measure is not None and measure.alpha == 0 and measure.repulsion == 0 and measure.drive > 0


def test_a_callable_bandwidth_is_called_for_each_group():
    theta, grad = particles(5, 6, (3,), 2)
    theta[1] *= 20
    calls = []
    rule = SVGD(alpha=0.5, bandwidth=lambda d2: calls.append(d2.shape) or float(d2.median()))
    found = rule.gradient(theta, grad)
    assert calls == [(5, 5)] * 3
    for group in range(3):
        assert close(found[group], rule.gradient(theta[group], grad[group]))
    with pytest.raises(RuleError, match=r"returned shape \[5, 5\] for one group"):
        SVGD(bandwidth=lambda d2: d2).gradient(theta, grad)


def test_the_prior_is_excluded_from_the_ratio():
    theta, grad = particles(5, 7, (), 4)
    twin = lambda x, y: torch.exp(-(x - y).square().sum(-1) / 2.5)  # noqa: E731
    settings = {"alpha": "auto", "ratio": 0.5, "prior": "gaussian"}
    known = SVGD(0.1, kernel="rbf", bandwidth=2.5, **settings).gradient(theta, grad)
    assert close(SVGD(0.1, kernel=twin, **settings).gradient(theta, grad), known)


@pytest.mark.parametrize(
    "wrong", [{"prior": None}, {"prior": Gaussian}, {"bandwidth": [1.0, 2.0]}, {"bandwidth": None}], ids=str
)
def test_an_invalid_prior_or_bandwidth_is_refused_at_once(wrong):
    with pytest.raises(RuleError, match=next(iter(wrong))):
        SVGD(**wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SVGD(kernel=Hinge, space="sphere"), r"kernel=Hinge: expected a kernel, got a class; write Hinge"),
        (lambda: SVGD(kernel=Cosine), "kernel=Cosine: expected a kernel, got a class"),
        (lambda: SVGD(alpha=Until), r"SVGD\(alpha=Until\): expected a number or a schedule, got a class"),
        (lambda: SVGD(alpha="auto", ratio=Until), r"SVGD\(ratio=Until\)"),
        (lambda: Hinge("0.5"), r"Hinge\(threshold='0.5'\): must be a number"),
        (lambda: Gaussian(std="1"), r"Gaussian\(std='1'\): must be a positive number"),
        (lambda: Gaussian(num_data=None), r"Gaussian\(num_data=None\): must be a positive number"),
        (lambda: SVGD(bandwidth=True), "bandwidth=True: must be a positive number"),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused_at_once(make, message):
    with pytest.raises(RuleError, match=message):
        make()


def test_numpy_and_torch_numbers_are_accepted():
    theta, grad = particles(5, 7, (), 4)
    known = SVGD(bandwidth=2.0).gradient(theta, grad)
    for two in (torch.tensor(2.0), torch.tensor([2]), 2):
        assert torch.equal(SVGD(bandwidth=two).gradient(theta, grad), known)


@pytest.mark.parametrize("space", ["weights", "sphere"])
@pytest.mark.parametrize("heads", ["one", "equal", "apart"])
def test_a_callable_kernel_does_not_push_a_head_by_its_own_rounding_error(heads, space):
    """`alpha="auto"` scaled the slope of the cosine of a head with itself to the target ratio."""

    def hinge(x, y):
        return (torch.nn.functional.cosine_similarity(x, y, dim=-1) - 0.5).clamp(min=0)

    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(4, 64, generator=generator)  # no cosine is above 0.5
    theta = {"one": theta[:1], "equal": theta[:1].repeat(4, 1), "apart": theta}[heads]
    grad = torch.randn(theta.shape, generator=generator)
    rule = SVGD("heads", "auto", kernel=hinge, space=space, smoothing=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapsedHeads)
        assert torch.equal(rule.gradient(theta, grad), grad)


def test_a_callable_kernel_keeps_a_true_force_of_a_head_on_itself():
    """The gradient of x . y by x is y, also for equal heads."""
    theta = torch.ones(3, 8)
    rule = SVGD(3.0, alpha=0.5, kernel=lambda x, y: (x * y).sum(-1), smoothing=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CollapsedHeads)
        result = rule.gradient(theta, torch.zeros_like(theta))
    torch.testing.assert_close(result, -1.5 * theta)
