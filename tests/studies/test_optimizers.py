"""The study of repulsion under several optimizers: its table, and a few steps of training."""

import json
from pathlib import Path

import pytest

from repulsive.repulsion.step_force import IN_GRADIENT, IN_ONE_STEP, IN_STEPS
from tests.scripts import study

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "optimizers"


@pytest.fixture(scope="module")
def run():
    with study("studies.optimizers.run") as module:
        yield module


def mean(runs, optimizer, rule, name):
    values = [one[name] for one in runs if (one["optimizer"], one["rule"]) == (optimizer, rule)]
    return sum(values) / len(values)


def test_the_table_agrees_with_the_results(run):
    data = json.loads((RESULTS / "runs.json").read_text())
    command = "run: python -m studies.optimizers.run --tables"
    assert run.describe(data) == (RESULTS / "tables.md").read_text(encoding="utf-8"), command


def test_the_warning_about_muon_states_measured_numbers():
    runs = json.loads((RESULTS / "runs.json").read_text())["runs"]
    rule = "sphere, ratio 0.03, force_in='gradient'"
    measured = [mean(runs, "Muon", rule, name) for name in ("gradient", "once", "lasting")]
    assert measured == pytest.approx([IN_GRADIENT, IN_ONE_STEP, IN_STEPS], rel=0.1)


def test_later_runs_are_added_in_the_order_of_the_table(run):
    def rows(*rules):
        return [{"optimizer": "SGD", "rule": rule, "seed": seed} for rule in rules for seed in (0, 1)]

    base = {
        "command": "old",
        "torch": "1",
        "date": "then",
        "seconds": 5,
        "steps": 10,
        "runs": rows("plain", "published"),
    }
    new = {"command": "new", "torch": "2", "date": "now", "seconds": 7, "steps": 10, "runs": rows("default")}
    merged = run.merge(base, new)
    assert merged["runs"] == rows("plain", "default", "published")
    origin = {"command": "new --missing", "torch": "2", "date": "now", "seconds": 7, "rules": ["default"]}
    assert merged == base | {"runs": merged["runs"], "added": [origin]}
    assert run.merge(merged, new | {"runs": []}) == merged
    with pytest.raises(ValueError, match="expected runs of 10 steps"):
        run.merge(base, new | {"steps": 20})


def test_the_default_rule_keeps_norms_under_every_optimizer():
    runs = json.loads((RESULTS / "runs.json").read_text())["runs"]
    optimizers = {one["optimizer"] for one in runs}
    assert len(optimizers) == 7
    for optimizer in optimizers - {"SGD"}:  # plain SGD has not converged: its seeds differ more than the rules
        assert mean(runs, optimizer, "default", "growth") < 1.1 * mean(runs, optimizer, "plain", "growth")


@pytest.fixture
def small(run, monkeypatch):
    monkeypatch.setattr(run.training, "LINES", 200)
    monkeypatch.setattr(run.training, "DEV_LINES", 40)
    monkeypatch.setattr(run.training, "PROBE_EVERY", 8)
    return run.training


def test_ratios_of_the_default_rule_are_means_over_steps(small):
    sgd = next(kind for kind in small.KINDS if kind.label == "SGD")  # a step is the gradient: all ratios are equal
    result = small.train(sgd, small.DEFAULT, 0, 8)
    assert [result[name] for name in small.RATIOS] == pytest.approx([0.01] * 3, rel=1e-3)


@pytest.mark.slow
def test_a_few_steps_under_muon(run, small):
    training = small
    muon = next(kind for kind in training.KINDS if kind.label == "Muon")
    results = {arm.label: training.train(muon, arm, 0, 8) for arm in training.arms_of(muon)}
    step, gradient = (results[f"sphere, ratio 0.03, force_in='{place}'"] for place in ("step", "gradient"))
    assert [results["default"][name] for name in training.RATIOS] == pytest.approx([0.01] * 3, rel=1e-3)
    assert results["plain"]["once"] is None
    assert step["once"] == pytest.approx(0.03, rel=1e-3) and step["lasting"] == pytest.approx(0.03, rel=1e-3)
    assert gradient["gradient"] == pytest.approx(0.03, rel=1e-3) and gradient["once"] > 0.03
    assert "| Muon | plain |" in run.table(list(results.values()))
