"""Nested steps, closures without new gradients, steps that do not update parameters, replaced weights."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from repulsive import SPOS, SVGD, repel
from repulsive.errors import OptimizerError, UnsupportedWeights

RULE = SVGD(alpha=0.5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def train(model, optimizer, step, rule=RULE):
    handle = repel(model, optimizer, rule, verbose=False)
    for index in range(3):
        step(model, optimizer, handle, index)
    return handle


@pytest.fixture
def plainly(backward):
    def step(model, optimizer, handle, index):
        backward(model, index)
        optimizer.step()

    return step


@pytest.fixture
def trained(make_model, plainly):
    """Weights after three plain steps with the rule: the expected result of every equivalent loop."""
    model = make_model()
    train(model, sgd(model.parameters()), plainly)
    return list(model.parameters())


def same(model, parameters):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))


class Calls(torch.optim.SGD):
    """Torch runs hooks for the `step` of this class and for that of its parent."""

    def step(self, closure=None):
        return super().step(closure)


class Evaluates(torch.optim.SGD):
    """Runs the closure, writes to gradients, then calls the step of its parent."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for entry in self.param_groups:
            for parameter in entry["params"]:
                parameter.grad.mul_(1.0)
        super().step()
        return loss


class Rewraps(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(None if closure is None else lambda: closure())


@pytest.mark.parametrize("kind", [Calls, Evaluates, Rewraps])
@pytest.mark.parametrize("closure", [False, True])
def test_a_step_that_calls_its_parents_step_repels_once(kind, closure, make_model, backward, plainly, trained):
    def with_closure(model, optimizer, handle, index):
        optimizer.step(lambda: backward(model, index))

    model = make_model()
    optimizer = kind(model.parameters(), lr=0.2, momentum=0.9)
    handle = train(model, optimizer, with_closure if closure else plainly)
    assert handle.steps == 3
    assert same(model, trained)


@pytest.mark.parametrize("clipped", [False, True])
def test_applied_before_a_step_whose_closure_makes_no_gradients(clipped, make_model, backward, trained):
    """Lightning does this under manual optimisation."""

    def step(model, optimizer, handle, index):
        loss = backward(model, index)
        handle.apply()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step(lambda: loss)

    model = make_model()
    assert train(model, sgd(model.parameters()), step).steps == 3
    assert same(model, trained)


@pytest.mark.parametrize("to_none", [False, True])
def test_a_closure_that_computes_new_gradients_after_apply(to_none, make_model, backward, trained):
    def step(model, optimizer, handle, index):
        backward(model, index)
        handle.apply()

        def closure():
            optimizer.zero_grad(set_to_none=to_none)
            return backward(model, index, zero=False)

        optimizer.step(closure)

    model = make_model()
    assert train(model, sgd(model.parameters()), step).steps == 3
    assert same(model, trained)


def test_gradients_replaced_after_apply_are_not_changed_again(make_model, backward, trained):
    """Clipping may assign new tensors."""

    def step(model, optimizer, handle, index):
        backward(model, index)
        handle.apply()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clamp(-1e9, 1e9)
        optimizer.step()

    model = make_model()
    assert train(model, sgd(model.parameters()), step).steps == 3
    assert same(model, trained)


def test_remove_inside_a_closure(make_model, backward):
    one, two = make_model(), make_model()
    first, second = sgd(one.parameters()), sgd(two.parameters())
    handle = repel(one, first, RULE, verbose=False)

    def closure():
        loss = backward(one)
        with pytest.warns(UserWarning, match="never took a step"):
            handle.remove()
        return loss

    first.step(closure)
    backward(two)
    second.step()
    assert same(one, two.parameters()) and handle.steps == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_checkpoint_that_initialises_optimizer_state_is_not_counted_as_a_step(kind, make_model, backward):
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    handle = repel(model, optimizer, SPOS(), verbose=False)
    get_optimizer_state_dict(model, optimizer)
    assert handle.steps == 0
    if kind is torch.optim.Adam:
        assert not any(state["exp_avg"].any() for state in optimizer.state.values())
    backward(model)
    optimizer.step()
    assert handle.steps == 1


def test_a_step_at_learning_rate_zero_is_counted(make_model, backward):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = repel(model, optimizer, RULE, verbose=False)
    backward(model)
    optimizer.step()
    assert handle.steps == 1


def test_weights_that_were_replaced_are_refused_though_they_have_gradients(make_model, backward):
    model = make_model()
    optimizer = sgd(model.parameters())
    repel(model, optimizer, RULE, verbose=False)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    backward(model)
    with pytest.raises(UnsupportedWeights, match=r"in_proj_weight: the model holds another tensor.*assign=True"):
        optimizer.step()


def test_layers_that_were_replaced_warn_once(make_model, backward):
    model = make_model()
    optimizer = sgd(model.parameters())
    handle = repel(model, optimizer, RULE, verbose=False)
    for layer in model.stack.layers:
        layer.self_attn = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)

    def steps():
        for index in range(3):
            backward(model, index)
            optimizer.step()

    with pytest.warns(UserWarning, match="no selected head had a gradient") as caught:
        steps()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert handle.steps == 0 and {line.skipped for line in handle.report()} == {3}


