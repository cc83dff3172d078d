"""Table 1 from runs with known predictions: numbers, intervals and verdicts, on the paper's data and on others."""

import json

import pytest
import torch

from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.run_reader import RECIPE
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper import reproduce
from repulsive.lab.paper.catalogue import find
from repulsive.lab.paper.datasets import DATASETS
from repulsive.lab.paper.options import Options
from repulsive.lab.paper.report_files import as_markdown
from repulsive.lab.paper.verdicts import CONFIRMED, FAILS, HOLDS, NOT_CONFIRMED

SEEDS, ITEMS = 8, 60
RIGHT = {"ma": 30, "frobenius": 30, "svgd": 45, "spos": 30}  # of 60
DIST = {"ma": 0.1, "frobenius": 0.3, "svgd": 0.5, "spos": 0.2}


def prepared(root, sizes):
    folder = DATASETS["yelp"].folder(root)
    folder.mkdir(parents=True)
    manifest = {"format": 1, "files": {}, "rows": dict(zip(("train", "dev", "test"), sizes, strict=True))}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def trained(table, options):
    """Write finished runs: each method has `RIGHT` correct answers, plus one for odd seeds."""
    for row in table.run_sets(options):
        for seed, spec in enumerate(row.specs(options)):
            spec.folder.mkdir(parents=True)
            (spec.folder / RECIPE).write_text(json.dumps(as_tables(spec.recipe)))
            order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(seed))
            right = torch.zeros(ITEMS)
            right[order[: RIGHT[row.method] + seed % 2]] = 1
            items = {"correct": right.bool(), "nll": (1 - right).double(), "labels": torch.zeros(ITEMS).long()}
            metrics = {"accuracy": float(right.mean()), "dist": DIST[row.method] + 0.001 * seed}
            RunFolder(spec.folder).finish({"test": metrics, "seconds": 1.0}, {"test": items})


@pytest.fixture
def reported(tmp_path):
    def make(sizes=(500_000, 2_000, 2_000)):
        prepared(tmp_path / "data", sizes)
        options = Options(tmp_path / "data", tmp_path / "out", tmp_path / "runs", seeds=SEEDS, datasets=("yelp",))
        (table,) = find(["table1"])
        trained(table, options)
        (report,), failed = reproduce.reproduce([table], options, lambda line: pytest.fail(line))  # nothing is trained
        assert failed == []
        return report

    return make


def test_claims_are_confirmed_by_their_intervals(reported):
    report = reported()
    found = {(f.claim.metric, f.claim.first, f.claim.second): f.verdict for f in report.findings}
    assert found["accuracy", "svgd", "ma"] == found["accuracy", "svgd", "frobenius"] == CONFIRMED
    assert found["accuracy", "spos", "ma"] == NOT_CONFIRMED  # the same answers
    assert found["accuracy", "spos", "svgd"] == NOT_CONFIRMED  # worse
    assert found["dist", "svgd", "ma"] == found["dist", "spos", "ma"] == CONFIRMED
    assert found["dist", "spos", "frobenius"] == NOT_CONFIRMED
    assert len(found) == len(report.findings) == 9


def test_numbers_are_means_in_percent_beside_the_papers(reported):
    report = reported()
    row = next(row for row in report.rows if row.method == "svgd")
    number = row.numbers["accuracy"]
    assert (number.paper, row.seeds) == (71.2, SEEDS)
    assert number.mean == pytest.approx(100 * (45.5 / 60))
    low, high = number.interval
    assert low < number.mean < high and high - low == pytest.approx(2 * 2.365 * (100 * 0.5345 / 60) / 8**0.5, rel=1e-3)
    text = as_markdown(report)
    assert f"| SVGD | 8 | 71.20 | {number.mean:.2f} [{low:.2f}, {high:.2f}] |" in text
    assert "sizes as in the paper" in text and "71.7 is Table 1's SPOS" in text


def test_claims_on_smaller_data_hold_fail_or_stay_open(reported):
    report = reported((106_768, 2_000, 2_000))
    found = {(f.claim.metric, f.claim.first, f.claim.second): f.outcome for f in report.findings}
    assert found["accuracy", "svgd", "ma"] == found["dist", "svgd", "ma"] == HOLDS
    assert found["accuracy", "spos", "ma"] == FAILS  # the same answers; the paper's gain is 2.4 points
    assert found["accuracy", "spos", "svgd"] == FAILS  # worse
    assert {finding.verdict.removesuffix(finding.outcome) for finding in report.findings} <= {
        "same claim, smaller data: ",
        "",
    }
    assert "| +1.9 | " in as_markdown(report)
    assert "106,768 items of train instead of 500,000" in report.findings[0].reason
    assert report.findings[0].observed == "higher"
