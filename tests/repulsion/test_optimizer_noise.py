"""Noise that follows the optimizer's step: one step against scalar arithmetic, stationary variances, refusals."""

import math

import pytest
import torch
from torch import nn

from repulsive import SGLD, SPOS, heads_by_hand, repel
from repulsive.errors import OptimizerError, RuleError
from repulsive.particles import noise as counters
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
RULE = SGLD(0.3, 0.7)
SEED = 5


def scalar_sgd(theta, gradients, normals, entry):
    """Momentum SGD of one weight, with noise in its gradient. A buffer starts without dampening."""
    lr, mu, damp, decay = (entry[name] for name in ("lr", "momentum", "dampening", "weight_decay"))
    sigma = math.sqrt(2 * RULE.temperature * RULE.stepsize * (1 - mu) / (lr * (1 - damp)))
    buffer = 0.0
    for t, (gradient, normal) in enumerate(zip(gradients, normals, strict=True)):
        grad, noise = RULE.stepsize * gradient + decay * theta, -sigma * normal
        if not mu:
            theta -= lr * (grad + noise)
            continue
        buffer = mu * buffer + (grad if t == 0 else (1 - damp) * grad) + (1 - damp) * noise
        theta -= lr * (grad + noise + mu * buffer if entry["nesterov"] else buffer)
    return theta


def scalar_adam(theta, gradients, normals, entry):
    """Adam of one weight, with noise in its first moment only and a temperature that rises with the second one."""
    lr, (b1, b2), eps, decay = (entry[name] for name in ("lr", "betas", "eps", "weight_decay"))
    first = second = largest = 0.0
    for t, (gradient, normal) in enumerate(zip(gradients, normals, strict=True), start=1):
        grad = RULE.stepsize * gradient
        if entry["decoupled"]:
            theta *= 1 - lr * decay
        else:
            grad += decay * theta
        second = b2 * second + (1 - b2) * grad**2
        largest = max(largest, second)
        rate = lr / (math.sqrt((largest if entry["amsgrad"] else second) / (1 - b2**t)) + eps)
        noise = -math.sqrt(2 * RULE.temperature * RULE.stepsize * (1 - b2**t) / rate) * normal
        first = b1 * first + (1 - b1) * (grad + noise)
        theta -= rate * first / (1 - b1**t)
    return theta


def scalar_rmsprop(theta, gradients, normals, entry):
    lr, alpha, eps, mu = (entry[name] for name in ("lr", "alpha", "eps", "momentum"))
    square = mean = buffer = 0.0
    for t, (gradient, normal) in enumerate(zip(gradients, normals, strict=True), start=1):
        grad = RULE.stepsize * gradient
        square = alpha * square + (1 - alpha) * grad**2
        mean = alpha * mean + (1 - alpha) * grad if entry["centered"] else 0.0
        divisor = math.sqrt(square - mean**2) + eps
        variance = 2 * RULE.temperature * RULE.stepsize * (1 - alpha**t) * (1 - mu) * divisor / lr
        buffer = mu * buffer + (grad - math.sqrt(variance) * normal) / divisor
        theta -= lr * buffer
    return theta


CASES = {
    "sgd": (SGD, {}, scalar_sgd),
    "sgd, decay": (SGD, {"weight_decay": 0.1}, scalar_sgd),
    "momentum": (SGD, {"momentum": 0.9}, scalar_sgd),
    "momentum, foreach": (SGD, {"momentum": 0.9, "foreach": True}, scalar_sgd),
    "dampening": (SGD, {"momentum": 0.8, "dampening": 0.5}, scalar_sgd),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}, scalar_sgd),
    "adam": (ADAM, {}, scalar_adam),
    "adam, fused": (ADAM, {"fused": True}, scalar_adam),
    "adam, foreach": (ADAM, {"foreach": True}, scalar_adam),
    "adam, coupled decay": (ADAM, {"weight_decay": 0.1}, scalar_adam),
    "adam without first moment": (ADAM, {"betas": (0.0, 0.9)}, scalar_adam),
    "amsgrad": (ADAM, {"amsgrad": True, "betas": (0.9, 0.5)}, scalar_adam),
    "adamw": (ADAMW, {"weight_decay": 0.1}, scalar_adam),
    "adamw, tensor lr": (ADAMW, {"lr": torch.tensor(0.05, dtype=torch.float64), "foreach": False}, scalar_adam),
    "rmsprop": (RMSPROP, {}, scalar_rmsprop),
    "rmsprop, momentum": (RMSPROP, {"momentum": 0.9}, scalar_rmsprop),
    "rmsprop, centred": (RMSPROP, {"momentum": 0.5, "centered": True}, scalar_rmsprop),
}


