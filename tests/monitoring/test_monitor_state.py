"""State and settings of a HeadMonitor."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

from repulsive import HeadMonitor, HeadWarning, NoHeadsFound, SelectionError, StateError, Thresholds
from tests.monitoring.small_models import duplicated, encoder, forward_passes, loss_of, steps


def test_the_state_resumes_without_repeating_warnings():
    model = duplicated()
    monitor = HeadMonitor(model, every=1)
    with pytest.warns(HeadWarning):
        forward_passes(model, monitor, 3)
    state = json.loads(json.dumps(monitor.state_dict(), allow_nan=False))
    monitor.close()
    again = HeadMonitor(model, every=1)
    again.load_state_dict(state)
    assert again.steps == 3 and again.problems == monitor.problems and steps(again) == [0, 1, 2]
    assert again.history[1].layers[0].entropy == pytest.approx(monitor.history[1].layers[0].entropy, rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        loss_of(model, 3)
    assert steps(again) == [0, 1, 2, 3]
    assert json.loads(json.dumps(again.state_dict()))["history"][:3] == state["history"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2 of the head monitor's state"),
        ({"steps": "x"}, "head monitor's state"),
        ({"history": [{"step": 1}]}, "damaged"),
        ({"problems": {"problems": 3}}, "damaged"),
        ({"history": [{"step": 1, "layers": [
            {"name": "other", "label": "x", "entropy": [], "largest_logit": [], "written": [], "cosine": [],
             "tokens": None}]}]}, "other layers: 'other'"),
    ],
)  # fmt: skip
def test_a_state_of_another_model_or_version_is_refused(change, message):
    monitor = HeadMonitor(encoder())
    before = monitor.state_dict()
    with pytest.raises(StateError, match=message):
        monitor.load_state_dict({**before, **change})
    assert monitor.state_dict() == before


def test_an_optimizer_in_place_of_a_setting_is_named_in_one_line():
    model = encoder()
    with pytest.raises(SelectionError, match=r"every=<AdamW object>: must be a whole number, at least 1$"):
        HeadMonitor(model, torch.optim.AdamW(model.parameters()))


def test_wrong_settings():
    with pytest.raises(SelectionError, match="every=0"):
        HeadMonitor(encoder(), every=0)
    with pytest.raises(SelectionError, match="log must have a method"):
        HeadMonitor(encoder(), log="runs")
    with pytest.raises(NoHeadsFound):
        HeadMonitor(nn.Linear(2, 2))
    for settings in ({"confirm": 0}, {"duplicate": 0}, {"dead": 2}, {"logit": -1}):
        with pytest.raises(SelectionError):
            Thresholds(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 1.5}, "every=1.5: must be a whole number"),
        ({"items": "a"}, "items='a': must be a whole number"),
        ({"thresholds": {"dead": 0.1}}, r"expected Thresholds\(...\)"),  # would stop the training at a measurement
    ],
)
def test_arguments_of_another_type_are_refused(settings, message):
    with pytest.raises(SelectionError, match=message):
        HeadMonitor(encoder(), **settings)
    with pytest.raises(SelectionError, match=r"instance of nn.Module"):
        HeadMonitor(None, probe=torch.ones(1))
    for wrong in ({"confirm": 1.5}, {"dead": "0.1"}):
        with pytest.raises(SelectionError, match="must be a"):
            Thresholds(**wrong)


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_monitor_is_not_pickled_or_copied(attempt):
    with HeadMonitor(encoder()) as monitor, pytest.raises(StateError, match=r"save monitor\.state_dict\(\)"):
        attempt(monitor)


def test_a_copied_model_refers_to_the_monitor_of_the_original():
    model = encoder()
    with HeadMonitor(model) as monitor:
        model.monitor = monitor
        assert copy.deepcopy(model).monitor is monitor


def test_repr():
    model = encoder()
    with HeadMonitor(model, every=2) as monitor:
        forward_passes(model, monitor, 3)
        assert repr(monitor) == "<repulsive.HeadMonitor: TransformerEncoder, step 3, 2 measurements, 0 problems>"
    assert repr(monitor).endswith("0 problems, closed>")
