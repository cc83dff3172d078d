"""The hinge kernel: it separates near-duplicates, and does not change other heads by a single bit."""

import pytest
import torch

from repulsive.errors import RuleError
from repulsive.particles import SVGD, Hinge
from repulsive.particles.gram import gram
from tests.particles import oracle
from tests.particles.oracle import close, particles

RULE = SVGD(1.0, 1.0, kernel="hinge", space="sphere", smoothing=0)


def crowd(m: int, d: int, seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads around a common direction, with different norms."""
    theta, grad = particles(m, d, (), seed)
    return (theta[:1] + spread * theta) * torch.linspace(0.5, 2.0, m, dtype=theta.dtype)[:, None], grad


def cosines(theta: torch.Tensor) -> torch.Tensor:
    row, column = torch.triu_indices(len(theta), len(theta), 1)
    unit = torch.nn.functional.normalize(theta, dim=-1)
    return (unit @ unit.mT)[row, column]


@pytest.mark.parametrize("spread", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 2.0])
def test_hinge_matches_the_double_loop(spread, alpha):
    theta, grad = crowd(6, 5, 3, spread)
    found = SVGD(0.1, alpha, kernel="hinge", space="sphere", smoothing=0).gradient(theta, grad)
    truth = -0.1 * oracle.phi(theta, grad, alpha=alpha, kernel="hinge", space="sphere", smoothing=0.0)
    assert close(found, truth)


def test_the_double_loop_covers_pairs_on_both_sides_of_the_threshold():
    alike = cosines(crowd(6, 5, 3, 1.0)[0]) > 0.5
    assert alike.any() and not alike.all()


def test_the_values_are_the_excess_over_the_threshold():
    theta, _ = crowd(6, 5, 3, 1.0)
    unit = torch.nn.functional.normalize(theta, dim=-1)
    found = Hinge(0.3).interact(gram(theta), "paper", "sphere").values
    assert close(found, (unit @ unit.mT - 0.3).clamp(min=0))


def test_orthogonal_heads_are_left_alone_exactly():
    torch.manual_seed(0)
    theta = torch.linalg.qr(torch.randn(8, 4, dtype=torch.float64)).Q.T * 3
    grad = torch.randn_like(theta)
    without = SVGD(1.0, 0.0, kernel="hinge", space="sphere", smoothing=0)
    assert torch.equal(RULE.gradient(theta, grad), without.gradient(theta, grad))
    assert torch.equal(RULE.gradient(theta, grad), grad / 4)
    cosine = SVGD(1.0, 1.0, kernel="rbf", space="sphere", smoothing=0)  # another kernel does move them
    assert not torch.equal(cosine.gradient(theta, grad), grad / 4)


def separate(rule: SVGD) -> torch.Tensor:
    """Cosines of a pair of duplicates and a distant head after 200 steps of gradient descent without a loss."""
    torch.manual_seed(0)
    base = torch.randn(2, 16, dtype=torch.float64)
    theta = torch.stack([base[0], base[0] + 0.05 * torch.randn(16, dtype=torch.float64), base[1]])
    assert cosines(theta).max() > 0.99
    for _ in range(200):
        theta = theta - rule.gradient(theta, torch.zeros_like(theta))
    return cosines(theta)


def test_near_duplicates_part_and_stop_at_the_threshold():
    assert separate(RULE).max() == pytest.approx(0.5, abs=0.1)
    without = separate(SVGD(1.0, 0.0, kernel="hinge", space="sphere", smoothing=0))
    assert without.max() > 0.99  # they stay together without repulsion


def test_only_the_duplicates_move():
    theta, _ = particles(2, 16, (), 0)
    theta = torch.stack([theta[0], 1.1 * theta[0] + 1e-3, theta[1]])
    assert cosines(theta)[1:].abs().max() < 0.5
    force = RULE.gradient(theta, torch.zeros_like(theta))
    assert force[:2].norm(dim=-1).min() > 0 and torch.equal(force[2], torch.zeros_like(force[2]))
    assert (force * theta).sum(-1).abs().max() < 1e-12  # along the sphere


def test_zero_heads_and_nan_heads():
    theta, grad = crowd(4, 5, 1, 0.1)
    theta[2] = 0
    assert RULE.gradient(theta, grad).isfinite().all()
    assert torch.equal(RULE.gradient(theta, grad)[2], grad[2] / 4)
    theta[2] = torch.nan
    assert RULE.gradient(theta, grad).isnan().all(-1).all()


def test_another_threshold():
    theta, _ = crowd(4, 5, 1, 1.0)
    strict = SVGD(1.0, 1.0, kernel=Hinge(0.99), space="sphere")
    assert strict.smoothing == 0 and cosines(theta).max() < 0.99
    assert not strict.gradient(theta, torch.zeros_like(theta)).any()
    with pytest.raises(RuleError, match="at least 0 and below 1"):
        Hinge(1.0)


@pytest.mark.parametrize("options", [{}, {"space": "weights"}, {"space": "sphere", "smoothing": 1.0}])
def test_it_needs_directions_and_no_smoothing(options):
    with pytest.raises(RuleError, match="hinge"):
        SVGD(kernel="hinge", **options)
    assert SVGD(kernel="hinge", space="logits").smoothing == 0
