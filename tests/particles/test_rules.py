"""Every rule and kernel against the double loop of `oracle`, and under invariances."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from repulsive.errors import RuleError
from repulsive.particles import SGLD, SPOS, SVGD, CosineLadder, Gaussian
from tests.particles import oracle
from tests.particles.oracle import close, particles

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.sampled_from([(), (1,), (3,), (2, 2)]))


def expected(theta: torch.Tensor, grad: torch.Tensor, stepsize: float, **options) -> torch.Tensor:
    flat = zip(theta.flatten(0, -3), grad.flatten(0, -3), strict=True) if theta.ndim > 2 else [(theta, grad)]
    return torch.stack([-stepsize * oracle.phi(t, g, **options) for t, g in flat]).reshape(theta.shape)


@settings(max_examples=60)
@given(
    shape=shapes,
    seed=st.integers(0, 2**31),
    kernel=st.sampled_from(["rbf", "imq", "cosine"]),
    bandwidth=st.sampled_from(["paper", "released", "released-lower", 0.7]),
    space=st.sampled_from(["weights", "sphere"]),
    smoothing=st.sampled_from([0.0, 0.4, 1.0]),
    precision=st.sampled_from([0.0, 0.3]),
    alpha=st.sampled_from([0.0, 0.01, 1.0]),
    beta=st.sampled_from([None, 5.0]),
)
def test_svgd_and_spos_match_the_double_loop(shape, seed, kernel, bandwidth, space, smoothing, precision, alpha, beta):
    m, d, batch = shape
    if space == "sphere" and d == 1:
        d = 2  # the sphere of one dimension is two points
    theta, grad = particles(m, d, batch, seed)
    bandwidth = "paper" if kernel == "cosine" else bandwidth  # the cosine kernel has none
    options = {"kernel": kernel, "bandwidth": bandwidth, "space": space, "smoothing": smoothing}
    prior = Gaussian(std=(1 / precision) ** 0.5) if precision else "uniform"
    if beta is None:
        rule = SVGD(0.1, alpha, prior=prior, **options)
        found = rule.gradient(theta, grad)
    else:
        rule = SPOS(0.1, alpha, beta, prior=prior, temperature=0.0, **options)
        found = rule.gradient(theta, grad, torch.Generator().manual_seed(0))
    truth = expected(theta, grad, 0.1, alpha=alpha, precision=precision, beta=beta or math.inf, **options)
    assert close(found, truth)


def softmax_kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A kernel without a matrix form: not radial, not symmetric in scale."""
    return torch.tanh((x * y).sum(-1)) * torch.exp(-(x - y).abs().sum(-1))


@pytest.mark.parametrize("space", ["weights", "sphere"])
def test_any_callable_kernel(space, monkeypatch):
    monkeypatch.setitem(oracle.KERNELS, "own", lambda x, y, h: softmax_kernel(x, y))
    theta, grad = particles(4, 5, (2,), 3)
    found = SVGD(0.1, 0.5, kernel=softmax_kernel, space=space).gradient(theta, grad)
    truth = expected(theta, grad, 0.1, alpha=0.5, kernel="own", space=space)
    own = torch.zeros_like(truth)  # autograd includes the slope of a head's kernel with itself, here not zero
    for b in range(2):
        for i in range(4):
            x = theta[b, i].clone().requires_grad_()
            if space == "weights":
                slope = torch.autograd.grad(softmax_kernel(x, theta[b, i]), x)[0]
            else:
                unit = theta[b, i] / theta[b, i].norm()
                slope = -torch.autograd.grad(softmax_kernel(unit, x / x.norm()), x)[0]
            own[b, i] = -0.1 * 0.5 * slope / 4
    assert close(found, truth + own)


def test_a_callable_twin_of_rbf_gives_the_same():
    theta, grad = particles(5, 7, (3,), 4)
    twin = lambda x, y: torch.exp(-(x - y).square().sum(-1) / 2.5)  # noqa: E731
    for options in ({}, {"space": "sphere"}, {"alpha": "auto", "ratio": 0.3}):
        known = SVGD(0.1, **{"alpha": 0.2, **options}, kernel="rbf", bandwidth=2.5).gradient(theta, grad)
        assert close(SVGD(0.1, **{"alpha": 0.2, **options}, kernel=twin).gradient(theta, grad), known)


