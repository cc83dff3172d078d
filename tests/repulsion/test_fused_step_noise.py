"""Noise after the optimizer's step in one Triton launch: weights and momentum buffers are those of the eager noise."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SGLD, SPOS, repel
from repulsive.repulsion import fix_second_moment
from repulsive.repulsion.backends import choose, launch_settings
from repulsive.repulsion.backends.optimizer_state import OptimizerState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
RULE = SGLD(1.0, 0.01)
OPTIMIZERS = {
    "sgd": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9, "dampening": 0.2}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (ADAM, {"betas": (0.8, 0.99)}),
    "adam without momentum": (ADAM, {"betas": (0.0, 0.999)}),
    "amsgrad": (ADAMW, {"amsgrad": True, "weight_decay": 0.1}),
    "rmsprop": (RMSPROP, {"alpha": 0.995}),
    "rmsprop with momentum": (RMSPROP, {"alpha": 0.995, "momentum": 0.5}),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(launch_settings, "SPLITS", 2)  # the interpreter is slow


def count_calls(monkeypatch, owner, name):
    """Replace a function by one that also adds an item to the list that is returned."""
    calls, original = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.fixture
def eager_calls(monkeypatch):
    """Count the calls of the eager noise."""
    return count_calls(monkeypatch, choose, "add_noise")


@pytest.fixture
def lookups(monkeypatch):
    """Count the steps that look up the state of the optimizer."""
    return count_calls(monkeypatch, OptimizerState, "read")


def train(
    monkeypatch,
    kernels,
    kind,
    options,
    rule=RULE,
    heads=4,
    steps=3,
    dtype=torch.float32,
    change=lambda step, optimizer: None,
    untrained=0,
    **more,
):
    monkeypatch.setenv("REPULSIVE_KERNELS", kernels)
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8 * heads, heads, batch_first=True, device=DEVICE, dtype=dtype)
    optimizer = kind([{"params": [p], **more} for p in layer.parameters()], lr=0.01, **options)
    handle = repel(layer, optimizer, rule, parts="qk", noise_in="optimizer", verbose=False)
    # Gradients are given. Some of those of a loss are zero up to rounding. Adam and RMSprop divide by their size, and
    # turn a rounding error of 1e-7 in the noise of one step into 1e-4 of a weight in the next one.
    numbers = torch.Generator().manual_seed(1)
    for step in range(steps):
        change(step, optimizer)
        for parameter in layer.parameters():
            parameter.grad = (1e-3 * torch.randn(parameter.shape, generator=numbers)).to(DEVICE, dtype)
            parameter.grad[..., :untrained] = 0
        optimizer.step()
    handle.remove()
    states = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    return [t.detach().clone().float() for t in (*layer.parameters(), *states) if t.ndim > 1]


def same(found, expected, limit=1e-5):
    assert len(found) == len(expected) > 0
    return max(float((a - b).norm() / b.norm().clamp(min=1e-20)) for a, b in zip(found, expected, strict=True)) < limit


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_buffers_are_those_of_the_eager_noise(name, monkeypatch, eager_calls):
    kind, options = OPTIMIZERS[name]
    expected = train(monkeypatch, "eager", kind, options)
    assert len(eager_calls) == 3
    found = train(monkeypatch, "triton", kind, options)
    assert len(eager_calls) == 3 and same(found, expected)
    plain = train(monkeypatch, "triton", kind, options, rule=SGLD(1.0, 0.0))
    assert not same(plain, expected, 1e-3)  # the noise is not negligible


@pytest.mark.parametrize("name", ["adam", "rmsprop with momentum"])
def test_weights_that_never_had_a_gradient_get_no_noise(name, monkeypatch):
    kind, options = OPTIMIZERS[name]
    expected = train(monkeypatch, "eager", kind, options, untrained=3)
    found = train(monkeypatch, "triton", kind, options, untrained=3)
    start = train(monkeypatch, "triton", kind, options, steps=0)
    assert same(found, expected) and torch.equal(found[0][:, :3], start[0][:, :3])


def test_a_fixed_second_moment(monkeypatch, eager_calls):
    def fix(step, optimizer):
        if step == 2:
            fix_second_moment(optimizer)

    options = {"betas": (0.8, 0.5)}
    expected = train(monkeypatch, "eager", ADAM, options, steps=4, change=fix)
    found = train(monkeypatch, "triton", ADAM, options, steps=4, change=fix)
    assert len(eager_calls) == 4 and same(found, expected)


def test_spos_with_twelve_heads(monkeypatch, eager_calls):
    rule, options = SPOS(1.0, 0.01, 10.0), {"eps": 1e-3}  # smoothed gradients may be zero up to rounding
    expected = train(monkeypatch, "eager", ADAMW, options, rule, heads=12, steps=2)
    found = train(monkeypatch, "triton", ADAMW, options, rule, heads=12, steps=2)
    assert len(eager_calls) == 2 and same(found, expected)


def test_a_learning_rate_of_zero_gives_no_noise(monkeypatch):
    expected = train(monkeypatch, "eager", ADAM, {}, lr=0.0)
    assert same(train(monkeypatch, "triton", ADAM, {}, lr=0.0), expected)


def test_half_precision(monkeypatch, eager_calls):
    expected = train(monkeypatch, "eager", ADAM, {}, dtype=torch.bfloat16, steps=2)
    found = train(monkeypatch, "triton", ADAM, {}, dtype=torch.bfloat16, steps=2)
    assert len(eager_calls) == 2 and same(found, expected, 2e-2)


@pytest.mark.parametrize(("kind", "options"), [(RMSPROP, {"centered": True}), (ADAM, {"capturable": DEVICE == "cuda"})])
def test_what_does_not_fit_is_eager(kind, options, monkeypatch, eager_calls):
    more = {} if "centered" in options else {"lr": torch.tensor(0.01)}
    expected = train(monkeypatch, "eager", kind, options, **more)
    found = train(monkeypatch, "triton", kind, options, **more)
    assert len(eager_calls) == 6 and same(found, expected)


def scheduled(step, optimizer):
    """Change the numbers that schedulers change, for all parameters or for some."""
    for index, entry in enumerate(optimizer.param_groups):
        entry["lr"] = 0.01 / (1 + step + index * (step % 2))
        if "betas" in entry:
            entry["betas"] = (0.8 - 0.01 * step, 0.99)
        else:
            entry["momentum"] = 0.9 - 0.01 * step


def replaced_state(step, optimizer):
    """Replace all tensors of the state, as loading a checkpoint does; the old ones stay alive."""
    if step == 3:
        optimizer.old = optimizer.state_dict()
        copy = {i: {k: v.clone() for k, v in one.items()} for i, one in optimizer.old["state"].items()}
        optimizer.load_state_dict({**optimizer.old, "state": copy})


def other_counts(step, optimizer):
    """Replace the step counts only."""
    if step == 3:
        for state in optimizer.state.values():
            state["step"] = state["step"] * 2


def moved_state(step, optimizer):
    """Give all tensors of the state, and the weights, other memory."""
    if step == 3:
        for parameter, state in optimizer.state.items():
            for tensor in (parameter, *state.values()):
                tensor.data = tensor.data.clone()


def other_kind(step, optimizer):
    """Use another tensor of the state."""
    if step == 3:
        for state in optimizer.state.values():
            state["max_exp_avg_sq"] = 2 * state["exp_avg_sq"]
        for entry in optimizer.param_groups:
            entry["amsgrad"] = True


def other_order(step, optimizer):
    """Exchange the learning rates of parameters."""
    groups = optimizer.param_groups
    if step == 0:
        groups[0]["lr"] = 0.002
    if step == 3:
        groups[0]["params"], groups[2]["params"] = groups[2]["params"], groups[0]["params"]


@pytest.mark.parametrize(
    ("kind", "options", "change", "expected_lookups"),
    [
        (ADAMW, {"fused": True}, scheduled, 1),
        (ADAMW, {"foreach": False}, scheduled, 1),
        (SGD, {"momentum": 0.9}, scheduled, 1),
        (ADAMW, {"fused": True}, replaced_state, 2),
        (ADAMW, {"foreach": False}, other_counts, 2),
        (ADAMW, {"fused": True}, moved_state, 2),
        (ADAM, {}, other_kind, 2),
        (ADAM, {}, other_order, 2),
    ],
)
def test_changes_between_steps_take_effect(kind, options, change, expected_lookups, monkeypatch, lookups, eager_calls):
    """State that is as in the last step is not looked up again; state that has changed is."""
    expected = train(monkeypatch, "eager", kind, options, steps=5, change=change)
    found = train(monkeypatch, "triton", kind, options, steps=5, change=change)
    assert len(eager_calls) == 5 and len(lookups) == expected_lookups
    assert same(found, expected)