def small_model(kind, options, rule=RULE, **settings):
    torch.manual_seed(1)
    model = nn.Linear(3, 5, bias=False).double()
    optimizer = kind(model.parameters(), **{"lr": 0.05, **options})
    rows = torch.tensor([[0, 3], [4, 1]])  # row 2 belongs to no head
    groups = heads_by_hand(model, {"weight": ("q", rows)})
    return model, optimizer, repel(model, optimizer, rule, groups=groups, seed=SEED, verbose=False, **settings)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_scalar_arithmetic(case):
    kind, options, scalar = CASES[case]
    model, optimizer, handle = small_model(kind, options, noise_in="optimizer")
    start = model.weight.detach().clone()
    gradients = torch.randn(4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for grad in gradients:
        model.weight.grad = grad.clone()
        optimizer.step()
    entry = optimizer.param_groups[0] | {"lr": float(optimizer.param_groups[0]["lr"]), "decoupled": kind is ADAMW}
    name = f"{handle.groups[0].name}/0"
    keys = [counters.key(SEED, step, name) for step in range(4)]
    normals = torch.stack([counters.normal(key, 12, dtype=torch.float64) for key in keys]).view(4, 2, 2, 3)
    for head, rows in enumerate(handle.groups[0].slices[0].rows.tolist()):
        for place, row in enumerate(rows):
            for column in range(3):
                series = gradients[:, row, column].tolist(), normals[:, head, place, column].tolist()
                expected = scalar(float(start[row, column]), *series, entry)
                assert math.isclose(float(model.weight.detach()[row, column]), expected, rel_tol=1e-6, abs_tol=1e-9)

    plain = nn.Linear(3, 5, bias=False).double()
    with torch.no_grad():
        plain.weight.copy_(start)
    optimizer = kind(plain.parameters(), **{"lr": 0.05, **options})
    for grad in gradients:
        plain.weight.grad = grad.clone()
        optimizer.step()
    assert torch.equal(plain.weight[2], model.weight[2])


def test_the_noise_is_not_clipped():
    weights = []
    for max_norm in (None, 1e-12):
        torch.manual_seed(0)
        order = "clip-repel" if max_norm is None else "repel-clip"
        model, optimizer, _ = small_model(SGD, {}, noise_in="optimizer", max_norm=max_norm, order=order)
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        weights.append(model.weight.detach())
    assert torch.equal(*weights)


def test_weights_that_never_had_a_gradient_stay():
    model, optimizer, _ = small_model(ADAM, {}, noise_in="optimizer")
    start = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    model.weight.grad[:, 0] = 0
    optimizer.step()
    assert torch.equal(model.weight[:, 0], start[:, 0])
    assert torch.isfinite(model.weight).all() and not torch.isclose(model.weight[:, 1], start[:, 1]).any()


@pytest.mark.parametrize("kind", [SGD, ADAM, RMSPROP])
def test_a_learning_rate_of_zero_adds_no_noise(kind):
    options = {"momentum": 0.9} if kind is SGD else {}
    model, optimizer, handle = small_model(kind, options | {"lr": 0.0}, noise_in="optimizer")
    start = model.weight.detach().clone()
    optimizer.state[model.weight]  # not the first step of an empty optimizer, which would be skipped
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, start) and handle.steps == 1
    assert all(torch.isfinite(torch.as_tensor(v)).all() for v in optimizer.state[model.weight].values())


def test_a_step_that_the_scaler_skips_draws_nothing():
    model, optimizer, handle = small_model(ADAM, {"fused": True}, noise_in="optimizer")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for is_bad in (False, True):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3, dtype=torch.float64)).square().sum()).backward()
        if is_bad:
            model.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == is_bad
    assert handle.steps == 1


def test_bfloat16_weights_get_noise():
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    optimizer = ADAM(model.parameters(), lr=0.1)
    groups = heads_by_hand(model, {"weight": ("q", 4)})
    repel(model, optimizer, SGLD(1.0, 1.0), groups=groups, noise_in="optimizer", verbose=False)
    start = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    moved = (model.weight.detach() - start).float()
    expected = math.sqrt(2 * 0.1 * (1 - 0.999))  # the temperature of the first step is (1 - b2) T
    assert abs(float(moved.std()) / expected - 1) < 0.1


class OwnStep(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


class NoOwnStep(torch.optim.SGD):
    """The step of SGD under another name."""


class OtherNoise(SGLD):
    def noise_scale(self, lr):
        return 0.1


REFUSED = [torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adamax, torch.optim.Rprop, torch.optim.ASGD, OwnStep]
REFUSED += [getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)]


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_with_other_steps_are_refused(kind):
    with pytest.raises(OptimizerError, match=f"does not support {kind.__name__}: .*SGD, Adam, AdamW, RMSprop"):
        small_model(kind, {}, noise_in="optimizer")
    _, optimizer, handle = small_model(kind, {}, SGLD(0.1, 0.0), noise_in="optimizer")  # no noise, no objection
    assert handle.attached and optimizer is handle.optimizer


