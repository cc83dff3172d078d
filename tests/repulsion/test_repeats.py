"""Steps after the first do not look up parameters, and replay launches: training is that of the eager backend."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from repulsive import SGLD, SPOS, SVGD, CosineLadder, repel
from repulsive.particles import KernelFree
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.graph_cache import GraphCache

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


PARTS = "qkv" if GPU else "q"  # the interpreter is slow
# On a GPU, launches of one kind are captured at their second step and replayed at the third.
STEPS, MEASURE_EVERY = (7, 2) if GPU else (5, 4)  # the last step is measured
CHANGED = STEPS - 3  # the step at which `change` acts


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Without a GPU, call the first launch of each key again, as a GPU would replay it."""
    monkeypatch.setenv("REPULSIVE_KERNELS", "triton")
    if GPU:
        return
    monkeypatch.setattr(launch_settings, "SPLITS", 1)
    monkeypatch.setattr(GraphCache, "run", lambda self, launch, key: self._graphs.setdefault(key, launch)())


@pytest.fixture
def whole(monkeypatch):
    """Record the steps that looked up parameters."""
    steps = []
    run = Update.run
    monkeypatch.setattr(Update, "run", lambda self, inputs: steps.append(inputs.step) or run(self, inputs))
    return steps


def train(rule, change=lambda step, model, optimizer, handle: None, still=True, **settings):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 8, dropout=0.0, batch_first=True).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handle = repel(
        model,
        optimizer,
        rule,
        verbose=False,
        **({"measure_every": MEASURE_EVERY, "parts": PARTS, "noise_in": "gradient"} | settings),
    )
    x, held = torch.randn(2, 3, 16).to(DEVICE), []
    for step in range(STEPS):
        if not still:
            held.append([p.grad for p in model.parameters()])  # so that the next ones get other addresses
        optimizer.zero_grad(set_to_none=not still)
        model(x).square().mean().backward()
        change(step, model, optimizer, handle)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], handle


def same(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 2e-6


def check(monkeypatch, *given, **settings):
    """Train with Triton kernels and without; return the handle of the former."""
    found, handle = train(*given, **settings)
    with monkeypatch.context() as patch:
        patch.setenv("REPULSIVE_KERNELS", "eager")
        expected, reference = train(*given, **settings)
    assert same(found, expected)
    found, expected = ([*some.first_report(), *some.report()] for some in (handle, reference))
    for one, other in zip(found, expected, strict=True):
        for name in ("step", "drive", "ratio", "alpha", "bandwidth", "distance", "similarity", "largest"):
            numbers = getattr(one, name), getattr(other, name)
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-5, nan_ok=True), name
    return handle


RULES = {
    "fixed": SVGD(alpha=1.0),
    "recommended": SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0),
    "sometimes": SVGD("heads", alpha="auto", ratio=0.03, space="sphere", smoothing=0, act_every=2),
    "auto": SVGD(alpha="auto", ratio=0.5, prior="gaussian"),
    "schedule": SVGD(alpha=lambda step: 0.1 * step),
    "schedule of the ratio": SVGD(alpha="auto", ratio=lambda step: 0.1 * step, smoothing=0),
    "lower median": SVGD(alpha=1.0, bandwidth="released-lower"),
    "cosine": SVGD(alpha=1.0, kernel="cosine"),
    "hinge": SVGD(alpha=1.0, kernel="hinge", space="sphere"),
    "spos": SPOS(0.1, 1.0, 10.0),
    "spos auto": SPOS(0.1, "auto", 10.0, space="sphere", smoothing=0),
    "released noise": SPOS(0.1, 1.0, 10.0, noise="released"),
    "sgld": SGLD(0.1, 0.5),
    "kernel-free": KernelFree(alpha=1.0),
    "ladder": CosineLadder(alpha=1.0),
}


@pytest.mark.parametrize("name", RULES)
def test_only_the_first_step_looks_up_parameters(name, monkeypatch, whole):
    handle = check(monkeypatch, RULES[name])
    assert handle.steps == STEPS
    assert whole == [0, *range(0, STEPS, RULES[name].act_every)]  # the steps of the eager backend come last


@pytest.mark.parametrize("name", RULES if GPU else ["recommended", "spos"])
def test_gradients_that_move(name, monkeypatch, whole):
    check(monkeypatch, RULES[name], still=False)
    assert whole == [0, *range(0, STEPS, RULES[name].act_every)]


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_clipped_steps_are_repeated(order, monkeypatch, whole):
    check(monkeypatch, RULES["recommended"], max_norm=0.05, order=order)
    assert whole[: len(whole) - STEPS] == [0]


