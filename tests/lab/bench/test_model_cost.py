"""Measurements of `repulsive bench --model`: every model runs, and rules do not affect each other's turns.

No speed is asserted.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from repulsive import SVGD, RuleError, SelectionError
from repulsive.lab.bench import hook_cost, model_cost, rules
from repulsive.lab.bench.model_cost import CostOptions, measure_model
from repulsive.lab.bench.presets import PRESETS, Preset, find_preset
from repulsive.lab.bench.rules import Case
from repulsive.repulsion.logits.module_hook import Hook
from repulsive.repulsion.logits.samples import Samples
from tests.lab.bench.tiny_models import TINY, tiny_variant

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bert-base" else pytest.mark.slow) for name in PRESETS]
)
def test_every_model_is_measured(name):
    options = CostOptions(name, ("paper", "logits"), rounds=6, steps=1, layers=1, batch=2, overrides=TINY[name])
    if name != "vit-b16":
        options = replace(options, length=16)
    facts = measure_model(options, progress=lambda line: None)
    assert list(facts["results"]) == ["plain", "plain again", "paper", "logits"]
    items = 2 if name == "vit-b16" else 32
    for row in facts["results"].values():
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["per_second"] == pytest.approx(items / row["seconds"])
    assert math.isfinite(facts["last_loss"]) and facts["rounds"] == 6
    assert facts["results"]["plain"]["ratio"] == facts["results"]["plain"]["high"] == 1
    assert {kind: len(own) for kind, own in facts["turns"].items()} == {
        "plain": 24,
        "plain again": 6,
        "paper": 6,
        "logits": 6,
    }
    hooks = facts["results"]["logits"]["hooks"]
    assert all(hooks["host"][kind] > 0 for kind in ("measuring", "renewing", "ordinary")) and hooks["device"] is None
    assert facts["results"]["plain"]["bound"] is None and facts["results"]["logits"]["bound"] > 1
    assert json.loads(json.dumps(facts))["turns"] == facts["turns"], "a value has no JSON form"


@pytest.mark.parametrize(
    ("name", "millions", "layers", "heads"),
    [("bert-base", 109.5, 12, 12), ("vit-b16", 86.6, 12, 12), ("gpt2", 124.4, 12, 12), ("llama", 415.2, 24, 14)],
)
def test_presets_have_their_published_sizes(name, millions, layers, heads):
    model = find_preset(name).build("meta")
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (layers, heads)


def test_steps_have_the_sizes_that_the_documents_name():
    on_gpu = {name: preset.size("cuda") for name, preset in PRESETS.items()}
    assert on_gpu == {"bert-base": (32, 128), "vit-b16": (64, 1), "gpt2": (8, 1024), "llama": (4, 1024)}
    on_cpu = {name: preset.size("cpu") for name, preset in PRESETS.items()}
    assert on_cpu == {"bert-base": (16, 128), "vit-b16": (10, 1), "gpt2": (2, 1024), "llama": (2, 1024)}
    assert PRESETS["gpt2"].size("cuda", length=2048) == (4, 2048)  # a step keeps its tokens
    assert PRESETS["gpt2"].size("cuda", batch=3, length=5000) == (3, 5000)


def test_a_model_reads_sequences_longer_than_its_default():
    assert find_preset("gpt2").build("meta", layers=1, length=1500).config.n_positions == 1500
    assert find_preset("bert-base").build("meta", layers=1, length=8).config.max_position_embeddings == 512


def test_one_model_is_built_for_all_rules(monkeypatch):
    whole, devices = Preset.build, []

    def counted(self, device, **more):
        devices.append(device)
        return whole(self, device, **more)

    monkeypatch.setattr(Preset, "build", counted)
    rules = ("paper", "sphere", "max-norm")
    options = CostOptions("gpt2", rules, steps=1, hook_turns=1, layers=1, batch=1, length=8, overrides=TINY["gpt2"])
    facts = measure_model(options, progress=lambda line: None)
    assert devices == ["meta", "cpu"]
    assert set(facts["results"]) == {"plain", "plain again", "plain, clipped", *rules}


def test_the_first_step_of_every_turn_measures():
    variant = tiny_variant("bert-base", Case(SVGD()), steps=2)
    measured = []
    for _ in range(3):
        variant.run_turn()
        measured.append({group.step for group in variant.handle.report()})
    assert measured == [{0}, {3}, {6}]


def test_a_turn_has_one_measuring_and_one_renewing_step_with_logits():
    variant = tiny_variant("bert-base", Case(SVGD(space="logits")), steps=2)
    variant.run_turn()
    logits = variant.handle._logits
    for _ in range(2):
        renewed, measured = [], []
        with variant.attached():
            for _ in variant.periods:
                before, step = logits.renewals, variant.handle.steps
                variant.step()
                renewed.append(logits.renewals - before)
                measured.append({group.step for group in variant.handle.report()} == {step})
        assert variant.periods == ["measuring", "renewing", "ordinary", "ordinary"]
        assert renewed == [0, 1, 0, 0] and measured == [True, False, False, False]


def test_the_time_inside_hooks_is_that_of_the_hooks(monkeypatch):
    """Hooks that take a known time on a fake clock are measured by kind of step, and all hooks are restored."""
    variant = tiny_variant("bert-base", Case(SVGD(space="logits")), steps=2)
    variant.run_turn()
    now = [0.0]
    monkeypatch.setattr(hook_cost.time, "perf_counter", lambda: now[0])
    before = Hook.__call__
    update = variant.handle._updates.current
    whole, repeated, take = type(update).run, type(update).again, Samples.take

    def slow_run(self, inputs):
        now[0] += 1.0 + 2.0 * inputs.measure
        return whole(self, inputs)

    def slow_again(self, inputs):
        measured = repeated(self, inputs)
        if measured is not None:
            now[0] += 1.0 + 2.0 * inputs.measure
        return measured

    def slow_take(self, *args):
        now[0] += 8.0
        return take(self, *args)

    monkeypatch.setattr(type(update), "run", slow_run)
    monkeypatch.setattr(type(update), "again", slow_again)
    monkeypatch.setattr(Samples, "take", slow_take)
    cost = hook_cost.measure_hooks(variant, 2)
    assert cost.host == {"measuring": 3.0, "renewing": 17.0, "ordinary": 1.0}  # q and k of one layer
    assert cost.average == pytest.approx((200 * 3 + 346 * 17 + 9454) / 10_000)
    assert Hook.__call__ is before
    spent = now[0]
    variant.run_turn()
    assert now[0] == spent + 3.0 + 17.0 + 2 * 1.0


def test_the_time_inside_hooks_is_a_mean_over_acting_and_resting_steps(monkeypatch):
    """A rule that acts in one of four steps: its hook takes 9 seconds then, 17 if it measures, and 1 otherwise."""
    now = [0.0]
    monkeypatch.setattr(hook_cost.time, "perf_counter", lambda: now[0])
    rule = SVGD()
    object.__setattr__(rule, "act_every", 4)
    variant = tiny_variant("llama", Case(rule), steps=6)
    handle = variant.handle

    def repel_slowly(scale):
        acts = handle.steps % 4 == 0
        now[0] += 1.0 + 8.0 * acts + 8.0 * (acts and handle.steps % handle.settings.measure_every < 4)
        return True

    monkeypatch.setattr(handle, "_repel", repel_slowly)
    cost = hook_cost.measure_hooks(variant, 2)
    assert variant.periods == ["measuring", "ordinary", "ordinary"] and handle.steps == 2 * 12
    assert cost.host == {"measuring": (17 + 3) / 4, "ordinary": (9 + 3) / 4}
    assert cost.average == pytest.approx((200 * 17 + 2_300 * 9 + 7_500 * 1) / 10_000)


@pytest.mark.slow
def test_a_rule_that_clips_is_compared_with_plain_turns_that_clip():
    options = CostOptions("gpt2", ("max-norm",), rounds=6, steps=1, layers=1, batch=1, length=8, overrides=TINY["gpt2"])
    results = measure_model(options, progress=lambda line: None)["results"]
    assert list(results) == ["plain", "plain again", "plain, clipped", "max-norm"]
    assert results["max-norm"]["baseline"] == "plain, clipped" and results["plain again"]["baseline"] == "plain"
    assert results["plain, clipped"]["hooks"]["host"]["ordinary"] > 0
    assert results["max-norm"]["bound"] is None  # its hooks contain the clipping


def test_plain_turns_that_clip_limit_the_norm(monkeypatch):
    variant = tiny_variant("gpt2", max_norm=1e-3)
    norms, shared = [], variant.shared
    whole = shared.optimizer.step
    monkeypatch.setattr(
        shared.optimizer,
        "step",
        lambda: (norms.append(torch.nn.utils.get_total_norm([p.grad for p in shared.model.parameters()])), whole()),
    )
    variant.step()
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
def test_rules_that_do_not_work_are_left_out_unless_named(monkeypatch):
    def broken():
        raise RuleError("no such space")

    monkeypatch.setattr(rules, "RULES", {"paper": SVGD, "logits": broken})
    monkeypatch.setattr(rules, "MORE", {})
    options = CostOptions("gpt2", rounds=6, steps=1, layers=1, batch=1, length=8, overrides=TINY["gpt2"])
    lines = []
    facts = measure_model(options, progress=lines.append)
    assert facts["left_out"] == {"logits": "no such space"} and "logits: left out, no such space" in lines
    assert list(facts["results"]) == ["plain", "plain again", "paper"]
    with pytest.raises(RuleError, match="no such space"):
        measure_model(CostOptions("gpt2", ("logits",)))


def test_all_rules_but_those_of_a_later_version_can_be_built():
    built, reasons = rules.available_cases()
    assert {"paper", "sphere", "spos", "sgld", "auto", "schedule", "max-norm"} <= set(built)
    assert set(built) | set(reasons) == {*rules.RULES, *rules.MORE} - {"svgd", "recommended"}
    assert repr(rules.RULES["recommended"]()) == repr(built["sphere"].rule)


def test_names_that_are_misspelt_are_suggested():
    with pytest.raises(SelectionError, match="did you mean 'bert-base'"):
        find_preset("bert-bas")
    with pytest.raises(RuleError, match="did you mean 'sphere'"):
        rules.build_cases(["paper", "spere"])
    with pytest.raises(RuleError, match="did you mean 'max-norm'"):
        rules.build_cases(["maxnorm"])


def test_memory_is_checked_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(model_cost, "free_bytes", lambda device: 2e9)
    with pytest.raises(model_cost.RepulsiveError, match=r"training the model needs 6.6 GB, but only 2.0 GB are free"):
        measure_model(CostOptions("llama", ("paper",)), progress=lambda line: None)
