"""One training run of the demo: what the arms share, and what differs."""

import statistics
from dataclasses import replace

import pytest
import torch

from repulsive import Heads
from repulsive.lab.demo.settings import ARMS, FINAL, PLAIN, REGULARIZED, REPELLED, Settings
from repulsive.lab.demo.text import split
from repulsive.lab.demo.train import Disagreement, build, evaluate, held_out_sample, next_byte_loss, train, windows
from repulsive.regularizers import on_outputs
from tests.lab.demo.small import SMALL, small_text
from tests.threads import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def trained():
    return {arm: train(arm, 3, SMALL, small_text()) for arm in ARMS}


def test_arms_start_with_the_same_weights_and_the_same_batch(trained):
    one = replace(SMALL, steps=1)
    first = {arm: train(arm, 3, one, small_text()).history[0].loss for arm in ARMS}
    assert first[PLAIN] == first[REPELLED] == first[REGULARIZED]
    ends = {trained[arm].held_out for arm in ARMS}
    assert len(ends) == 3  # each arm was trained in its own way


def test_a_seed_determines_the_run(trained):
    again = train(REPELLED, 3, SMALL, small_text())
    assert again.history == trained[REPELLED].history and again.held_out == trained[REPELLED].held_out
    assert train(PLAIN, 4, SMALL, small_text()).held_out != trained[PLAIN].held_out


@pytest.mark.parametrize("rule", ["logits", "recommended", "paper"])
def test_any_rule_can_be_demonstrated(rule, trained):
    other = train(REPELLED, 3, replace(SMALL, rule=rule), small_text())
    assert other.held_out != trained[PLAIN].held_out


def test_measurements_are_those_of_the_trained_model(trained):
    for arm, result in trained.items():
        sample = held_out_sample(split(small_text())[1], SMALL.length)
        layers = Heads(result.model).similarity([sample])
        last = result.history[-1]
        assert [each.step for each in result.history] == SMALL.measured == [3, 6, 9, 12]
        assert last.mean == pytest.approx(statistics.fmean(layer.mean for layer in layers))
        assert last.largest == pytest.approx(max(layer.largest for layer in layers))
        assert torch.allclose(torch.stack(result.cosines), torch.stack([layer.cosine for layer in layers])), arm


def test_measurements_build_no_untrained_twins(monkeypatch):
    def refuse(*_):
        raise AssertionError("a twin costs as much as the measurement, and the demo does not show its verdict")

    monkeypatch.setattr("repulsive.diagnostics.untrained_baseline.untrained_twin", refuse)
    assert len(train(PLAIN, 3, replace(SMALL, steps=2), small_text()).history) == 2


def test_repulsion_lowers_the_similarity_of_heads(trained):
    assert trained[REPELLED].history[-1].mean < trained[PLAIN].history[-1].mean - 0.05


def test_the_regularizer_reads_the_outputs_of_all_heads_and_leaves_no_hook():
    model = build(SMALL, 0)
    penalty = Disagreement(model)
    tokens = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))
    model(tokens)
    value = penalty.value()
    expected = []
    for index in range(SMALL.layers):
        inputs: list[torch.Tensor] = []
        hook = model.layers[index].attention.o_proj.register_forward_pre_hook(
            lambda _, x, into=inputs: into.append(x[0])
        )
        model(tokens)
        hook.remove()
        expected.append(on_outputs(inputs[0].unflatten(-1, (SMALL.heads, -1)).transpose(1, 2)))
    assert value.item() == pytest.approx(torch.stack(expected).mean().item())
    value.backward()
    assert model.layers[0].attention.v_proj.weight.grad.abs().sum() > 0
    penalty.remove()
    assert not any(layer.attention.o_proj._forward_pre_hooks for layer in model.layers)


def test_held_out_loss_is_the_mean_over_all_bytes():
    model, tokens = build(SMALL, 0), split(small_text())[1][:200]
    every = windows(tokens, 24)
    assert every.shape == (8, 25) and torch.equal(every[1, 0], every[0, -1])
    losses = [next_byte_loss(model, window[None]).mean().item() for window in every]
    assert evaluate(model, tokens, 24) == pytest.approx(statistics.fmean(losses), rel=1e-6)


def test_learning_rate_rises_and_falls():
    settings = Settings()
    rates = [settings.rate(step) for step in range(settings.steps)]
    assert rates[0] == 1 / settings.warmup and max(rates) == rates[settings.warmup - 1] == 1
    assert rates[-1] == pytest.approx(FINAL)
    assert settings.measured[-1] == settings.steps and len(settings.measured) == settings.measurements