def test_blackjax_formula():
    """blackjax.vi.svgd: phi_i = mean_j [k(x_j, x_i) grad log p_j + grad_{x_j} k], k = exp(-d2 / length_scale)."""
    theta, grad = particles(7, 3, (), 11)
    m = len(theta)
    distances = torch.pdist(theta)
    length_scale = distances.quantile(0.5).square() / math.log(m)
    kernel = torch.exp(-torch.cdist(theta, theta).square() / length_scale)
    slope = -2 / length_scale * (theta[:, None] - theta[None]) * kernel[..., None]  # [j, i, D], d/d theta_j
    functional = (kernel[..., None] * -grad[:, None] + slope).mean(0)
    assert close(SVGD(stepsize=1.0, alpha=1.0).gradient(theta, grad), -functional)


def test_pyro_formula_in_one_dimension():
    """pyro's RBFSteinKernel: bandwidth med(d2) / log(M), lower median over the ordered pairs, per coordinate."""
    theta, grad = particles(6, 1, (), 5)  # 15 pairs: the lower median is the median
    squares = (theta - theta.T).square()
    row, column = torch.tril_indices(6, 6, -1)
    h = squares[row, column].median() / math.log(6)
    kernel = torch.exp(-squares / h)
    attractive = kernel @ -grad / 6
    repulsive = (kernel * 2 * (theta - theta.T) / h).sum(1, keepdim=True) / 6
    assert close(SVGD(1.0, 1.0).gradient(theta, grad), -(attractive + repulsive))


@pytest.mark.parametrize(
    "rule",
    [
        SVGD(),
        SVGD(kernel="imq", alpha=1.0),
        SVGD(kernel="cosine"),
        SVGD(space="sphere"),
        SVGD(alpha="auto"),
        SGLD(0.1, 0.0),
        CosineLadder(rung="derivative"),
    ],
)
def test_permuting_heads_permutes_the_result(rule):
    theta, grad = particles(6, 5, (2,), 7)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    assert close(rule.gradient(theta[:, order], grad[:, order]), rule.gradient(theta, grad)[:, order])


@pytest.mark.parametrize("bandwidth", ["paper", "released", 2.0])
@pytest.mark.parametrize("space", ["weights", "sphere"])
def test_one_head_gets_stepsize_times_gradient(bandwidth, space):
    theta, grad = particles(1, 8, (3,), 2)
    assert torch.equal(SVGD(0.1, 5.0, bandwidth=bandwidth, space=space).gradient(theta, grad), 0.1 * grad)
    assert close(SPOS(0.1, 5.0, 4.0, temperature=0.0).gradient(theta, grad), 0.1 * (1 + 1 / 4) * grad, 1e-14)


@pytest.mark.parametrize("value", [0.0, 3.0])
@pytest.mark.parametrize("kernel", ["rbf", "imq", "cosine"])
@pytest.mark.parametrize("space", ["weights", "sphere"])
def test_equal_heads_stay_finite_and_warn(value, kernel, space):
    theta, grad = torch.full((4, 6), value), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    rule = SVGD(0.1, 1.0, kernel=kernel, space=space)
    if kernel == "cosine":
        found = rule.gradient(theta, grad)
    else:
        with pytest.warns(UserWarning, match="all heads of a group are equal"):
            found = rule.gradient(theta, grad)
    assert found.isfinite().all()
    if kernel != "cosine":
        assert torch.allclose(found, 0.1 * grad.mean(0).expand(4, -1), atol=1e-6)  # K = 1, no force


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e18])
def test_scales(scale):
    """Scaling the particles by c scales the repulsion by 1 / c and does not change the drive."""
    theta, grad = particles(5, 6, (), 9)
    one = SVGD(0.1, 1.0).gradient(theta, torch.zeros_like(grad))
    assert close(SVGD(0.1, scale).gradient(scale * theta, torch.zeros_like(grad)), one, 1e-9)
    assert close(SVGD(0.1, 0.0).gradient(scale * theta, grad), SVGD(0.1, 0.0).gradient(theta, grad), 1e-9)
    single = SVGD(0.1, scale).gradient((scale * theta).float(), torch.zeros(5, 6))
    assert close(single.double(), one, 1e-4)


