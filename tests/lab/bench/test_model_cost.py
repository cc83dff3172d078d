"""Measurements of `repulsive bench --model`: twins start equal, and every model runs. No speed is asserted."""

import json
import math
from dataclasses import replace

import pytest
import torch

from repulsive import SVGD, RuleError, SelectionError
from repulsive.lab.bench import hook_cost, model_cost, rules
from repulsive.lab.bench.model_cost import CostOptions, measure_model
from repulsive.lab.bench.presets import PRESETS, find_preset
from repulsive.lab.bench.rules import Case
from repulsive.repulsion.logits.sampler import Hook
from repulsive.repulsion.logits.samples import Samples
from tests.lab.bench.tiny_models import TINY, tiny_twin

pytest.importorskip("transformers")

NO_DROPOUT = {
    "bert-base": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


def weights(twin):
    return {name: value.clone() for name, value in twin.model.state_dict().items()}


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
        assert row["low"] <= row["ratio"] <= row["high"] and math.isfinite(row["last_loss"])
        assert row["per_second"] == pytest.approx(items / row["seconds"])
    assert facts["results"]["plain"]["ratio"] == facts["results"]["plain"]["high"] == 1
    assert {kind: len(own) for kind, own in facts["turns"].items()} == {
        "plain": 24,
        "plain again": 6,
        "paper": 6,
        "logits": 6,
    }
    hooks = facts["results"]["logits"]["hooks"]
    assert hooks["host"]["renewing"] > hooks["host"]["ordinary"] > 0 and hooks["device"] is None
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


@pytest.mark.parametrize("name", PRESETS)
def test_twins_start_equal_and_only_the_rule_makes_a_difference(name):
    twins = [tiny_twin(name, rule, **NO_DROPOUT.get(name, {})) for rule in (None, None, Case(SVGD(alpha=1.0)))]
    starts = [weights(twin) for twin in twins]
    for twin in twins:
        twin.turn()
    ends = [weights(twin) for twin in twins]
    for key, value in starts[0].items():
        assert torch.equal(value, starts[1][key]) and torch.equal(value, starts[2][key])
        torch.testing.assert_close(ends[0][key], ends[1][key], rtol=0, atol=1e-6)
    moved = [key for key, value in starts[0].items() if not torch.equal(value, ends[0][key])]
    changed = [key for key in moved if (ends[0][key] - ends[2][key]).abs().max() > 1e-5]
    assert changed, "the rule changed nothing, so its cost would be that of nothing"
    assert twins[0].handle is twins[1].handle is None and twins[2].handle.steps == 3


def test_the_first_step_of_every_turn_measures():
    twin = tiny_twin("bert-base", Case(SVGD()), steps=2)
    measured = []
    for _ in range(3):
        twin.turn()
        measured.append({group.step for group in twin.handle.report()})
    assert measured == [{0}, {3}, {6}]


def test_a_turn_has_one_measuring_and_one_renewing_step_with_logits():
    twin = tiny_twin("bert-base", Case(SVGD(space="logits")), steps=2)
    twin.turn()
    logits = twin.handle._logits
    for _ in range(2):
        twin.begin_turn()
        counts = []
        for kind in twin.kinds:
            before = logits.renewals, {group.step for group in twin.handle.report()}
            step = twin.handle.steps
            twin.step()
            counts.append((kind, logits.renewals - before[0], {group.step for group in twin.handle.report()} == {step}))
        assert [renewed for _, renewed, _ in counts] == [0, 1, 0, 0]
        assert twin.kinds == ["measuring", "renewing", "ordinary", "ordinary"] and counts[0][2]


def test_the_time_inside_hooks_is_that_of_the_hooks(monkeypatch):
    """Hooks that take a known time on a fake clock are measured by kind of step, and all hooks are restored."""
    twin = tiny_twin("bert-base", Case(SVGD(space="logits")), steps=2)
    twin.turn()
    now = [0.0]
    monkeypatch.setattr(hook_cost.time, "perf_counter", lambda: now[0])
    before = Hook.__call__
    update = twin.handle._updates.current
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
    cost = hook_cost.measure_hooks(twin, 2)
    assert cost.host == {"measuring": 3.0, "renewing": 17.0, "ordinary": 1.0}  # q and k of one layer
    assert cost.average == pytest.approx((200 * 3 + 346 * 17 + 9454) / 10_000)
    assert Hook.__call__ is before
    spent = now[0]
    twin.step()
    assert now[0] == spent + 1.0


@pytest.mark.slow
def test_a_rule_that_clips_is_compared_with_a_plain_twin_that_clips():
    options = CostOptions("gpt2", ("max-norm",), rounds=6, steps=1, layers=1, batch=1, length=8, overrides=TINY["gpt2"])
    results = measure_model(options, progress=lambda line: None)["results"]
    assert list(results) == ["plain", "plain again", "plain, clipped", "max-norm"]
    assert results["max-norm"]["baseline"] == "plain, clipped" and results["plain again"]["baseline"] == "plain"
    assert results["plain, clipped"]["hooks"]["host"]["ordinary"] > 0
    host = [results[name]["hooks"]["average"] for name in ("max-norm", "plain, clipped")]
    expected = 1 + (host[0] - host[1]) / results["plain, clipped"]["seconds"]
    assert results["max-norm"]["bound"] == pytest.approx(expected)


def test_a_plain_twin_that_clips_limits_the_norm(monkeypatch):
    twin = tiny_twin("gpt2", max_norm=1e-3)
    norms = []
    whole = twin.optimizer.step
    monkeypatch.setattr(
        twin.optimizer,
        "step",
        lambda: (norms.append(torch.nn.utils.get_total_norm([p.grad for p in twin.model.parameters()])), whole()),
    )
    twin.step()
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
    with pytest.raises(
        model_cost.RepulsiveError, match=r"3 copies of the model need 16.6 GB, but only 2.0 GB are free"
    ):
        measure_model(CostOptions("llama", ("paper",)), progress=lambda line: None)


@pytest.mark.slow
def test_a_compiled_twin_takes_the_same_steps(monkeypatch):
    """`repel` finds the heads of a compiled model, and both have the same weights at the end."""
    whole, graphs = torch.compile, []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model: whole(model, backend=count))
    compiled, eager = (tiny_twin("llama", Case(SVGD()), compiled=value) for value in (True, False))
    for twin in (compiled, eager):
        twin.turn()
    assert graphs and compiled.handle.steps == 3
    for key, value in weights(eager).items():
        torch.testing.assert_close(weights(compiled)[f"_orig_mod.{key}"], value, rtol=0, atol=1e-5)
