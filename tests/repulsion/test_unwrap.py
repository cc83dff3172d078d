"""Find the optimizer to hook inside wrappers."""

import pytest
import torch

from repulsive import OptimizerError, repel


def wrapped_by_sam(parameters):
    """Like SAM: two calls per step, neither of which is `step`."""

    class SAM(torch.optim.Optimizer):
        def __init__(self):
            super().__init__(parameters, {})
            self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base_optimizer.param_groups

        def second_step(self):
            self.base_optimizer.step()

    return SAM()


def wrapped_by_name(parameters):
    """Like schedule-free wrappers: does not call its parent's constructor, and stores the optimizer elsewhere."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self):
            self.base = torch.optim.SGD(parameters, lr=0.1)

        param_groups = property(lambda self: self.base.param_groups)

        def second_step(self):
            self.base.step()

    return Wrapper()


@pytest.mark.parametrize("wrapped", [wrapped_by_sam, wrapped_by_name])
def test_the_innermost_optimizer_is_found(wrapped, make_model, backward):
    model = make_model()
    optimizer = wrapped(list(model.parameters()))
    handle = repel(model, optimizer, verbose=False)
    backward(model)
    optimizer.second_step()
    assert handle.steps == 1


def test_an_inner_optimizer_of_some_parameters_is_not_unwrapped(make_model):
    """Like ZeroRedundancyOptimizer, whose inner optimizer has this rank's share."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.optim = torch.optim.SGD(model.out.parameters(), lr=0.1)
    assert repel(model, optimizer, verbose=False).optimizer is optimizer


def test_several_optimizers_in_one_are_refused(make_model):
    class Both:
        def __init__(self, model):
            self.one, self.two = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))

    model = make_model()
    with pytest.raises(OptimizerError, match="for each"):
        repel(model, Both(model), verbose=False)