def test_reasons_of_refusals():
    with pytest.raises(OptimizerError, match="steps decay to zero by themselves"):
        small_model(torch.optim.Adagrad, {}, noise_in="optimizer")
    with pytest.raises(OptimizerError, match="step method of its own"):
        small_model(OwnStep, {}, noise_in="optimizer")
    with pytest.raises(OptimizerError, match="below 1"):
        small_model(SGD, {"momentum": 0.9, "dampening": 1.0}, noise_in="optimizer")
    with pytest.raises(RuleError, match="noise_scale"):
        small_model(SGD, {}, OtherNoise(), noise_in="optimizer")
    with pytest.raises(RuleError, match=r"noise_in='optimizer'.*released"):
        small_model(SGD, {}, SPOS(noise="released"), noise_in="optimizer")
    assert small_model(NoOwnStep, {}, noise_in="optimizer")[2].attached


@pytest.mark.parametrize("rule", [SPOS(0.1, 0.5, 100.0), SPOS(0.1, 0.5, 100.0, space="logits")])
def test_spos_gets_its_langevin_noise(rule, make_model, backward):
    """The noise is the only difference from the same rule at temperature zero."""
    ends = []
    for temperature in (0.0, 0.5):
        model = make_model()
        optimizer = ADAM(model.parameters(), lr=0.01, betas=(0.9, 0.5))
        cold = SPOS(0.1, 0.5, 100.0, space=rule.space, temperature=temperature)
        repel(model, optimizer, cold, noise_in="optimizer", verbose=False)
        backward(model)
        optimizer.step()
        weight = model.stack.layers[0].self_attn.in_proj_weight
        ends.append((weight.detach().clone()[:32], optimizer.state[weight]["exp_avg_sq"][:32]))
    assert torch.equal(ends[0][1], ends[1][1])
    rate = 0.01 / ((ends[0][1] / 0.5).sqrt() + 1e-8)
    standard = (ends[1][0] - ends[0][0]) / (2 * 0.5 * 0.5 * 0.1 / 100 * rate).sqrt()
    assert abs(float(standard.std()) - 1) < 0.1 and abs(float(standard.mean())) < 0.15


@pytest.fixture(scope="module")
def chains():
    with study("studies.sampling.gaussians") as gaussians, study("studies.sampling.chains") as module:
        yield gaussians, {method.label: method for method in module.METHODS}, module


@pytest.mark.parametrize("label", ["SGD", "SGD, momentum 0.9", "SGD, Nesterov 0.9"])
def test_sgd_samples_with_the_variance_of_its_recursion(label, chains):
    """Standard error of the variance: about 0.5 %."""
    gaussians, methods, _ = chains
    target = gaussians.Target("N(0, 1)", 0.05)
    lr = 0.05 / methods[label].sum_of_steps
    [found] = gaussians.measure(methods[label], "optimizer", [target], lr=lr, chains=4096, steps=400, burn_in=100)
    with study("studies.sampling.theory") as theory:
        exact = theory.discretised(methods[label], 0.05)
    assert abs(exact - 1) < 0.05 and abs(found.stiff - exact) < 0.02
    assert abs(found.mean) < 0.03 and abs(found.kurtosis - 3) < 0.15


@pytest.mark.parametrize("label", ["Adam", "AdamW", "RMSprop, alpha 0.999"])
def test_adaptive_optimizers_sample_the_variance(label, chains):
    """Within 5 % where the second moment averages over many decorrelation times: here fifty."""
    gaussians, methods, _ = chains
    targets = [gaussians.Target(shape, 0.05) for shape in gaussians.SHAPES]
    for found in gaussians.measure(methods[label], "optimizer", targets, lr=0.05, chains=2048, steps=400, burn_in=100):
        assert abs(found.stiff - 1) < 0.05 and abs(found.slow - 1) < 0.05 and abs(found.mean) < 0.06


@pytest.mark.parametrize(("noise_in", "low", "high"), [("gradient", 0.1, 0.25), ("parameter", 1.5, 2.2)])
def test_other_places_of_the_noise_do_not_sample_under_adam(noise_in, low, high, chains):
    """The same measurement sees the error of the other two settings."""
    gaussians, methods, _ = chains
    target = gaussians.Target("N(0, 1)", 0.05)
    [found] = gaussians.measure(methods["Adam"], noise_in, [target], lr=0.05, chains=512, steps=200, burn_in=300)
    assert low < found.stiff < high
