"""`act_every`: the rule acts in one of several steps, against a double loop; measuring, resuming, clipping, logits."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from repulsive import SPOS, SVGD, CosineLadder, RuleError, repel
from repulsive.repulsion import Linear
from repulsive.repulsion.logits.renewal import is_renewed
from tests.particles.oracle import close, phi
from tests.repulsion.logits.small_decoder import batch, loss_of, make
from tests.repulsion.recorded_sgd import Recorded, gradients_of

ON_SPHERE = {"alpha": "auto", "ratio": 0.02, "space": "sphere", "smoothing": 0}
IN_WEIGHTS = {"alpha": 0.3, "smoothing": 0}


def rule(act_every: int = 3, **settings) -> SVGD:
    return SVGD("heads", act_every=act_every, **(settings or ON_SPHERE))


@pytest.mark.parametrize("settings", [ON_SPHERE, IN_WEIGHTS], ids=["sphere", "weights"])
def test_repulsion_is_added_in_one_of_three_steps(make_model, backward, settings):
    """A double loop computes the direction of SVGD, of which the loss gradient is known: the rest is repulsion."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(**settings), verbose=False)
    changed = []
    optimizer.register_step_pre_hook(lambda *_: changed.append([gradients_of(group) for group in handle.groups]))
    for step in range(7):
        backward(model, step)
        before = [(group.read().clone(), gradients_of(group).clone()) for group in handle.groups]
        optimizer.step()
        for (theta, grad), now in zip(before, changed[-1], strict=True):
            if step % 3:
                assert torch.equal(now, grad)
                continue
            heads = len(theta)
            shared = {key: value for key, value in settings.items() if key in ("space", "smoothing")}
            unit = heads * phi(theta, torch.zeros_like(grad), alpha=1.0, **shared)  # phi has the factor 1 / M
            weight = 0.02 * grad.norm() / unit.norm() if "ratio" in settings else 0.3
            assert close(now, grad - 3 * weight * unit, 1e-9)


def test_settings_keep_their_meaning_in_reports(make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(), measure_every=5, verbose=False)
    steps = []
    for step in range(17):
        backward(model, step)
        optimizer.step()
        steps.append(handle.report()[0].step)
        assert all(line.ratio == pytest.approx(0.02, rel=1e-9) for line in handle.report())
    assert handle.steps == 17
    assert [step for step in dict.fromkeys(steps) if step in (0, 6, 12, 15)] == [0, 6, 12, 15]
    assert handle.first_report()[0].step == 0


def test_the_first_step_that_acts_after_a_measurement_is_due_measures(make_model, backward):
    model = make_model()
    handle = repel(
        model, torch.optim.SGD(model.parameters(), lr=0.01), rule(**IN_WEIGHTS), measure_every=4, verbose=False
    )
    measured = []
    for step in range(13):
        backward(model, step)
        handle.optimizer.step()
        measured.append(handle.report()[0].step)
    assert measured == [*[0] * 6, *[6] * 3, *[9] * 3, 12]  # due in steps 0, 4, 8 and 12; the rule acts in 0, 3, 6, ...


def test_a_fixed_alpha_is_reported_as_it_was_set(make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(**IN_WEIGHTS), measure_every=1, verbose=False)
    backward(model)
    optimizer.step()
    assert all(line.alpha == pytest.approx(0.3, rel=1e-12) for line in handle.report())


def test_schedules_see_the_step_of_the_training(make_model, backward):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduled = rule(alpha=Linear(0.0, 1.0, steps=6), smoothing=0)
    handle = repel(model, optimizer, scheduled, measure_every=1, verbose=False)
    alphas = []
    for step in range(7):
        backward(model, step)
        optimizer.step()
        alphas.append(handle.report()[0].alpha)
    assert alphas == pytest.approx([0, 0, 0, 0.5, 0.5, 0.5, 1.0])


