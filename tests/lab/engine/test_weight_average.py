"""The running average of weights: which steps, known answers, counters, and its state."""

import pytest
import torch

from repulsive.lab.engine.recipe import Training
from repulsive.lab.engine.weight_average import Average


@pytest.mark.parametrize(
    ("training", "steps"),
    [
        (Training(), []),
        (Training(average=1), [20]),
        (Training(average=3), [10, 15, 20]),  # epochs of five steps
        (Training(average=9), [5, 10, 15, 20]),
        (Training(average=3, average_every=2), [16, 18, 20]),
    ],
)
def test_the_last_steps_at_equal_distances_are_averaged(training, steps):
    average = Average(training, per_epoch=5, total=20)
    assert [step for step in range(1, 21) if average.is_due(step)] == steps


def test_floats_are_averaged_and_counters_keep_their_last_value():
    average = Average(Training(average=3), per_epoch=1, total=3)
    weights = {"w": torch.zeros(2), "count": torch.tensor(0)}
    for value in (1.0, 2.0, 6.0):
        weights["w"].fill_(value)  # the training changes its weights in place
        weights["count"].fill_(int(10 * value))
        average.add(weights)
    again = Average(Training(average=3), per_epoch=1, total=3)
    again.load_state_dict(average.state_dict(), torch.device("cpu"))
    for one in (average, again):
        assert one.count == 3 and one.weights()["w"].tolist() == [3.0, 3.0]
        assert one.weights()["count"].dtype == torch.int64 and int(one.weights()["count"]) == 60


@pytest.mark.parametrize("state", [{"count": 2, "sum": {}}, {"count": 0, "sum": {"w": torch.ones(1)}}])
def test_a_count_that_does_not_fit_the_sum_is_refused(state):
    with pytest.raises(ValueError, match="an average of"):
        Average(Training(average=3), per_epoch=1, total=3).load_state_dict(state, torch.device("cpu"))