def test_nearly_equal_heads_in_single_precision():
    """65,536 numbers per head, heads 0.1 % apart: float32 must still agree with float64."""
    source = torch.Generator().manual_seed(0)
    base = torch.randn(1, 65_536, generator=source)
    theta = base + 1e-3 * torch.randn(4, 65_536, generator=source)
    zero = torch.zeros_like(theta)
    found = SVGD(1.0, 1.0).gradient(theta, zero).double()
    assert close(found, SVGD(1.0, 1.0).gradient(theta.double(), zero.double()), 1e-5)
    assert close(found[:, :8], -oracle.phi(theta.double(), zero.double(), alpha=1.0)[:, :8], 1e-5)


def test_repulsion_of_almost_equal_heads_is_bounded():
    source = torch.Generator().manual_seed(0)
    base, apart = torch.randn(1, 1000, generator=source), torch.randn(4, 1000, generator=source)
    push = [
        SVGD(1.0, 1.0).gradient((base + gap * apart).double(), torch.zeros(4, 1000).double()).norm()
        for gap in (1e-2, 1e-4, 1e-6, 1e-7)
    ]
    assert push[1] > 5 * push[0]  # grows as heads come closer ...
    assert push[2] < push[1] and push[3] < push[2]  # ... and fades where they differ only by rounding


@pytest.mark.parametrize("where", ["theta", "grad"])
@pytest.mark.parametrize("rule", [SVGD(), SVGD(space="sphere"), SPOS(), SGLD(), SVGD(alpha="auto")])
def test_nan_is_never_hidden(where, rule):
    theta, grad = particles(4, 5, (2,), 1)
    dirty = {"theta": theta, "grad": grad}
    dirty[where][0, 2, 3] = math.nan
    found = rule.gradient(**dirty)
    if where == "theta" and rule == SGLD():
        assert found.isfinite().all(), "weights do not enter this rule at all: the bad one stays bad by itself"
        return
    assert found[0].isnan().any()
    assert found[1].isfinite().all(), "another group must not be touched"
    if where == "theta":
        assert found[0].isnan().all(), "distances to the bad head are unknown to every head"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    theta, grad = (x.to(dtype) for x in particles(4, 300, (), 1))
    found = SVGD().gradient(theta, grad)
    assert found.dtype == dtype
    assert torch.equal(found, SVGD().gradient(theta.float(), grad.float()).to(dtype))


