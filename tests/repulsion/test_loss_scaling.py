"""Gradient scalers: the loss scale changes neither the rule nor clipping, and skipped steps do not count."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from repulsive import SPOS, SVGD
from repulsive.repulsion.handle import handles_of
from tests.repulsion.training_loop import RULE, run, same


def grad_scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, **options)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "foreach adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("rule", [SVGD(alpha=0.5), SVGD(alpha="auto"), SPOS(0.1, 0.5, 100.0)])
def test_gradient_scaler_changes_nothing(name, unscale_first, rule, make_model, backward, plain_step):
    """The hook of a fused optimizer gets scaled gradients; the rule must use unscaled ones."""
    scaler = grad_scaler()

    def scaled(model, optimizer, index):
        optimizer.zero_grad()
        backward(model, index, scale=scaler.get_scale(), zero=False)
        scaler.scale(torch.zeros(()))  # as a training loop does with its loss
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    one, _ = run(make_model, 3, OPTIMIZERS[name], rule, plain_step)
    two, handle = run(make_model, 3, OPTIMIZERS[name], rule, scaled)
    assert handle.steps == 3
    assert same(one, two, 1e-9)


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_the_loss_scale_does_not_change_the_norm_that_is_clipped(order, make_model, backward, plain_step):
    scaler, options = grad_scaler(), {"max_norm": 0.05, "order": order}

    def scaled(model, optimizer, index):
        optimizer.zero_grad()
        backward(model, index, scale=scaler.get_scale(), zero=False)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()

    expected, _ = run(make_model, 3, OPTIMIZERS["fused sgd"], RULE, plain_step, **options)
    assert same(run(make_model, 3, OPTIMIZERS["fused sgd"], RULE, scaled, **options)[0], expected, 1e-9)
    free, _ = run(make_model, 3, OPTIMIZERS["fused sgd"], RULE, plain_step)
    assert not same(free, expected, 1e-3)  # the limit takes effect


# Not fused SGD with momentum: torch 2.13 leaves its momentum buffer uninitialised if the very first step is skipped.
@pytest.mark.parametrize("name", ["sgd", "adam", "fused adam"])
def test_skipped_steps_are_not_counted_and_draw_no_noise(name, make_model, backward, plain_step):
    rule = SPOS(0.1, 0.5, 100.0)
    scaler = grad_scaler(growth_interval=1000)
    found = []

    def sometimes_infinite(model, optimizer, index):
        optimizer.zero_grad()
        backward(model, index // 2, scale=scaler.get_scale(), zero=False)
        scaler.scale(torch.zeros(()))
        if index % 2 == 0:
            model.out.weight.grad[0, 0] = torch.inf
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        found.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))

    two, handle = run(make_model, 6, OPTIMIZERS[name], rule, sometimes_infinite)
    one, _ = run(make_model, 3, OPTIMIZERS[name], rule, plain_step)
    assert found == [True, False] * 3
    assert handle.steps == 3
    assert same(one, two, 1e-9)


@pytest.mark.parametrize("unscaled", [True, False])
def test_apply_knows_of_scaled_gradients(unscaled, make_model, backward):
    """A gradient scaler multiplies the loss by 65,536; without care repulsion would be that much too small."""
    scaler = torch.amp.GradScaler("cpu")

    def by_scaler(model, optimizer, index):
        backward(model, index, float(scaler.scale(torch.ones(()))))
        (handle,) = handles_of(optimizer)
        if unscaled:
            scaler.unscale_(optimizer)
        handle.apply(scaler)
        if not unscaled:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()

    def by_hand(model, optimizer, index):
        backward(model, index)
        (handle,) = handles_of(optimizer)
        handle.apply()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    one, _ = run(make_model, 3, step=by_hand)
    two, handle = run(make_model, 3, step=by_scaler)
    assert same(one, two, 1e-6) and handle.steps == 3
