"""HeadMonitor: which passes it measures, and that it changes nothing."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from repulsive import HeadMonitor, HeadWarning
from tests.monitoring.small_models import bert, encoder, hooks_on, loss_of, steps, train

BUILDERS = {"sdpa": bert, "eager": lambda: bert(attn_implementation="eager"), "torch": encoder}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_training_is_the_same_to_the_last_bit(build):
    plain = train(build())
    model = build()
    with HeadMonitor(model, every=2) as monitor:
        watched = train(model, monitor)
    assert steps(monitor) == [0, 2, 4]
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_autocast_training_is_the_same_to_the_last_bit(build):
    def run(is_monitored):
        model = build()
        monitor = HeadMonitor(model, every=1) if is_monitored else None
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, 0)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], monitor

    (plain, _), (watched, monitor) = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert all(layer.entropy and layer.written and layer.cosine for layer in monitor.history[0].layers)


def test_checkpointed_activations_are_measured_once_and_training_is_the_same():
    def build(**kinds):
        model = bert()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)
        return model

    for kinds in ({"use_reentrant": False}, {"use_reentrant": True}):
        plain, model = train(build(**kinds)), build(**kinds)
        calls = []
        with HeadMonitor(model, every=2) as monitor:
            model.bert.encoder.layer[0].attention.self.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            watched = train(model, monitor)
        assert steps(monitor) == [0, 2, 4] and len(calls) == 10  # the second run of each layer is not measured
        assert all(torch.equal(plain[name], watched[name]) for name in plain)
        free = bert()
        with HeadMonitor(free, every=2) as other:
            train(free, other)
        assert monitor.history[-1].layers[0].entropy == pytest.approx(other.history[-1].layers[0].entropy)


def test_checkpointed_torch_layers():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = encoder()

        def forward(self, x):
            for layer in self.stack.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return x

    def run(monitored):
        model = Checkpointed()
        torch.manual_seed(1)
        monitor = HeadMonitor(model, every=1) if monitored else None
        model(torch.ones(2, 7, 16, requires_grad=True)).square().sum().backward()
        return model.stack.layers[0].linear1.weight.grad, monitor

    gradient, monitor = run(True)
    assert torch.equal(gradient, run(False)[0]) and len(monitor.history[0].layers) == 2


def test_hooks_exist_only_in_steps_that_measure():
    model = bert()
    before = hooks_on(model)
    monitor = HeadMonitor(model, every=3)
    counts = []
    for step in range(5):
        counts.append(hooks_on(model) - before)
        loss_of(model, step).backward()
        assert hooks_on(model) == before  # also right after the measured pass
        monitor.step()
    assert [count > 0 for count in counts] == [True, False, False, True, False]
    monitor.close()
    assert hooks_on(model) == before


def test_evaluation_is_not_measured():
    model = bert()
    monitor = HeadMonitor(model)
    model.eval()
    loss_of(model, 0)
    model.train()
    with torch.no_grad():
        loss_of(model, 0)
    assert steps(monitor) == []
    loss_of(model, 0)
    loss_of(model, 1)  # a second micro-batch
    assert steps(monitor) == [0]


def test_a_pass_that_fails_leaves_nothing_behind():
    model = bert()
    monitor = HeadMonitor(model)
    with pytest.raises(IndexError):
        model(torch.full((2, 7), 99))
    failing = model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    failing.remove()
    assert torch.ones(2).softmax(0).sum() == 1 and torch.overrides._get_current_function_mode() is None
    loss_of(model, 0)
    assert steps(monitor) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["given", "after", "in place", "regions", "forward", "inner"])
def test_compiled_models(way):
    model = encoder() if way == "regions" else bert()
    forward = model
    if way == "given":
        forward = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    elif way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif way == "inner":
        model.bert = torch.compile(model.bert, backend="eager")
    elif way == "regions":
        for layer in model.layers:
            layer.compile(backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        monitor = HeadMonitor(forward if way == "given" else model, every=2)
        if way == "after":
            forward = torch.compile(model, backend="eager")
        train(model, monitor, forward=forward, steps=6)
    assert steps(monitor) == ([1, 2, 4] if way == "after" else [0, 2, 4])  # unknown wrapper: one step late, once
    assert len(monitor.history[-1].layers) == 2
    monitor.close()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_pass_without_attention_is_not_a_measurement():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack, self.skips = encoder(), 2

        def forward(self, x):
            self.skips -= 1
            return x * 1 if self.skips >= 0 else self.stack(x)

    model = Skipping()
    monitor = HeadMonitor(model, every=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HeadWarning)
        for _ in range(4):
            model(torch.randn(2, 7, 16, requires_grad=True))
            monitor.step()
    assert steps(monitor) == [2] and hooks_on(model) == 0


def test_copies_and_pickles_of_a_model_do_not_measure():
    model = encoder()
    monitor = HeadMonitor(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, 0)
        assert steps(monitor) == []
    loss_of(model, 0)
    assert steps(monitor) == [0]


def test_only_rank_0_measures(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    model = encoder()
    monitor = HeadMonitor(model, every=1)
    assert hooks_on(model) == 0
    loss_of(model, 0)
    monitor.step()
    assert steps(monitor) == []


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_model_that_is_one_attention_layer_is_measured(batch_first):
    class Model(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x)

    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    x, measured = torch.randn(3, 6, 16), []
    for model, inputs in ((attention, (x, x, x)), (Model(attention), (x,))):
        with HeadMonitor(model, every=1) as monitor:
            for _ in range(2):
                model(*inputs)[0].sum().backward()
                monitor.step()
        assert [measurement.step for measurement in monitor.history] == [0, 1]
        measured.append([(layer.entropy, layer.written, layer.cosine) for layer in monitor.history[1].layers])
    assert measured[0] == measured[1]