def test_result_does_not_depend_on_autocast():
    theta, grad = (x.float() for x in particles(4, 300, (), 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = SVGD().gradient(theta, grad)
    assert torch.equal(inside, SVGD().gradient(theta, grad))


@pytest.mark.parametrize("ratio", [0.05, 2.0])
@pytest.mark.parametrize("space", ["weights", "sphere"])
def test_auto_alpha_holds_the_ratio(ratio, space):
    theta, grad = particles(4, 30, (3,), 1)
    drive = SVGD(0.1, 0.0, space=space).gradient(theta, grad)
    both = SVGD(0.1, "auto", ratio=ratio, space=space).gradient(theta, grad)
    found = (both - drive).flatten(1).norm(dim=1) / drive.flatten(1).norm(dim=1)
    assert torch.allclose(found, torch.full_like(found, ratio))


@pytest.mark.parametrize("kernel", ["rbf", "imq", "cosine"])
def test_the_sphere_leaves_norms_alone(kernel):
    """One small step changes norms only to second order, while cosines fall; in weight space norms grow."""
    theta, _ = particles(4, 20, (), 8)
    theta = theta + 2  # similar heads, so that repulsion acts
    zero = torch.zeros_like(theta)
    steps = {}
    for space in ("weights", "sphere"):
        force = -SVGD(1.0, 1.0, kernel=kernel, space=space).gradient(theta, zero)
        along = (force * theta).sum(-1) / (force.norm(dim=-1) * theta.norm(dim=-1))
        steps[space] = (force, along)
    force, along = steps["sphere"]
    assert along.abs().max() < 1e-12
    assert steps["weights"][1].abs().max() > 1e-2
    cosine = lambda x: torch.cosine_similarity(x[:, None], x[None], -1).sum()  # noqa: E731
    assert cosine(theta + 1e-3 * force / force.norm() * theta.norm()) < cosine(theta)


def test_noise_follows_the_generator_and_the_formula():
    theta, grad = particles(3, 50_000, (), 0)
    for rule, quiet, sigma in [
        (SPOS(0.1, 0.01, 50.0), SPOS(0.1, 0.01, 50.0, temperature=0.0), 0.1 * math.sqrt(0.02 / (50 * 0.1 * 0.2))),
        (SGLD(0.1, 0.5), SGLD(0.1, 0.0), 0.1 * math.sqrt(2 * 0.5 / (0.1 * 0.2))),
    ]:
        draws = [rule.gradient(theta, grad, torch.Generator().manual_seed(s), lr=0.2) for s in (1, 1, 2)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        noise = draws[0] - quiet.gradient(theta, grad)
        assert abs(float(noise.std()) / sigma - 1) < 0.01
        assert torch.equal(rule.gradient(theta, grad, lr=0.0), quiet.gradient(theta, grad))


def test_released_noise_is_scaled_by_the_median_gradient():
    theta, grad = particles(3, 20_001, (), 0)
    plain, scaled = SPOS(0.1, 0.01, 50.0, temperature=1.0), SPOS(0.1, 0.01, 50.0, noise="released")
    quiet = SPOS(0.1, 0.01, 50.0, temperature=0.0).gradient(theta, grad)
    one, two = (r.gradient(theta, grad, torch.Generator().manual_seed(1)) - quiet for r in (plain, scaled))
    assert torch.allclose(two, one * grad.abs().median())


def test_schedules_reach_alpha():
    theta, grad = particles(3, 4, (), 0)
    rule = SVGD(0.1, alpha=lambda step: 0.5 * step)
    assert close(rule.gradient(theta, grad, step=4), SVGD(0.1, 2.0).gradient(theta, grad))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: SVGD(alpha=-1), "alpha"),
        (lambda: SVGD(alpha="often"), "alpha"),
        (lambda: SVGD(alpha=math.nan), "alpha"),
        (lambda: SVGD(stepsize=0), "stepsize"),
        (lambda: SVGD(stepsize="0.1"), "stepsize"),
        (lambda: SVGD(smoothing=2), "smoothing"),
        (lambda: SVGD(space="torus"), "space"),
        (lambda: SVGD(kernel="rfb"), "kernel"),
        (lambda: SVGD(bandwidth="median"), "bandwidth"),
        (lambda: SVGD(bandwidth=-1.0), "bandwidth"),
        (lambda: SVGD(kernel="cosine", bandwidth=5.0), "no bandwidth"),
        (lambda: SVGD(kernel="hinge", space="sphere", bandwidth="released"), "no bandwidth"),
        (lambda: SVGD(kernel=lambda x, y: (x * y).sum(-1), bandwidth=5.0), "no bandwidth"),
        (lambda: SPOS(kernel="cosine", bandwidth=5.0), "no bandwidth"),
        (lambda: SVGD(prior="flat"), "prior"),
        (lambda: Gaussian(std=0), "std"),
        (lambda: SPOS(beta=0), "beta"),
        (lambda: SPOS(beta=-3), "beta"),
        (lambda: SPOS(temperature=-1), "temperature"),
        (lambda: SPOS(noise="white"), "noise"),
        (lambda: SGLD(temperature=-1), "temperature"),
        (lambda: SVGD(alpha=torch.tensor(0.1)), r"write alpha=float\("),
        (lambda: CosineLadder(rung="fourth"), "rung"),
        (lambda: CosineLadder(kernel="imq"), "kernel"),
        (lambda: SVGD().gradient(torch.ones(2, 3), torch.ones(3, 2)), "same shape"),
        (lambda: SVGD().gradient(torch.ones(3), torch.ones(3)), r"\[..., M, D\]"),
        (lambda: SVGD().gradient(torch.ones(2, 3).long(), torch.ones(2, 3).long()), "floating"),
    ],
)
def test_bad_settings_are_named(make, word):
    with pytest.raises(RuleError, match=word):
        make()


@pytest.mark.parametrize("value", [-1.0, math.nan])
@pytest.mark.parametrize("name", ["alpha", "ratio"])
def test_a_schedule_that_gives_a_negative_number_is_refused(name, value):
    """It would attract heads to each other."""
    schedule = lambda step: 0.1 if step < 5 else value  # noqa: E731
    rule = SVGD(alpha=schedule) if name == "alpha" else SVGD(alpha="auto", ratio=schedule)
    theta, grad = torch.randn(4, 6), torch.randn(4, 6)
    assert rule.gradient(theta, grad, step=4).isfinite().all()
    for use in (lambda: rule.gradient(theta, grad, step=5), lambda: rule.radial_form(5), lambda: rule.is_off(5)):
        with pytest.raises(
            RuleError, match=rf"{name}=.*the schedule gives {value:g} at step 5; it must give numbers >= 0"
        ):
            use()
