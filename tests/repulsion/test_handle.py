"""Measurements, state and schedules of a handle."""

import copy
import io
import json
import math
import pickle
import re

import pytest
import torch

from repulsive import SGLD, SPOS, SVGD, RuleError, StateError, repel
from repulsive.repulsion import Constant, Cosine, Linear, Until, WarmUp


@pytest.mark.parametrize("rule", [SVGD(alpha=0.5), SVGD(alpha=0.5, space="sphere"), SPOS(0.1, 0.5, 10.0)])
@pytest.mark.parametrize("particle", ["projection", "head"])
def test_report_matches_an_independent_computation(rule, particle, make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, rule, particle=particle, verbose=False)
    assert all(math.isnan(line.drive) and line.step == -1 for line in handle.report())
    backward(model)
    group = handle.groups[1]
    theta = group.read()
    grad = torch.cat([s.take(s.parameter().grad) for s in group.slices], dim=-1)
    base = {"space": rule.space, "stepsize": rule.stepsize}
    quiet = {"beta": 10.0, "temperature": 0.0} if isinstance(rule, SPOS) else {}
    kind = type(rule)
    drive = kind(alpha=0.0, **base, **quiet).gradient(theta, grad)
    both = kind(alpha=0.5, **base, **quiet).gradient(theta, grad)
    optimizer.step()
    line = handle.report()[1]
    assert line.name == group.name and line.step == 0 and line.num_heads == group.num_heads
    assert math.isclose(line.drive, float(drive.norm()), rel_tol=1e-9)
    assert math.isclose(line.repulsion, float((both - drive).norm()), rel_tol=1e-9)
    assert math.isclose(line.ratio, line.repulsion / line.drive)
    assert math.isclose(line.distance, float(torch.pdist(theta).mean()), rel_tol=1e-9)
    seen = torch.nn.functional.normalize(theta, dim=-1) if rule.space == "sphere" else theta
    h = torch.pdist(seen).quantile(0.5).square() / math.log(len(theta))
    assert math.isclose(line.bandwidth, float(h), rel_tol=1e-9)


def test_measuring_every_few_steps(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, "paper", measure_every=3, verbose=False)
    seen = []
    for index in range(7):
        backward(model, index)
        optimizer.step()
        seen.append(handle.report()[0].step)
    assert seen == [0, 0, 0, 3, 3, 3, 6]


def test_auto_alpha_holds_its_ratio_through_training(make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, SVGD(alpha="auto", ratio=0.3), measure_every=1, verbose=False)
    for index in range(5):
        backward(model, index)
        optimizer.step()
        assert all(math.isclose(line.ratio, 0.3, rel_tol=1e-9) and line.alpha > 0 for line in handle.report())


