"""The study of repulsion under several optimizers: its table in the docs, and a few steps of training."""

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


def test_pages_agree_with_the_results(run):
    data = json.loads((RESULTS / "runs.json").read_text())
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    command = "run: python -m studies.optimizers.run --tables"
    assert run.replaced(page, run.table(data["runs"])) == page, command
    assert run.describe(data) == (RESULTS / "tables.md").read_text(encoding="utf-8"), command


def test_the_warning_about_muon_states_measured_numbers():
    runs = json.loads((RESULTS / "runs.json").read_text())["runs"]
    measured = [mean(runs, "Muon", "the same, force_in='gradient'", name) for name in ("gradient", "once", "lasting")]
    assert measured == pytest.approx([IN_GRADIENT, IN_ONE_STEP, IN_STEPS], rel=0.1)


def test_the_table_of_other_pages_is_replaced_and_nothing_else(run):
    page = f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n"
    assert run.replaced(page, "new") == f"before\n{run.BEGIN}\n\nnew\n\n{run.END}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        run.replaced("no comments", "x")


@pytest.mark.slow
def test_a_few_steps_under_muon(run, monkeypatch):
    training = run.training
    monkeypatch.setattr(training, "LINES", 200)
    monkeypatch.setattr(training, "DEV_LINES", 40)
    monkeypatch.setattr(training, "PROBE_EVERY", 4)
    muon = next(kind for kind in training.KINDS if kind.label == "Muon")
    results = {arm.label: training.train(muon, arm, 0, 8) for arm in training.arms_of(muon)}
    step, gradient = (results[f"{name}"] for name in ("recommended (force_in='step')", "the same, force_in='gradient'"))
    assert results["plain"]["once"] is None
    assert step["once"] == pytest.approx(0.03, rel=1e-3) and step["lasting"] == pytest.approx(0.03, rel=1e-3)
    assert gradient["gradient"] == pytest.approx(0.03, rel=1e-3) and gradient["once"] > 0.03
    assert "| Muon | plain |" in run.table(list(results.values()))
