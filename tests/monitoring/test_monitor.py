"""HeadMonitor: which passes it measures, that it changes nothing, its warnings and its state."""

import copy
import json
import math
import pickle
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

from repulsive import HeadMonitor, HeadWarning, NoHeadsFound, SelectionError, StateError, Thresholds
from repulsive.diagnostics.hooks.calling import call
from repulsive.monitoring.recording import HeadRecorder

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def bert(**settings):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=64, **settings)).train()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def inputs(step=0):
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "attention_mask": MASK, "labels": ids}


def loss_of(model, step):
    if isinstance(model, nn.TransformerEncoder):
        return model(torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(step))).square().mean()
    return model(**inputs(step)).loss


def train(model, monitor=None, steps=5, forward=None):
    """Train with Adam and dropout; return the weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model if forward is None else forward, step).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
    return {name: x.clone() for name, x in model.state_dict().items()}


def forward_passes(model, monitor, count):
    for step in range(count):
        loss_of(model, step)
        monitor.step()


def steps(monitor):
    return [measurement.step for measurement in monitor.history]


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


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


def duplicated():
    """Heads 1 and 3 of layer 1 are equal; head 2 of layer 0 writes nothing."""
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    first, second = (layer.attention for layer in model.bert.encoder.layer)
    with torch.no_grad():
        for projection in (second.self.query, second.self.key):
            projection.weight[24:32] = projection.weight[8:16]
        first.output.dense.weight[:, 16:24] *= 1e-3
    return model


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


def test_copies_and_pickles_of_a_model_do_not_measure():
    model = encoder()
    monitor = HeadMonitor(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, 0)
        assert steps(monitor) == []
    loss_of(model, 0)
    assert steps(monitor) == [0]


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


def test_a_monitor_with_a_probe_may_be_measured_without_steps():
    model = encoder()
    monitor = HeadMonitor(model, probe=torch.randn(2, 7, 16))
    monitor.measure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.close()
    assert len(monitor.history) == 1


def test_an_error_before_the_first_call_of_step_is_not_warned_about():
    def fails(model):
        with HeadMonitor(model, every=1):
            loss_of(model, 0)
            raise KeyboardInterrupt

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyboardInterrupt):
            fails(encoder())


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


def test_only_rank_0_measures(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 1)
    model = encoder()
    monitor = HeadMonitor(model, every=1)
    assert hooks_on(model) == 0
    loss_of(model, 0)
    monitor.step()
    assert steps(monitor) == []


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


def test_repr():
    model = encoder()
    with HeadMonitor(model, every=2) as monitor:
        forward_passes(model, monitor, 3)
        assert repr(monitor) == "<repulsive.HeadMonitor: TransformerEncoder, step 3, 2 measurements, 0 problems>"
    assert repr(monitor).endswith("0 problems, closed>")
