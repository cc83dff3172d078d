"""Schedules that have ended: nothing is sampled, repelled or warned about, and the drive is still measured."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from repulsive import SVGD, repel
from repulsive.repulsion import Until
from tests.particles.oracle import close
from tests.repulsion.logits.small_decoder import batch, loss_of, make
from tests.repulsion.recorded_sgd import Recorded, gradients_of


@pytest.mark.parametrize(
    "settings", [{"stepsize": 0.1, "smoothing": 0}, {"stepsize": "heads"}], ids=["stepsize", "smoothing"]
)
def test_a_rule_that_changes_the_drive_acts_after_its_schedule_has_ended(settings, make_model, backward):
    """It would otherwise give plain gradients, which may be M / stepsize times as long, from one step to the next."""
    model = make_model()
    optimizer = Recorded(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, SVGD(alpha=Until(2, 0.3), **settings), verbose=False)
    for step in range(4):
        backward(model, step)
        before = [(group.read().clone(), gradients_of(group).clone()) for group in handle.groups]
        optimizer.step()
    flat = dict(zip(map(id, model.parameters()), optimizer.given[-1], strict=True))
    without = SVGD(alpha=0.0, **settings)
    for group, (theta, grad) in zip(handle.groups, before, strict=True):
        now = torch.cat([part.take(flat[id(part.parameter())]) for part in group.slices], dim=-1)
        assert close(now, without.gradient(theta, grad)) and not close(now, grad, 0.1)


def test_nothing_is_done_after_the_last_step_with_repulsion():
    """Tokens are not sampled, forces are freed, and gradients stay as they are."""
    model, optimizer, handle = make(SVGD("heads", Until(3, 0.5), space="logits", tokens=60))
    changed = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        raw = [p.grad.clone() for p in model.parameters()]
        handle.apply()
        changed.append(not all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), raw, strict=True)))
        optimizer.step()
    assert changed == [True, True, True, False, False, False]
    assert handle.steps == 6 and not handle._logits.held and not handle._logits.sampler.wanted
    assert "forces" not in handle.state_dict()
    assert handle.report()[0].step == 0
    assert "step 6, alpha is 0 now" in str(handle)


def test_a_schedule_of_the_ratio_that_has_ended_switches_repulsion_off(make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ended = SVGD("heads", alpha="auto", ratio=Until(2, 0.3), space="sphere", smoothing=0)
    handle = repel(model, optimizer, ended, verbose=False)
    changed = []
    for step in range(4):
        backward(model, step)
        weight = model.stack.layers[0].self_attn.in_proj_weight
        raw = weight.grad.clone()
        optimizer.step()
        changed.append(not torch.equal(weight.grad, raw))
    assert changed == [True, True, False, False]
    assert [ended.acts(step) for step in range(4)] == changed and ended.is_off(2)
    assert "step 4, ratio is 0 now" in str(handle)


def test_only_the_drive_is_measured_after_the_last_step_with_repulsion():
    model, optimizer, handle = make(SVGD("heads", Until(3, 0.5), space="logits", tokens=60))
    handle.settings = replace(handle.settings, measure_every=5)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        moved = [[*layer.q_proj.parameters(), *layer.k_proj.parameters()] for layer in model.layers]
        norms = [float(torch.cat([p.grad.flatten() for p in some]).norm()) for some in moved]
        optimizer.step()
    for line in handle.report():
        assert line.drive == pytest.approx(norms[line.layer], rel=1e-5)
        assert (line.step, line.ratio, line.alpha) == (5, 0, 0) and math.isnan(line.similarity)
    assert str(handle).endswith(f"now          5         0 {'-':>11} {'-':>9}")


def test_no_warning_of_unfrozen_heads_after_the_last_step_with_repulsion(make_model, backward):
    """Attaching again, as the warning advises, would start the schedule anew."""
    warned = []
    for last in (2, 9):
        model = make_model()
        frozen = model.stack.layers[0].self_attn.in_proj_weight
        frozen.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with pytest.warns(UserWarning, match="left out"):
            repel(model, optimizer, SVGD("heads", Until(last, 0.5), smoothing=0), measure_every=3, verbose=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(9):
                frozen.requires_grad_(step >= 3)
                backward(model, step)
                optimizer.step()
        warned.append([one.filename for one in caught if "unfrozen" in str(one.message)])
    assert warned == [[], [__file__]]


@pytest.mark.parametrize("rule", ["recommended", SVGD("heads", Until(1, 0.01), smoothing=0)])
def test_heads_that_lose_their_gradients_between_two_acting_steps_are_reported_once(rule, make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    handle = repel(model, optimizer, rule, verbose=False)
    backward(model)
    optimizer.step()
    for group in handle.groups:
        for parameter in group.parameters():
            parameter.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(3):
            optimizer.zero_grad()
            backward(model, index)
            optimizer.step()
    assert handle.steps == 1
    if rule == "recommended":
        assert [str(one.message).split(",")[0] for one in caught] == [
            "no selected head had a gradient in this optimizer step"
        ]
        assert caught[0].filename == __file__  # the line that calls step()
    else:
        assert not caught  # the rule has ended: nothing is missing