@pytest.mark.skipif(not GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("name", RULES)
def test_launches_are_captured(name):
    """A measuring step and an ordinary one have a graph each."""
    _, handle = train(RULES[name])
    (update,) = handle._updates.current._fused
    assert len(update._graphs._graphs) == {"ladder": 0, "sometimes": 1}.get(
        name, 2
    )  # "sometimes" measures when it acts


def another_rule(step, model, optimizer, handle):
    if step == CHANGED:
        handle.rule = SVGD(alpha=0.3)


def rules_in_turns(step, model, optimizer, handle):
    """Alternate between two rules, so that each meets ordinary and measuring steps after the other."""
    handle.rules = getattr(handle, "rules", [handle.rule, SVGD(alpha=0.3)])
    handle.rule = handle.rules[step // 2 % 2]


def no_gradient(step, model, optimizer, handle):
    if step == CHANGED:
        model.self_attn.in_proj_weight.grad = None


def another_weight(step, model, optimizer, handle):
    """Replace a weight in the layer and in the optimizer; the old one keeps its gradient."""
    if step == CHANGED:
        old = model.self_attn.in_proj_weight
        model.self_attn.in_proj_weight = new = nn.Parameter(old.detach() * 0.5)
        new.grad = old.grad.clone()
        optimizer.param_groups[0]["params"] = [new if p is old else p for p in optimizer.param_groups[0]["params"]]


def moved_weight(step, model, optimizer, handle):
    if step == CHANGED:
        weight = model.self_attn.in_proj_weight
        weight.data = weight.data * 0.5


def frozen_weight(step, model, optimizer, handle):
    """Its gradient is kept as zeros, and repulsion must not change it."""
    weight = model.self_attn.in_proj_weight.requires_grad_(step != CHANGED)
    if step == CHANGED:
        weight.grad.zero_()


def other_settings(step, model, optimizer, handle):
    """Change a frozen rule in place."""
    object.__setattr__(handle.rule, "alpha", 0.3 if step >= CHANGED else 1.0)


def another_kernel(step, model, optimizer, handle):
    if step == CHANGED:
        handle.rule = SVGD(alpha=0.3, kernel="imq", space="sphere")


def more_parameters(step, model, optimizer, handle):
    if step == CHANGED:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, device=DEVICE))], "lr": 0.5})


def other_rates(step, model, optimizer, handle):
    optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)


def loss_scale(step, model, optimizer, handle):
    """A scale in the gradients, as a fused optimizer under AMP has; it is removed again before SGD itself sees it."""
    if step == 0:
        optimizer.register_step_pre_hook(lambda *given: setattr(optimizer, "grad_scale", None))
    optimizer.grad_scale = torch.tensor(4.0, device=DEVICE) if step >= CHANGED else None


@pytest.mark.parametrize(
    "change",
    [
        another_rule,
        rules_in_turns,
        other_settings,
        another_kernel,
        no_gradient,
        another_weight,
        moved_weight,
        frozen_weight,
        more_parameters,
        loss_scale,
    ],
)
@pytest.mark.parametrize("still", [False, True] if GPU else [True])
def test_changes_take_effect(change, still, monkeypatch):
    check(monkeypatch, SVGD(alpha=1.0), change, still=still)


def test_a_rule_is_prepared_once_for_each_kind_of_step(monkeypatch):
    """A measuring step does not make the next ordinary one prepare the rule again."""
    calls = []
    form = SVGD.radial_form
    monkeypatch.setattr(SVGD, "radial_form", lambda self, step: calls.append(step) or form(self, step))
    train(SVGD(alpha=1.0), measure_every=2)
    assert calls == [0, 1]


@pytest.mark.parametrize("change", [another_rule, moved_weight, loss_scale])
def test_changes_take_effect_on_a_held_ratio(change, monkeypatch):
    check(monkeypatch, SVGD(alpha="auto", ratio=0.5, space="sphere", smoothing=0), change)


@pytest.mark.parametrize("rule", [SPOS(0.1, 1.0, 10.0), SGLD(0.1, 0.5)], ids=["spos", "sgld"])
def test_noise_follows_the_learning_rate(rule, monkeypatch, whole):
    check(monkeypatch, rule, other_rates)
    assert whole[: len(whole) - STEPS] == [0]
    check(monkeypatch, rule, more_parameters)
