"""Measurements of `repulsive bench --model`: twins start equal, and every model runs. No speed is asserted."""

import json
import math
from dataclasses import replace

import pytest
import torch

from repulsive import SVGD, RuleError, SelectionError
from repulsive.lab.bench import model_cost, rules
from repulsive.lab.bench.model_cost import CostOptions, measure_model
from repulsive.lab.bench.presets import PRESETS, find_preset
from tests.lab.bench.tiny_models import TINY, tiny_twin

pytest.importorskip("transformers")

NO_DROPOUT = {
    "bert-base": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}


def weights(twin):
    return {name: value.clone() for name, value in twin.model.state_dict().items()}


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_is_measured(name):
    options = CostOptions(name, ("paper", "sphere"), rounds=2, steps=1, layers=1, batch=2, overrides=TINY[name])
    if name != "vit-b16":
        options = replace(options, length=16)
    facts = measure_model(options, progress=lambda line: None)
    assert list(facts["results"]) == ["plain", "plain again", "paper", "sphere"]
    items = 2 if name == "vit-b16" else 32
    for row in facts["results"].values():
        assert row["low"] <= row["ratio"] <= row["high"] and math.isfinite(row["last_loss"])
        assert row["per_second"] == pytest.approx(items / row["seconds"])
    assert facts["results"]["plain"]["ratio"] == facts["results"]["plain"]["high"] == 1
    assert [len(own) for own in facts["turns"].values()] == [2] * 4
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
    twins = [tiny_twin(name, rule, **NO_DROPOUT.get(name, {})) for rule in (None, None, SVGD(alpha=1.0))]
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
    twin = tiny_twin("bert-base", SVGD(), steps=2)
    measured = []
    for _ in range(3):
        twin.turn()
        measured.append({group.step for group in twin.handle.report()})
    assert measured == [{0}, {3}, {6}]


def test_rules_that_do_not_work_are_left_out_unless_named(monkeypatch):
    def broken():
        raise RuleError("no such space")

    monkeypatch.setattr(rules, "RULES", {"paper": SVGD, "logits": broken})
    options = CostOptions("gpt2", rounds=2, steps=1, layers=1, batch=1, length=8, overrides=TINY["gpt2"])
    lines = []
    facts = measure_model(options, progress=lines.append)
    assert facts["left_out"] == {"logits": "no such space"} and "logits: left out, no such space" in lines
    assert list(facts["results"]) == ["plain", "plain again", "paper"]
    with pytest.raises(RuleError, match="no such space"):
        measure_model(CostOptions("gpt2", ("logits",)))


def test_all_rules_but_those_of_a_later_version_can_be_built():
    built, reasons = rules.available_rules()
    assert {"paper", "sphere", "spos", "sgld"} <= set(built)
    assert set(built) | set(reasons) == set(rules.RULES) - {"svgd"}


def test_names_that_are_misspelt_are_suggested():
    with pytest.raises(SelectionError, match="did you mean 'bert-base'"):
        find_preset("bert-bas")
    with pytest.raises(RuleError, match="did you mean 'sphere'"):
        rules.build_rules(["paper", "spere"])


def test_memory_is_checked_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(model_cost, "free_bytes", lambda device: 2e9)
    with pytest.raises(
        model_cost.RepulsiveError, match=r"3 copies of the model need 16.6 GB, but only 2.0 GB are free"
    ):
        measure_model(CostOptions("llama", ("paper",)), progress=lambda line: None)


def test_a_compiled_twin_takes_the_same_steps(monkeypatch):
    """`repel` finds the heads of a compiled model, and both have the same weights at the end."""
    whole, graphs = torch.compile, []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda model: whole(model, backend=count))
    compiled, eager = (tiny_twin("llama", SVGD(), compiled=value) for value in (True, False))
    for twin in (compiled, eager):
        twin.turn()
    assert graphs and compiled.handle.steps == 3
    for key, value in weights(eager).items():
        torch.testing.assert_close(weights(compiled)[f"_orig_mod.{key}"], value, rtol=0, atol=1e-5)
