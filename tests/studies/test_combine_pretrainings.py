"""Combine several pre-trainings of each method in one table."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from repulsive.lab.systems.glue.data import TASKS
from tests.scripts import study


@pytest.fixture(scope="module")
def script():
    with study("studies.pretraining.combine") as module:
        yield module


def results(folder: Path, systems: dict[str, dict[str, list[float]]], tokens: int = 1000) -> Path:
    """A folder as studies/pretraining/run.py leaves it: scores of repeats, of the second seed from 100 on."""
    folder.mkdir(parents=True)
    written = {
        method: {"scores": {column: dict(enumerate(values)) for column, values in scores.items()}}
        for method, scores in systems.items()
    }
    (folder / "glue.json").write_text(json.dumps({"tokens": tokens, "systems": written}))
    curve = {method: {"pretraining": {"auc": {"0": [[500, 0.5], [1000, 0.7]]}}} for method in systems}
    (folder / "curve.json").write_text(json.dumps(curve))
    return folder


def everywhere(*values: float) -> dict[str, list[float]]:
    return {task: list(values) for task in TASKS}


def test_a_pre_training_counts_once_however_often_it_was_fine_tuned(script, tmp_path, capsys):
    folders = [
        results(tmp_path / "one", {"ma": everywhere(60.0, 62.0), "svgd": everywhere(58.0)}),  # 61, 58
        results(tmp_path / "two", {"ma": everywhere(59.0), "svgd": everywhere(59.0, 60.0, 61.0)}),  # 59, 60
        results(tmp_path / "three", {"ma": everywhere(60.0), "svgd": everywhere(64.0)}),
    ]
    script.main([*map(str, folders), "--out", str(tmp_path / "out")])
    table = json.loads((tmp_path / "out" / "glue.json").read_text())
    differences = [-3.0, 1.0, 4.0]
    seen = table["against"]["svgd"]["mean"]
    half = 4.302653 * statistics.stdev(differences) / math.sqrt(3)  # Student's t, two degrees of freedom
    assert seen["each"] == pytest.approx(differences) and (seen["pretrainings"], seen["seeds"]) == (3, 1)
    assert seen["difference"] == pytest.approx(2 / 3)
    assert seen["low"] == pytest.approx(2 / 3 - half, abs=5e-3) and seen["high"] == pytest.approx(
        2 / 3 + half, abs=5e-3
    )
    assert table["systems"]["ma"]["cells"]["rte"] == pytest.approx({"mean": 60.0, "deviation": 1.0})
    assert table["systems"]["svgd"]["means"]["mean"] == pytest.approx(
        {"one/seed-0": 58, "two/seed-0": 60, "three/seed-0": 64}
    )
    assert table["against"]["svgd"]["auc"]["difference"] == 0
    text = (tmp_path / "out" / "glue.md").read_text()
    assert "| pre-trainings |" in text and "- mean: +0.67 [" in text and "(-3.00, +1.00, +4.00)" in text
    assert "variation between seeds. MA: 3 with seed 0; RMA (SVGD): 3 with seed 0.\n" in text
    assert "RMA (SVGD) minus MA:" in capsys.readouterr().out


def test_seeds_of_one_folder_are_pre_trainings_too(script, tmp_path):
    folder = results(tmp_path / "one", {"ma": everywhere(60.0), "svgd": everywhere(61.0)})
    table = json.loads((folder / "glue.json").read_text())
    for system in table["systems"].values():
        for scores in system["scores"].values():
            scores["100"], scores["101"] = 50.0, 52.0
    (folder / "glue.json").write_text(json.dumps(table))
    found = script.gather([folder])["ma"]["sst"]
    assert found == {"one/seed-0": 60.0, "one/seed-1": 51.0}
    script.main([str(folder), "--out", str(tmp_path / "out")])
    facts = json.loads((tmp_path / "out" / "glue.json").read_text())["against"]["svgd"]["sst"]
    assert facts["pretrainings"] == facts["seeds"] == 2
    assert "independent" not in (tmp_path / "out" / "glue.md").read_text()


def test_a_method_that_only_one_pre_training_has_gets_no_interval(script, tmp_path, capsys):
    folders = [
        results(tmp_path / "one", {"ma": everywhere(60.0)}),
        results(tmp_path / "two", {"ma": everywhere(59.0), "svgd": everywhere(60.0)}),
    ]
    script.main([*map(str, folders), "--out", str(tmp_path / "out")])
    assert "- mean: +1.00 (one pre-training)" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["missing", "twice", "tokens"])
def test_unsuitable_folders_are_refused_in_one_line(script, tmp_path, capsys, wrong):
    one = results(tmp_path / "one", {"ma": everywhere(60.0)})
    other = {
        "missing": tmp_path / "nowhere",
        "twice": one,
        "tokens": results(tmp_path / "two", {"ma": everywhere(60.0)}, tokens=2000),
    }[wrong]
    with pytest.raises(SystemExit) as stopped:
        script.main([str(one), str(other), "--out", str(tmp_path / "out")])
    message = {"missing": "has no glue.json", "twice": "given twice", "tokens": "equal numbers of tokens"}[wrong]
    assert stopped.value.code == 2 and message in capsys.readouterr().err and not (tmp_path / "out").exists()
