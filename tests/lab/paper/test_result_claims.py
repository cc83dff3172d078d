"""Claims judged by the committed results: numbers from the files, verdicts by the rule, one mark per claim."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from repulsive.cli import main
from repulsive.errors import DataError
from repulsive.lab.paper import claims_report
from repulsive.lab.paper.all_claims import judge_claims
from repulsive.lab.paper.catalogue import ARTEFACTS
from repulsive.lab.paper.result_claims import ACCURACY, ResultClaim
from repulsive.lab.paper.result_files import FILES, Gain, ResultFiles, committed
from repulsive.lab.paper.system_claims import translation

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.fixture(scope="module")
def rows():
    claims, missing = judge_claims(ResultFiles(RESULTS))
    assert missing == []
    return claims


@pytest.mark.parametrize(
    ("paper", "low", "high", "options", "verdict"),
    [
        (0.8, 0.1, 2.0, {}, "holds"),
        (-3.0, -2.0, 1.0, {"lower": True}, "fails"),
        (0.8, 0.1, 2.0, {"other_data": "smaller data"}, "same claim, smaller data: holds"),
        (0.8, -1.0, 0.9, {"other_data": "smaller data"}, "cannot say"),
        (13.0, -0.2, 1.3, {"is_limit": True}, "holds"),
        (1.0, 1.1, 1.3, {"is_limit": True}, "fails"),
    ],
)
def test_verdicts_follow_the_rule(paper, low, high, options, verdict):
    ours = Gain((low + high) / 2, low, high)
    assert ResultClaim("", paper, ours, "", "", ACCURACY, "", **options).verdict == verdict


def test_a_gain_that_is_not_significant_does_not_hold():
    claim = ResultClaim("", 0.8, Gain(0.5, 0.1, 0.9, p_value=0.25), "", "", ACCURACY, "", "other data")
    assert claim.verdict == "cannot say"


def test_one_seed_decides_nothing(tmp_path):
    """Rows as studies.translation.paper_settings writes them; the row after the longest training counts."""
    compared = {"low": 0.1, "high": 0.9, "p_value": 0.01}

    def section(epochs, difference, over, seeds):
        bleu = compared | {"difference": difference, "over": over, "seeds": seeds}
        return {"epochs": epochs, "parts": {"test": {"rows": [{"label": "published", "against": {"bleu": bleu}}]}}}

    for longest, verdict in ((("items", 1), "cannot say"), (("both", 6), "same claim, other data: holds")):
        sections = [section(20, 0.2, "both", 3), section(37, 0.5, *longest)]
        (tmp_path / "any.json").write_text(json.dumps({"sections": sections}))
        row = translation(ResultFiles(tmp_path), "any.json", "published", "Any", "160K pairs")
        assert row.ours.mean == 0.5 and row.verdict == verdict


def test_claims_without_a_file_are_left_out(tmp_path, repulsive):
    with pytest.raises(DataError, match="no results on any claim"):
        judge_claims(ResultFiles(tmp_path))
    (tmp_path / "bench").mkdir()
    path = tmp_path / "bench" / "bench-cuda-4096.json"
    path.write_text((RESULTS / "bench" / path.name).read_text())
    claims, missing = judge_claims(ResultFiles(tmp_path))
    assert [claim.claim for claim in claims] == ["a step takes little more time (percent)"]
    assert "translation/europarl.json" in missing and len(set(missing)) == len(missing) >= 9
    out = repulsive("claims", "--from", ".", "--out", "made")[1]
    assert "Rows: 1; holds: 1," in out and f"missing in .: {', '.join(missing)}" in out
    path.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        judge_claims(ResultFiles(tmp_path))


def test_welch_interval(tmp_path):
    """Two rows with six seeds and equal deviations: ten degrees of freedom, t = 2.228."""
    table = [
        {"label": label, "seeds": list(range(6)), "cells": {"dist": {"mean": mean, "deviation": 0.3}}}
        for label, mean in (("MA", 1.0), ("SVGD", 1.5))
    ]
    (tmp_path / "any.json").write_text(json.dumps({"rows": table}))
    found = ResultFiles(tmp_path).unpaired("any.json", "SVGD", "dist")
    assert found.mean == pytest.approx(0.5)
    assert found.high - found.mean == pytest.approx(2.228 * 0.3 * (2 / 6) ** 0.5, rel=1e-3)
    with pytest.raises(DataError, match="expected a row 'SPOS', got MA, SVGD"):
        ResultFiles(tmp_path).row("any.json", "SPOS")


def test_pre_trainings_with_one_seed_are_not_two_seeds(tmp_path, rows):
    assert next(row for row in rows if row.claim.startswith("GLUE")).data.endswith("2 pre-trainings with the same seed")
    (tmp_path / "pretraining").mkdir()
    for trained, seeds, text in ((3, 3, "3 pre-trainings"), (3, 2, "3 pre-trainings with 2 seeds")):
        table = {"against": {"svgd": {"mean": {"pretrainings": trained, "seeds": seeds}}}}
        (tmp_path / "pretraining" / "glue.json").write_text(json.dumps(table))
        assert ResultFiles(tmp_path).pretrainings() == text


def test_the_figure_has_a_mark_for_every_claim(rows):
    root = ET.fromstring(claims_report.draw(rows))
    classes = [element.get("class") for element in root.iter()]
    assert len(rows) >= 36 and classes.count("bar") == len(rows)
    assert classes.count("paper") == sum(row.paper is not None for row in rows) + 1  # one in the legend
    names = {(row.panel, row.name) for row in rows}
    shown = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert {name for _, name in names} <= shown
    width = float(root.get("width"))
    marks = [element for element in root.iter() if element.get("class") == "bar"]
    assert all(0 < float(mark.get("x1")) <= float(mark.get("x2")) < width <= 480 for mark in marks)  # fits a phone


def test_the_main_claims_are_few_and_without_controls(rows):
    main = claims_report.main_claims(rows)
    assert 12 <= len(main) <= 18 and not any(row.is_control for row in main)
    svg = claims_report.draw(main)
    assert "control" not in svg.split("</style>")[1] and "control" in claims_report.draw(rows).split("</style>")[1]
    short, long = (claims_report.as_markdown(main, short=short) for short in (True, False))
    assert (
        "same claim" not in short
        and long.replace("same claim, smaller data: ", "").replace("same claim, other data: ", "") == short
    )


def test_rows_at_the_papers_sizes_have_the_controls_of_the_study(rows):
    by_claim = {row.claim: row for row in rows}
    folder = RESULTS / "classification" / "second_round"
    summary = json.loads((folder / "paper_sizes.json").read_text())["age"]
    for claim, control in (
        ("against plain attention with more epochs", "ma, longer"),
        ("against itself with wrong partners", "cosine, wrong partner"),
    ):
        ours = by_claim[f"Age, cosine kernel: {claim}"].ours
        values = summary["controls"][control]["of"]["cosine-smoothing"]["accuracy"]
        assert (ours.mean, ours.low, ours.high) == tuple(100 * values[key] for key in ("difference", "low", "high"))
    assert by_claim["Age, cosine kernel: against itself with wrong partners"].paper is None
    best = json.loads((folder / "follow_up.json").read_text())["best heads, age"]["cosine-smoothing"]
    ours = by_claim["Age, cosine kernel: the best numbers of heads"].ours  # accuracy is 100 minus the error
    assert (ours.mean, ours.low, ours.high) == (-best["difference"], -best["high"], -best["low"])
    assert by_claim["Yelp, cosine kernel: more accurate"].paper == pytest.approx(71.5 - 69.3)
    assert by_claim["Age, SVGD: better calibrated (ECE)"].verdict == "cannot say"


def test_committed_files_of_the_list_exist():
    assert set(FILES) <= set(ARTEFACTS)
    absent = {name for names in FILES.values() for name in names if not (RESULTS / name).is_file()}
    assert not absent
    assert committed("table3", RESULTS) == [RESULTS / "pretraining" / "glue.md"]
    assert committed("table5", RESULTS) == committed("table3", Path("nowhere")) == []


@pytest.fixture
def repulsive(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in ("reproduce", *words)])
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


def test_the_command_prints_all_claims_and_writes_table_figure_and_json(repulsive, rows, tmp_path):
    code, out, _ = repulsive("claims", "--from", RESULTS, "--out", "made")
    assert (
        code == 0
        and all(row.claim in out for row in rows)
        and f"Rows: {sum(row.is_main for row in rows)}; holds: " in out
    )
    written = tmp_path / "made"
    assert json.loads((written / "claims.json").read_text()) == claims_report.as_data(rows)
    assert (written / "claims.svg").read_text() == claims_report.draw(rows)
    assert (written / "claims.md").read_text() == claims_report.as_markdown(rows) + "\n"
    assert rows[0].why not in out and rows[0].why in repulsive("claims", "--from", RESULTS, "--full")[1]


def test_mistakes_take_one_line_and_write_nothing(repulsive, tmp_path):
    for words, message in (
        (("claims",), "results: no such folder; pass the folder results of a checkout with --from"),
        (("claims", "--from", "."), "no results on any claim; --from expects the folder results of a checkout"),
        (("claims", "table1", "--from", RESULTS), "trains nothing; run it alone"),
        (("claims", "--from", RESULTS, "--seeds", "10"), "it takes --from, --out, --full, --markdown and --json only"),
        (("claims", "--from", RESULTS, "--set", "training.epochs=1"), "trains nothing"),
        (("table1", "--quick", "--runs", "mine"), "leave out --data and --runs"),
        (("all", "--quick", "--data", "prepared/here"), "leave out --data and --runs"),
        (("table4", "--quick", "--judgements", "a.json"), "only table5 counts judgements"),
        (("claim",), "did you mean claims"),
    ):
        code, _, err = repulsive(*words)
        assert code == 2 and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_committed_results(repulsive):
    line = next(line for line in repulsive("--from", RESULTS)[1].splitlines() if line.startswith("table3"))
    assert "no results" in line and str(RESULTS / "pretraining") in line
    out = repulsive()[1]
    assert "No folder results" in out and next(x for x in out.splitlines() if x.startswith("table3")).endswith("none")
    entries = {entry["id"]: entry for entry in json.loads(repulsive("--from", RESULTS, "--json")[1])["artefacts"]}
    assert entries["table4"]["committed"] == [str(RESULTS / "graphs" / f"{name}.md") for name in ("agenda", "webnlg")]
