"""Repulsion between logits with optimizers that call a closure several times in one step."""

import pytest
import torch

from repulsive import SVGD, repel
from tests.repulsion.logits.small_decoder import Decoder, batch, loss_of


def train(every: int, steps: int):
    """Train with L-BFGS; return the weights, and the force on layer 1 after each call of the closure."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    rule = SVGD(alpha=0.05, space="logits", tokens=64, every=every)
    handle = repel(model, optimizer, rule, verbose=False, allow_unproved=True)
    forces = []

    def step(index: int) -> None:
        def closure() -> torch.Tensor:
            if handle._logits.held:
                forces.append(handle._logits.held[1].sides[0][0].force.clone())
            optimizer.zero_grad()
            loss = loss_of(model, batch(index))
            loss.backward()
            return loss

        optimizer.step(closure)

    for index in range(steps):
        step(index)
    return torch.nn.utils.parameters_to_vector(model.parameters()), forces


@pytest.mark.filterwarnings("error::repulsive.repulsion.logits.repulsion.NoTokensWarning")
def test_every_call_of_a_closure_in_a_step_that_is_due_computes_a_force():
    weights, forces = train(every=3, steps=1)
    assert len(forces) == 2 and not torch.equal(*forces)  # after the first and the second of three calls
    assert torch.equal(weights, train(every=1, steps=1)[0])


def test_calls_of_a_closure_in_other_steps_keep_the_force():
    _, forces = train(every=3, steps=3)
    last = forces[2:]  # from the last call of step 0 on
    assert len(last) == 6 and all(torch.equal(force, last[0]) for force in last)