def test_heads_frozen_later_stay_where_they_are(make_model, backward):
    """Otherwise repulsion would change gradients that are kept as zeros."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    handle = repel(model, optimizer, RULE, verbose=False)
    backward(model)
    optimizer.step()
    first = model.stack.layers[0].self_attn.in_proj_weight.requires_grad_(False)
    frozen = first.clone()
    for index in range(2):
        optimizer.zero_grad(set_to_none=False)
        backward(model, index, zero=False)
        optimizer.step()
    assert torch.equal(first, frozen)
    assert handle.steps == 3 and [line.skipped for line in handle.report()] == [2, 2, 2, 0, 0, 0]


def test_heads_frozen_between_backward_and_step_are_repelled(make_model, backward, trained):
    """Loops with several networks may do this; the optimizer still updates these heads."""

    def step(model, optimizer, handle, index):
        backward(model, index)
        model.requires_grad_(False)
        optimizer.step()
        model.requires_grad_(True)

    model = make_model()
    assert train(model, sgd(model.parameters()), step).steps == 3
    assert same(model, trained)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        (SVGD("heads", alpha=0.5), {}),
        (SVGD("heads", alpha=0.5, prior="gaussian", space="sphere", smoothing=0), {"max_norm": 0.1}),
        (SVGD("heads", alpha="auto", ratio=0.5), {"force_in": "step"}),
        (SVGD("heads", alpha=0.5, space="logits", circuits="qk+ov"), {}),
        (SPOS(4.0, alpha=0.5), {}),
        (SPOS(4.0, alpha=0.5), {"noise_in": "gradient"}),
    ],
    ids=["weights", "sphere", "step", "logits", "noise", "noise in the gradient"],
)
def test_an_optimizer_that_maximizes_repels_as_one_that_minimizes(rule, settings, kind, make_model, backward):
    results = []
    for maximize in (False, True):
        model = make_model()
        first, second = model.stack.layers
        mixed = [{"params": first.parameters(), "maximize": maximize}, {"params": second.parameters()}]
        optimizer = kind(mixed if kind is torch.optim.SGD else mixed[::-1], lr=0.01)
        handle = repel(model, optimizer, rule, verbose=False, measure_every=1, **settings)
        for index in range(3):
            backward(model, index)
            if maximize:
                for parameter in first.parameters():
                    parameter.grad.neg_()  # the gradient of an objective that is minus the loss
            optimizer.step()
        results.append((list(model.parameters()), handle.report()))
    assert all(torch.equal(p, q) for p, q in zip(results[0][0], results[1][0], strict=True))
    assert [line.similarity for line in results[0][1]] == [line.similarity for line in results[1][1]]


def test_noise_without_a_learning_rate_is_refused(make_model):
    class Relative(torch.optim.SGD):
        """Like optimizers that compute their own learning rate: `lr` is None."""

        def __init__(self, params):
            super().__init__(params, lr=1.0)
            self.param_groups[0]["lr"] = None

    model = make_model()
    optimizer = Relative(model.parameters())
    with pytest.raises(OptimizerError, match="learning rate"):
        repel(model, optimizer, SPOS(), verbose=False)
    assert repel(model, optimizer, SVGD(), verbose=False).attached


@pytest.mark.gpu
def test_equal_heads_are_warned_about_on_a_gpu():
    attention = nn.MultiheadAttention(16, 4, device="cuda")
    nn.init.zeros_(attention.in_proj_weight)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    repel(attention, optimizer, RULE, verbose=False)
    x = torch.randn(3, 2, 16, device="cuda")

    def steps():
        for _ in range(3):
            attention(x, x, x)[0].sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match="q, k, v: all heads of a group are equal") as caught:
        steps()
    assert len(caught) == 1 and caught[0].filename == __file__