def test_alpha_follows_its_schedule(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = SVGD(alpha=Linear(0.0, 1.0, steps=4))
    handle = repel(model, optimizer, rule, measure_every=1, verbose=False)
    seen = []
    for index in range(6):
        backward(model, index)
        optimizer.step()
        seen.append(handle.report()[0].alpha)
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_schedules_by_hand():
    assert [Constant(0.3)(n) for n in (0, 9)] == [0.3, 0.3]
    assert [Linear(1.0, 0.0, 4)(n) for n in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert [round(Cosine(1.0, 0.0, 4)(n), 12) for n in (0, 2, 4, 9)] == [1.0, 0.5, 0.0, 0.0]
    assert [Until(4, 2.0)(n) for n in (0, 3, 4, 9)] == [2.0, 2.0, 0.0, 0.0]
    assert [WarmUp(4, 2.0)(n) for n in (0, 1, 4, 9)] == [0.0, 0.5, 2.0, 2.0]
    assert [WarmUp(2, Linear(1.0, 0.0, 2))(n) for n in (0, 1, 2, 3, 4)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    with pytest.raises(RuleError, match="steps"):
        Linear(0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Until("5", 0.1), "steps='5'"),
        (lambda: Until(5, "0.1"), "value='0.1'"),
        (lambda: Constant(-1), "value=-1"),
        (lambda: Constant(math.inf), "value=inf"),
        (lambda: Linear(0.1, -0.1, 5), "end=-0.1"),
        (lambda: Cosine(math.nan, 0.1, 5), "start=nan"),
        (lambda: WarmUp(5, None), "then=None"),
    ],
)
def test_schedules_refuse_values_that_would_fail_in_a_later_step(make, name):
    with pytest.raises(RuleError, match=f"{name}.*must be a number >= [01]"):
        make()


def train(model, optimizer, backward, start, stop):
    for index in range(start, stop):
        backward(model, index)
        optimizer.step()


@pytest.mark.parametrize("noise_in", ["gradient", "parameter", "optimizer"])
def test_resuming_in_the_middle_of_spos_is_bit_for_bit(noise_in, make_model, backward):
    rule = SPOS(0.1, 0.5, 100.0)
    whole = make_model()
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    repel(whole, optimizer, rule, seed=3, noise_in=noise_in, verbose=False)
    train(whole, optimizer, backward, 0, 6)

    half = make_model()
    optimizer = torch.optim.Adam(half.parameters(), lr=0.01)
    handle = repel(half, optimizer, rule, seed=3, noise_in=noise_in, verbose=False)
    train(half, optimizer, backward, 0, 3)
    saved = json.loads(json.dumps(handle.state_dict()))

    resumed = make_model(seed=9)
    resumed.load_state_dict(half.state_dict())
    again = torch.optim.Adam(resumed.parameters(), lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    other = repel(resumed, again, rule, seed=99, noise_in=noise_in, verbose=False)
    other.load_state_dict(saved)
    train(resumed, again, backward, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))

    forgetful = make_model(seed=9)
    forgetful.load_state_dict(half.state_dict())
    again = torch.optim.Adam(forgetful.parameters(), lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    repel(forgetful, again, rule, seed=3, noise_in=noise_in, verbose=False)
    train(forgetful, again, backward, 3, 6)
    assert not all(torch.equal(a, b) for a, b in zip(whole.parameters(), forgetful.parameters(), strict=True))


def test_noise_in_gradient_and_in_parameter_agree_under_plain_sgd(make_model, backward):
    models = []
    for noise_in in ("gradient", "parameter"):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        repel(model, optimizer, SGLD(0.1, 1e-4), noise_in=noise_in, verbose=False)
        train(model, optimizer, backward, 0, 1)
        models.append(model)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_noise_in_parameters_has_its_size_under_adam(make_model, backward):
    """Adam would rescale noise in gradients; in parameters it is sqrt(2 T eps lr) with any optimizer."""
    ends = []
    for temperature in (0.0, 0.5):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        repel(model, optimizer, SGLD(0.1, temperature), noise_in="parameter", verbose=False)
        train(model, optimizer, backward, 0, 1)
        ends.append(model.stack.layers[0].self_attn.in_proj_weight.detach())
    noise = ends[1] - ends[0]
    assert abs(float(noise.std()) / math.sqrt(2 * 0.5 * 0.1 * 0.01) - 1) < 0.1


def test_each_parameter_group_has_its_own_learning_rate(make_model, backward):
    model = make_model()
    first = list(model.stack.layers[0].parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in first)]
    optimizer = torch.optim.SGD([{"params": first, "lr": 1e-2}, {"params": rest, "lr": 1e-4}], lr=1e-3)
    handle = repel(model, optimizer, SGLD(0.1, 1.0), noise_in="gradient", verbose=False)
    backward(model)
    for parameter in model.parameters():
        parameter.grad.zero_()
    handle.apply()
    spread = [float(model.stack.layers[i].self_attn.in_proj_weight.grad.std()) for i in (0, 1)]
    assert math.isclose(spread[1] / spread[0], 10.0, rel_tol=0.1)


def test_noise_follows_a_learning_rate_that_a_schedule_changes(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle = repel(model, optimizer, SGLD(0.1, 1.0), noise_in="gradient", verbose=False)
    spread = []
    for rate in (1e-2, 1e-4):
        optimizer.param_groups[0]["lr"] = rate
        backward(model)
        for parameter in model.parameters():
            parameter.grad.zero_()
        handle.apply()
        spread.append(float(model.stack.layers[0].self_attn.in_proj_weight.grad.std()))
    assert math.isclose(spread[1] / spread[0], 10.0, rel_tol=0.1)


def test_a_loaded_state_starts_new_measurements(make_model, backward):
    model = make_model()
    handle = repel(model, torch.optim.Adam(model.parameters()), "paper", verbose=False, measure_every=1)
    fresh = handle.state_dict()
    for index in range(3):
        backward(model, index)
        if index == 1:
            model.stack.layers[0].self_attn.in_proj_weight.grad = None
        handle.optimizer.step()
    assert {one.step for one in handle.report()} == {2} and " 2 " in str(handle)
    assert sum(one.skipped for one in handle.report()) == 3
    handle.load_state_dict(fresh)
    assert {(one.step, one.skipped) for one in [*handle.report(), *handle.first_report()]} == {(-1, 0)}
    assert handle.state_dict() == fresh and str(handle).endswith("not measured yet")


def test_a_loaded_state_forgets_gradients_that_were_changed_before(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, SVGD(alpha=0.5), verbose=False)
    backward(model)
    state = handle.state_dict()
    handle.apply()  # for a step that does not follow
    handle.load_state_dict(state)
    backward(model)
    before = model.stack.layers[0].self_attn.in_proj_weight.grad.clone()
    optimizer.step()
    assert handle.steps == 1 and not torch.equal(model.stack.layers[0].self_attn.in_proj_weight.grad, before)


def test_a_state_of_other_groups_or_another_rule(make_model):
    model = make_model()
    handle = repel(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    state = handle.state_dict()
    with pytest.raises(StateError, match="format"):
        handle.load_state_dict({**state, "format": 99})
    for other in ({}, handle.optimizer.state_dict(), None):
        with pytest.raises(StateError, match=r"not the state of a handle; pass what handle\.state_dict\(\) returned"):
            handle.load_state_dict(other)
    name, heads, size = state["groups"][-1]
    missing = f"{name}: none in the state, {heads} heads of {size} numbers here"
    with pytest.raises(StateError, match=re.escape(missing)):
        handle.load_state_dict({**state, "groups": state["groups"][:-1]})
    changed = [[name, 2 * heads, size // 2] for name, heads, size in state["groups"]]
    own = f"{2 * heads} heads of {size // 2} numbers in the state, {heads} heads of {size} numbers here; "
    with pytest.raises(StateError, match=rf"{own}.*and {len(changed) - 3} more"):
        handle.load_state_dict({**state, "groups": changed})
    for name, damaged in (("steps", "x"), ("steps", -1), ("seed", None), ("rule", 3), ("groups", [["a"]])):
        with pytest.raises(StateError, match=f"damaged: {name}="):
            handle.load_state_dict({**state, name: damaged})
        with pytest.raises(StateError, match=f"damaged: {name}=None"):
            handle.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(StateError, match="another order"):
        handle.load_state_dict({**state, "groups": state["groups"][::-1]})
    with pytest.warns(UserWarning, match="resuming with"):
        handle.load_state_dict({**state, "rule": "SVGD(stepsize=7)"})


@pytest.mark.parametrize(
    "attempt",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda handle: torch.save(handle, io.BytesIO())],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_a_handle_is_not_pickled_or_copied(attempt, make_model):
    model = make_model()
    handle = repel(model, torch.optim.AdamW(model.parameters()), verbose=False)
    with pytest.raises(StateError, match=r"save handle\.state_dict\(\)"):
        attempt(handle)
    assert handle.attached


def test_a_copied_model_refers_to_the_handle_of_the_original(make_model):
    """As in `AveragedModel` of a Lightning module whose attribute is the handle."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.handle = handle = repel(model, optimizer, verbose=False)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert averaged.module.handle is handle and handle.attached and handle.optimizer is optimizer
    with pytest.raises(StateError, match=r"save handle\.state_dict\(\)"):
        copy.deepcopy((make_model(), optimizer, handle))  # the copied optimizer would not call a handle


def test_the_rule_may_be_replaced(make_model, backward):
    rules = [SVGD(alpha=0.5), None, SVGD(alpha="auto", ratio=0.2, space="sphere"), SVGD(alpha=0.5)]
    model, expected = make_model(), make_model()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, expected)]
    handle = repel(model, optimizers[0], rules[0], measure_every=1, verbose=False)
    for index, rule in enumerate(rules):
        handle.rule = rule
        backward(model, index)
        optimizers[0].step()
        with repel(expected, optimizers[1], rule, measure_every=1, verbose=False) as other:
            other.load_state_dict({**other.state_dict(), "steps": index})
            backward(expected, index)
            optimizers[1].step()
            assert [line.ratio for line in handle.report()] == [line.ratio for line in other.report()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        (SVGD(), "paper", {}, r"handle.rule='paper': expected a rule, such as SVGD\(\), or None"),
        (SVGD(), SVGD, {}, "expected a rule"),
        (SVGD(), SVGD(space="logits"), {}, r"cannot become SVGD\(.*space='logits'.* Call handle.remove\(\)"),
        (SVGD(alpha="auto"), SVGD(alpha="auto", ratio=0.5), {"force_in": "step"}, "force_in='step' adds the force"),
        (None, SGLD(), {}, r"no place was chosen for it \(noise_in\)"),
    ],
    ids=["name", "class", "logits", "after the step", "noise"],
)
def test_a_rule_that_the_handle_was_not_made_for_is_refused(first, second, options, message, make_model):
    model = make_model()
    handle = repel(model, torch.optim.AdamW(model.parameters()), first, verbose=False, **options)
    handle.rule = copy.copy(handle.rule)  # an equal rule changes nothing
    with pytest.raises(RuleError, match=message):
        handle.rule = second
    assert handle.rule == first