def test_a_resumed_run_acts_in_the_same_steps(make_model, backward):
    def train(model, optimizer, handle, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()

    def start(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return optimizer, repel(model, optimizer, rule(), verbose=False)

    whole = make_model()
    train(whole, *start(whole), range(8))
    half = make_model()
    optimizer, handle = start(half)
    train(half, optimizer, handle, range(4))
    resumed = copy.deepcopy(half)
    resumed_optimizer, resumed_handle = start(resumed)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed_handle.load_state_dict(handle.state_dict())
    train(resumed, resumed_optimizer, resumed_handle, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("order", ["clip-repel", "repel-clip"])
def test_every_step_is_clipped(make_model, backward, order):
    model = make_model()
    optimizer = Recorded(model.parameters(), lr=0.01)
    repel(model, optimizer, rule(), order=order, max_norm=1e-3, verbose=False)
    for step in range(4):
        backward(model, step)
        optimizer.step()
    norms = [float(torch.cat([grad.flatten() for grad in given]).norm()) for given in optimizer.given]
    assert norms[1:3] == pytest.approx([1e-3] * 2, rel=1e-3)
    assert norms[0] == pytest.approx(1e-3, rel=1e-3 if order == "repel-clip" else 0.1)


def test_closures_and_apply_count_every_step_once(make_model, backward):
    model = make_model()
    optimizer = Recorded(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(), verbose=False)
    for step in range(4):
        optimizer.step(lambda step=step: backward(model, step))
    assert handle.steps == 4
    for step in range(4, 8):
        backward(model, step)
        handle.apply()
        optimizer.step()
    assert handle.steps == 8


def test_steps_without_gradients_of_heads_are_not_counted(make_model, backward):
    """Neither in steps in which the rule acts nor in the others: the next step that trains heads takes their place."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(), verbose=False)
    counted = []
    for step in range(5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no selected head had a gradient")
            optimizer.step()
        counted.append(handle.steps)
    assert counted == [1, 2, 3, 4, 5]


def test_the_step_of_a_distributed_checkpoint_is_not_counted(make_model, backward):
    """Loading the state of a new optimizer takes a step with gradients of zeros."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, rule(), verbose=False)
    for step in range(4):
        backward(model, step)
        optimizer.step()
    resumed = copy.deepcopy(model)
    new_optimizer = torch.optim.Adam(resumed.parameters(), lr=0.01)
    new_handle = repel(resumed, new_optimizer, rule(), verbose=False)
    new_handle.load_state_dict(handle.state_dict())
    set_optimizer_state_dict(resumed, new_optimizer, get_optimizer_state_dict(model, optimizer))
    assert new_handle.steps == 4


def test_repulsion_after_the_step(make_model, backward):
    """With `force_in="step"` the weights move as in plain training in the other steps."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stronger = rule(**(ON_SPHERE | {"ratio": 0.2}))
    handle = repel(model, optimizer, stronger, force_in="step", verbose=False)
    for step in range(5):
        backward(model, step)
        plain = [group.read() - 0.01 * gradients_of(group) for group in handle.groups]
        optimizer.step()
        for group, expected in zip(handle.groups, plain, strict=True):
            shift = float((group.read() - expected).norm())
            taken = 0.01 * float(gradients_of(group).norm())
            assert shift == pytest.approx(0 if step % 3 else 3 * 0.2 * taken, rel=1e-6, abs=1e-12)
        assert all(line.ratio == pytest.approx(0.2) for line in handle.report())


def test_logits_are_repelled_in_one_of_three_steps():
    settings = {"alpha": 0.5, "space": "logits", "tokens": 60, "every": 3}
    model, optimizer, handle = make(rule(**settings))
    renewed = []
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        raw = [p.grad.clone() for p in model.parameters()]
        renewals = handle._logits.renewals
        handle.apply()
        renewed.append(handle._logits.renewals > renewals)
        is_same = all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), raw, strict=True))
        assert is_same == (step % 3 != 0)
        if step == 0:  # three times the force of a rule that always acts
            once = [p.grad - grad for p, grad in zip(model.parameters(), raw, strict=True)]
            other, _, other_handle = make(SVGD("heads", **settings))
            loss_of(other, batch(0)).backward()
            other_handle.apply()
            single = [p.grad - grad for p, grad in zip(other.parameters(), raw, strict=True)]
            assert max(float((a - 3 * b).abs().max()) for a, b in zip(once, single, strict=True)) < 1e-7
        optimizer.step()
    assert renewed == [True, False, False, True, False, False, True]


def test_states_without_act_every_load_without_a_warning(make_model):
    """States that were saved before this setting existed."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    handle = repel(model, optimizer, SVGD(), verbose=False)
    state = handle.state_dict()
    for text in (repr(SVGD()), repr(SVGD()).replace(", act_every=1", "")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            handle.load_state_dict(state | {"rule": text})
    with pytest.warns(UserWarning, match="was made with"):
        handle.load_state_dict(state | {"rule": repr(rule(10))})


def test_new_forces_wait_for_a_step_that_acts():
    often = [step for step in range(200) if is_renewed(step, "auto")]
    rarely = [step for step in range(200) if is_renewed(step, "auto", 4)]
    assert all(step % 4 == 0 for step in rarely)
    assert {(step + 3) // 4 * 4 for step in often if step <= 196} == set(rarely)
    assert is_renewed(12, 10, 4) and not is_renewed(16, 10, 4) and is_renewed(20, 10, 4)


def test_the_mean_force_is_that_of_a_rule_that_always_acts(make_model):
    """Without a loss, SGD moves heads by the same amount in four steps, to first order in the learning rate."""
    moved = []
    for act_every in (1, 4):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        handle = repel(model, optimizer, rule(act_every, **IN_WEIGHTS), verbose=False)
        before = [group.read() for group in handle.groups]
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        moved.append([group.read() - start for group, start in zip(handle.groups, before, strict=True)])
    for always, seldom in zip(*moved, strict=True):
        assert float((always - seldom).norm() / always.norm()) < 1e-4 and float(always.norm()) > 0


def test_acting_always_keeps_everything_else():
    sometimes = rule(4)
    assert sometimes.acting_always() == rule(1)
    assert sometimes.act_every == 4
    assert rule(1).acting_always() is not None and SPOS().acting_always().act_every == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SVGD(act_every=4), "choose stepsize='heads', smoothing=0 and prior='uniform'"),
        (lambda: SVGD("heads", act_every=4), "smoothing=0"),
        (lambda: SVGD("heads", smoothing=0, prior="gaussian", act_every=4), "prior='uniform'"),
        (lambda: SVGD("heads", smoothing=0, act_every=0), "whole number"),
        (lambda: SVGD("heads", smoothing=0, act_every=2.0), "whole number"),
        (lambda: SVGD("head"), "a number or 'heads'"),
        (lambda: SPOS("heads"), "must be a number"),
        (lambda: CosineLadder("heads"), "a stepsize that is a number"),
        (lambda: CosineLadder(act_every=2), "leave act_every out"),
    ],
)
def test_settings_that_do_not_go_together(build, message):
    with pytest.raises(RuleError, match=message.replace("(", r"\(")):
        build()


def test_stepsize_heads_keeps_gradients_with_any_number_of_heads():
    for heads in (1, 3, 12, 49):
        grad = torch.randn(heads, 5, dtype=torch.float64)
        theta = nn.functional.normalize(torch.randn(heads, 5, dtype=torch.float64), dim=-1)
        assert torch.equal(SVGD("heads", alpha=0.0, smoothing=0).gradient(theta, grad), grad)
