"""Numbers of a HeadMonitor: of a training batch, of a probe, and as they are logged."""

import warnings
from typing import NamedTuple

import pytest
import torch

from repulsive import HeadMonitor, SelectionError
from repulsive.diagnostics.hooks.calling import call
from repulsive.monitoring.recording import HeadRecorder
from tests.monitoring.small_models import MASK, bert, encoder, inputs, loss_of, steps, train


def test_the_numbers_are_those_of_the_training_batch_without_padding():
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    recorder = HeadRecorder(model)
    with torch.no_grad(), recorder.recording(inputs(), 0) as result:
        model(**inputs())
    wanted = result.finish()
    monitor = HeadMonitor(model)
    loss_of(model, 0)
    assert monitor.history[0] == wanted
    without_mask = HeadMonitor(model)
    model(inputs()["input_ids"])
    assert without_mask.history[0].layers[0].entropy != wanted.layers[0].entropy
    positional = HeadMonitor(model)
    model(inputs()["input_ids"], MASK)
    assert positional.history[0] == wanted


def test_a_probe_may_be_a_named_tuple():
    class Batch(NamedTuple):
        src: torch.Tensor

    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    model = encoder()
    assert HeadMonitor(model, probe=Batch(x)).measure() == HeadMonitor(model, probe=(x,)).measure()


def test_a_probe_is_measured_in_evaluation_mode_and_changes_nothing():
    plain, model = train(bert()), bert()
    batch = {name: value for name, value in inputs().items() if name != "labels"}
    monitor = HeadMonitor(model, every=2, probe=batch)
    first = monitor.measure()
    watched = train(model, monitor)
    assert steps(monitor) == [0, 2, 4] and first is monitor.history[0] and model.training
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    model.eval()
    recorder = HeadRecorder(model)
    with torch.no_grad(), recorder.recording(batch, 4) as result:
        call(model, batch)
    monitor.begin_step(4)
    assert monitor.measure().layers == result.finish().layers
    with pytest.raises(SelectionError, match=r"probe=batch"):
        HeadMonitor(model).measure()


def test_values_are_logged():
    logged = []
    model = encoder()
    monitor = HeadMonitor(model, every=1, log=lambda values, step: logged.append((values, step)))
    loss_of(model, 0)
    (values, step), layers = logged[0], monitor.history[0].layers
    assert step == 0
    assert values["heads/layer 1/entropy"] == pytest.approx(sum(layers[1].entropy) / 4)
    assert values["heads/entropy"] == pytest.approx(sum(sum(layer.entropy) for layer in layers) / 8)
    assert values["heads/largest_logit"] == max(max(layer.largest_logit) for layer in layers)
    largest = max(cosine for layer in layers for _, _, cosine in layer.pairs)
    assert values["heads/similarity_largest"] == largest
    assert values["heads/smallest_write"] == min(min(layer.written) for layer in layers)


def test_a_monitor_with_a_probe_may_be_measured_without_steps():
    model = encoder()
    monitor = HeadMonitor(model, probe=torch.randn(2, 7, 16))
    monitor.measure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.close()
    assert len(monitor.history) == 1
