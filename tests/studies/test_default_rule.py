"""The study of the default rule: its comparison, its verdicts, and the committed table."""

import json
from pathlib import Path

import pytest
from studies.default_rule import tables

from repulsive.errors import RunError

FOLDER = Path("results/default_rule")


def test_the_committed_table_agrees_with_the_results():
    assert (FOLDER / tables.TABLE).read_text() == tables.page(tables.systems(FOLDER))


def test_losses_are_compared_seed_by_seed():
    mean, interval = tables.relative({0: 1.1, 1: 2.2, 5: 9.0}, {0: 1.0, 1: 2.0})
    assert mean == pytest.approx(0.1)
    assert interval == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize(
    ("interval", "growth", "expected"),
    [
        ((-0.01, 0.001), 0.0, "safe"),
        ((-0.01, 0.003), None, "cannot say"),
        ((0.0021, 0.003), 0.0, "not safe"),
        ((-0.01, 0.001), 0.2, "not safe"),
        (None, None, "cannot say"),
    ],
)
def test_verdicts(interval, growth, expected):
    assert tables.verdict(interval, growth) == expected


def test_runs_are_collected_by_method_and_seed(tmp_path):
    for method, seed, loss in (("ma", 0, 1.0), ("ma", 1, 2.0), ("logits+lr=1", 0, 3.0)):
        folder = tmp_path / method / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"test": {"nll": loss}, "seconds": 4.04}))
    assert tables.collected(tmp_path) == {
        "logits": {"loss": {"0": 3.0}, "seconds": [4.0]},
        "ma": {"loss": {"0": 1.0, "1": 2.0}, "seconds": [4.0, 4.0]},
    }


def test_a_folder_without_results_is_an_error(tmp_path):
    with pytest.raises(RunError, match=r"no METHOD/seed-\*/result.json"):
        tables.collected(tmp_path)
