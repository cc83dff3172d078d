"""The study of the control without a kernel: measurements with known answers, and a small language model."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from repulsive.lab.engine import tables
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.recipe_tables import differences
from repulsive.lab.engine.task import Evaluation
from repulsive.lab.systems.datasets import prepare
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

SMALL = ("model.width=16", "model.layers=1", "data.steps=3", "training.epochs=1", "training.batch=4")


@pytest.fixture(scope="module")
def script():
    with study("studies.kernel_free.run") as module:
        yield module


@pytest.fixture(scope="module")
def measure(script):
    with study("studies.kernel_free.measure") as module:
        yield module


def test_arms_of_a_system_differ_in_their_method_only(script):
    with study("studies.kernel_free.study") as planning:
        for system in script.SYSTEMS.values():
            recipes = [
                as_tables(planning.spec_of(system, arm, 0, Path("prepared"), Path("runs")).recipe)
                for arm in planning.ARMS
            ]
            for recipe in recipes[1:]:
                changed = differences(recipes[0], recipe)
                assert "method.rule" in changed
                assert all(key.startswith("method.") or key == "label" for key in changed)
            published, kernel_free, nudged = recipes[1:]
            assert differences(published, nudged) == []
            assert set(differences(published, kernel_free)) == {"method.rule", "label"}


class TestMeasurements:
    def test_equal_distances_leave_the_kernel_nothing_to_do(self, measure):
        heads = 3.0 * torch.eye(5)
        assert torch.allclose(measure.kernel_values(heads), torch.ones(10, dtype=torch.float64))
        assert measure.force_difference(heads) < 1e-12

    def test_kernel_of_unequal_distances(self, measure):
        heads = torch.tensor([[0.0], [1.0], [3.0]])  # distances 1, 2, 3; the median is 2
        r = torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64) / 4
        assert torch.allclose(measure.kernel_values(heads), 3 * 3.0**-r)
        assert measure.force_difference(heads) > 0.1

    def test_norm_cosine_and_distance(self, measure):
        groups = [torch.tensor([[3.0, 4.0], [-3.0, -4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])]
        found = measure.describe_heads(groups)
        assert (found["groups"], found["heads"], found["numbers"]) == (2, 2, 2)
        assert found["norm"] == pytest.approx(3) and found["cosine"] == pytest.approx(-0.5)
        assert measure.relative_distance([2 * heads for heads in groups], groups) == pytest.approx(1)


@pytest.mark.slow
def test_trains_measures_and_resumes(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(script.SYSTEMS, "lm", dataclasses.replace(script.SYSTEMS["lm"], seeds=2))
    prepare("lm-toy", None, tmp_path / "prepared" / "lm-toy")
    places = ("--data", tmp_path / "prepared", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    words = ["--systems", "lm", *map(str, places), *(word for change in SMALL for word in ("--set", change))]
    script.main(words)
    stored = json.loads((tmp_path / "out" / "runs.json").read_text())["systems"]["lm"]
    runs = {(run["arm"], run["seed"]): run for run in stored["runs"]}
    assert len(runs) == 4 * 2
    for seed in range(2):
        distances = {arm: run["distance"] for (arm, own), run in runs.items() if own == seed}
        assert distances["published"] == 0 < distances["kernel-free"] < distances["plain"] / 2
        assert 0 < distances["published, nudged"] < 0.01
    page = (tmp_path / "out" / "tables.md").read_text()
    assert "| language model, width 64 | 2 |" in page and "Translation at the paper's settings" in page
    capsys.readouterr()
    script.main(words)
    assert "6 runs, 0 to do" in capsys.readouterr().out
    assert (tmp_path / "out" / "tables.md").read_text() == page


def test_row_of_the_papers_settings(script, tmp_path):
    """The row has the means and differences that the translation study stored."""
    draw = torch.Generator().manual_seed(0)
    shift = {"plain": 0.0, "published": 0.5, "kernel-free": 0.45}
    runs = {
        arm: {seed: evaluation(by + torch.rand(20, generator=draw)) for seed in range(2)} for arm, by in shift.items()
    }
    rows = tables.table([(arm, Path(arm), own) for arm, own in runs.items()])
    pair = tables.table([(arm, Path(arm), runs[arm]) for arm in ("kernel-free", "published")])[1]
    comparison = pair.against["nll"]
    other = {
        "rows": "published minus kernel-free",
        "metric": "nll",
        "comparison": tables.as_plain(pair)["against"]["nll"],
    }
    part = {"rows": [tables.as_plain(row) for row in rows], "other comparisons": [other]}
    path = tmp_path / "paper_settings.json"
    section = {"updates": 46_028, "device": "a GPU", "parts": {"test": part}}
    path.write_text(json.dumps({"sections": [section]}))
    page = script.write_page({"command": "c", "torch": "2", "date": "d"}, {}, path)
    row = next(line for line in page.splitlines() if line.startswith("| translation, the paper's settings"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[1:5] == ["2", *(f"{row.cells['nll'].mean:.4f}" for row in rows)]
    assert cells[5].startswith(f"{comparison.difference:+.4f} [{comparison.low:+.4f}, ")
    assert cells[6] == "" and cells[7].startswith(f"{rows[1].against['nll'].difference:+.4f} [")
    assert "after 46,028 updates" in page


def evaluation(nll):
    return Evaluation({"nll": float(nll.mean())}, {"nll": nll, "correct": (nll < 0.5).double()})


def test_distances_are_paired_by_seed(script):
    with study("studies.kernel_free.tables") as page:
        runs = [
            {"arm": arm, "seed": seed, "distance": distance, "force": 0.5, "kernel": [0.5, 1.5]}
            for arm, distances in {
                "published": [0.0, 0.0],
                "kernel-free": [0.2, 0.4],
                "published, nudged": [0.1, 0.3],
                "plain": [0.4, 0.8],
            }.items()
            for seed, distance in enumerate(distances)
        ]
        cells = page.distance_table({"lm": {"title": "model", "runs": runs}}).splitlines()[-1].split(" | ")
    assert cells[1:4] == ["30.00 ± 127.06", "20.00 ± 127.06", "+10.00 ± 0.00"]  # t is 12.706 with one degree of freedom
    assert cells[5:] == ["50.00 ± 0.00", "50.00 ± 0.00", "50.00 ± 0.00", "0.50 to 1.50 |"]
