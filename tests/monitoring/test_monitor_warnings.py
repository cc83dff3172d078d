"""Warnings of a HeadMonitor: problems of heads, parts that cannot be measured, and loops that do not call it."""

import json
import math
import warnings

import pytest
import torch
from torch import nn

from repulsive import HeadMonitor, HeadWarning, Thresholds
from tests.monitoring.small_models import bert, duplicated, encoder, forward_passes, loss_of, steps


@pytest.mark.parametrize(("build", "place"), [(bert, "attention"), (encoder, "qkv_torch")])
def test_an_error_in_the_monitor_does_not_stop_the_training(build, place, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(f"repulsive.diagnostics.hooks.{place}.dot_product_logits", fail)
    model = build()
    monitor = HeadMonitor(model, every=1)
    message = r"entropy and largest logit not measured \(layer 0, layer 1\): RuntimeError: out of memory"
    with pytest.warns(HeadWarning, match=message) as caught:
        forward_passes(model, monitor, 3)
    assert len(caught) == 1 and len(monitor.history) == 3 and "heads/similarity" in monitor.history[0].values()


def test_warnings_come_once_confirmed_and_say_since_when():
    model = duplicated()
    monitor = HeadMonitor(model, every=100)
    caught = {}
    for step in range(0, 501, 100):
        with warnings.catch_warnings(record=True) as caught[step]:
            warnings.simplefilter("always")
            loss_of(model, step)
            monitor.step(step + 100)
    texts = {step: [str(w.message) for w in some if w.category is HeadWarning] for step, some in caught.items()}
    assert [step for step, some in texts.items() if some] == [100]  # the second measurement confirms the first
    dead, duplicate = texts[100]
    assert dead.startswith("layer 0: head 2 has added almost nothing to its layer's output since step 0 (0.")
    assert duplicate.startswith(
        "layer 1: heads 1 and 3 have had nearly equal attention logits since step 0 (cosine 1.00); keep them apart"
    )
    kinds = [(problem.kind, problem.heads, problem.since, problem.step) for problem in monitor.problems]
    assert kinds == [("dead", (2,), 0, 100), ("duplicate", (1, 3), 0, 100)]


def test_a_saturated_layer_and_equal_tokens():
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.query.weight.mul_(3e4)
        model.bert.encoder.layer[1].output.dense.bias.fill_(0).add_(1e4 * torch.randn(32))
    HeadMonitor(model, every=1, thresholds=Thresholds(confirm=1))
    with pytest.warns(HeadWarning) as caught:
        loss_of(model, 0)
    texts = [str(warning.message) for warning in caught]
    assert any("layer 0: largest attention logit" in text and "consider QK-norm" in text for text in texts)
    assert any("layer 1: all tokens of a sequence have been nearly equal" in text for text in texts)


def test_nan_is_a_warning_and_not_an_error():
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight.fill_(math.nan)
    monitor = HeadMonitor(model, thresholds=Thresholds(confirm=1))
    with pytest.warns(HeadWarning, match="layer 1: attention contains NaN or infinity since step 0"):
        loss_of(model, 0)
    json.dumps(monitor.state_dict(), allow_nan=False)


def test_a_model_that_is_never_called_is_reported():
    model = encoder()
    monitor = HeadMonitor(model, every=1)

    def run():
        for _ in range(6):
            for layer in model.layers:
                layer(torch.ones(2, 7, 16))
            monitor.step()

    with pytest.warns(HeadWarning, match="nothing in 3 steps: no training pass called TransformerEncoder") as caught:
        run()
    assert len(caught) == 1
    monitor.close()


def test_what_cannot_be_measured_is_said_once():
    model = bert()
    for layer in model.bert.encoder.layer:  # as Swin v2 has it
        layer.attention.self.logit_scale = nn.Parameter(torch.zeros(1))
    monitor = HeadMonitor(model, every=1)
    with pytest.warns(HeadWarning, match=r"similarity of attention logits not measured \(layer 0, layer 1\)") as caught:
        forward_passes(model, monitor, 3)
    assert len(caught) == 1 and "compares queries and keys by cosine" in str(caught[0].message)
    assert "heads/similarity" not in monitor.history[0].values() and "heads/entropy" in monitor.history[0].values()


def test_a_loop_that_never_calls_step_is_warned_about():
    model = encoder()
    monitor = HeadMonitor(model, every=1)
    for step in range(3):
        loss_of(model, step).backward()
    with pytest.warns(HeadWarning, match=r"first pass only: call its step\(\)"):
        monitor.close()
    assert steps(monitor) == [0]


def test_an_error_before_the_first_call_of_step_is_not_warned_about():
    def fails(model):
        with HeadMonitor(model, every=1):
            loss_of(model, 0)
            raise KeyboardInterrupt

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyboardInterrupt):
            fails(encoder())
