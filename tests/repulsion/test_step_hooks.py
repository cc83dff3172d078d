"""Gradients are changed exactly once per step, whatever the loop does around the step."""

import gc
import weakref

import pytest
import torch
from torch import nn

from repulsive.repulsion.step_hooks import StepHooks


@pytest.fixture
def watched():
    """An optimizer whose gradients are doubled once per step, and the log of calls."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    hooks, log = StepHooks(optimizer, lambda: [weight.grad]), []

    def change(scale):
        log.append("change")
        weight.grad.mul_(2)
        return True

    hooks.register(change, lambda: log.append("finish"))
    return weight, optimizer, hooks, change, log


def backward(weight):
    weight.grad = None
    weight.sum().backward()


def test_a_step_changes_gradients_once_and_finishes(watched):
    weight, optimizer, _, _, log = watched
    backward(weight)
    optimizer.step()
    assert log == ["change", "finish"] and weight.tolist() == [-1.0, -1.0]


def test_a_step_after_apply_does_not_change_again(watched):
    weight, optimizer, hooks, change, log = watched
    backward(weight)
    hooks.apply(change, None)
    optimizer.step()
    backward(weight)
    optimizer.step()
    assert log == ["change", "finish"] * 2


def test_removing_and_registering_again_remembers_applied_gradients(watched):
    weight, optimizer, hooks, change, log = watched
    backward(weight)
    hooks.apply(change, None)
    hooks.remove()
    assert not hooks.is_registered and not hooks.was_registered
    hooks.register(change, lambda: log.append("finish"))
    optimizer.step()
    assert log == ["change", "finish"]


def test_reset_forgets_applied_gradients(watched):
    weight, optimizer, hooks, change, log = watched
    backward(weight)
    hooks.apply(change, None)
    hooks.reset()
    optimizer.step()
    assert log == ["change", "change", "finish"]


@pytest.mark.parametrize("is_keyword", [False, True])
def test_with_a_closure_gradients_are_changed_after_it(watched, is_keyword):
    weight, optimizer, _, _, log = watched

    def closure():
        log.append("closure")
        backward(weight)

    optimizer.step(**{"closure": closure}) if is_keyword else optimizer.step(closure)
    assert log == ["closure", "change", "finish"] and weight.tolist() == [-1.0, -1.0]


def test_a_closure_that_keeps_applied_gradients_is_followed_by_no_change(watched):
    weight, optimizer, hooks, change, log = watched
    backward(weight)
    hooks.apply(change, None)
    optimizer.step(lambda: None)
    assert log == ["change", "finish"]


def test_a_function_that_does_nothing_is_not_finished():
    weight = nn.Parameter(torch.ones(2))
    optimizer, log = torch.optim.SGD([weight], lr=1.0), []
    StepHooks(optimizer, lambda: [weight.grad]).register(lambda scale: False, lambda: log.append("finish"))
    optimizer.step()
    assert log == []


def test_removed_functions_are_freed_without_garbage_collection(watched):
    _, optimizer, _, _, _ = watched
    hooks = StepHooks(optimizer, list)

    class Owner:
        def change(self, scale):
            return True

        def finish(self):
            pass

    owner = Owner()
    owner.hooks = hooks
    hooks.register(owner.change, owner.finish)
    reference = weakref.ref(owner)
    gc.disable()
    try:
        hooks.remove()
        del owner
        assert reference() is None
    finally:
        gc.enable()
