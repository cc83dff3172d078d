"""`repulsive reproduce`: runs are shared with `repulsive train`, none trains twice, and everything runs at toy size."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from repulsive.cli import main
from repulsive.errors import RunError
from repulsive.lab.engine.config import as_tables
from repulsive.lab.paper import reproduce
from repulsive.lab.paper.catalogue import ARTEFACTS, find
from repulsive.lab.paper.datasets import DATASETS
from repulsive.lab.paper.method_tables import TABLES
from repulsive.lab.paper.options import Options
from repulsive.lab.paper.run_sets import count_finished
from repulsive.lab.paper.verdicts import CONFIRMED, NOT_CONFIRMED, NOT_TESTED
from repulsive.lab.runs.plan import plan

for needed in ("matplotlib", "sacremoses", "tokenizers", "sacrebleu", "transformers"):
    pytest.importorskip(needed)
# Every table and figure, but not every row of each.
FEW = ("--methods", "svgd,rma,gw,gaussian,cosine-smoothing,v", "--set", "training.epochs=1", "--seeds", "1")
DATA = ("--datasets", "yelp,snli,iwslt14,wmt14,agenda,cola")
STEPS = 20_000  # limit for all runs at toy size together, which take 18,044


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def repulsive(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # without Java: METEOR takes seconds to start

    def run(*words):
        with pytest.raises(SystemExit) as left:
            main(words)
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


def test_runs_are_in_the_folders_of_train_with_its_recipes():
    options = Options(seeds=2)
    for table in TABLES:
        for data in table.paper_datasets:
            for name, row in table.runs_on(DATASETS[data], options).items():
                specs = plan([row.recipe], row.changes, seeds=2)
                ours = row.specs(options)
                assert [spec.folder for spec in ours] == [spec.folder for spec in specs], name
                assert [as_tables(spec.recipe) for spec in ours] == [as_tables(spec.recipe) for spec in specs], name


def test_listing_shows_data_runs_and_state_of_each_artefact(repulsive):
    code, out, _ = repulsive("reproduce", "--seeds", "10")
    lines = {line.split()[0]: line for line in out.splitlines() if line.split() and line.split()[0] in ARTEFACTS}
    assert code == 0 and list(lines) == list(ARTEFACTS)
    assert "Table 1" in lines["table1"] and "0 of 120  no results    none" in lines["table1"]
    assert "age*, yelp*, snli*" in repulsive("reproduce", "--full")[1]
    entries = json.loads(repulsive("reproduce", "--seeds", "10", "--json")[1])["artefacts"]
    assert entries[0]["runs"] == 120 and entries[0]["datasets"] == {"age": False, "yelp": False, "snli": False}


TYPOS = [("tabel1", "table1"), ("calibratoin", "calibration"), ("zzzz", "choose from")]


@pytest.mark.parametrize(("word", "hint"), TYPOS)
def test_a_typo_names_the_nearest(repulsive, word, hint):
    code, _, err = repulsive("reproduce", word)
    assert code == 2 and hint in err and err.count("\n") == 1


def test_missing_data_give_one_line_and_train_nothing(repulsive, tmp_path):
    code, _, err = repulsive("reproduce", "table1", "priors", "--data", "nowhere")
    assert code == 2 and err.count("\n") == 1 and "repulsive prepare snli" in err
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_dataset_cannot_be_changed(repulsive):
    code, _, err = repulsive("reproduce", "table1", "--quick", "--set", "data.folder = other")
    assert code == 2 and "--set data.folder: every dataset has its own folder" in err and err.count("\n") == 1


def test_unknown_rows_are_an_error(repulsive):
    code, _, err = repulsive("reproduce", "table1", "--quick", "--methods", "gaussian")
    assert code == 2 and "choose --methods from ma, frobenius, svgd, spos" in err


@pytest.mark.slow
def test_everything_runs_at_toy_size_and_nothing_is_trained_twice(repulsive, tmp_path):
    words = ("reproduce", "all", "--quick", "--jobs", "1", *FEW, *DATA)
    code, out, err = repulsive(*words)
    assert code == 0, err
    written = tmp_path / "reproduced"
    for name in ARTEFACTS:
        report = json.loads((written / f"{name}.json").read_text())
        assert f"{name}: {report['title']} (" in out
        assert {claim["verdict"] for claim in report["claims"]} <= {NOT_TESTED}
        assert len(report["claims"]) > 0 or name == "sample"
        assert all((tmp_path / path).exists() for path in report["files"])
    results = {path: path.stat().st_mtime_ns for path in written.glob("runs/**/result.json")}
    assert len(results) == err.count(": done") >= 25
    code, again, err = repulsive(*words)
    assert code == 0 and "to train" not in err and again == out
    assert {path: path.stat().st_mtime_ns for path in written.glob("runs/**/result.json")} == results
    _check_reports(written)
    pages = [(written / f"{name}.md").read_text().rstrip() for name in ARTEFACTS]
    printed = repulsive(*words, "--markdown")[1]
    assert all(page in printed for page in pages)
    listed = repulsive("reproduce", "--full", "--quick", "--seeds", "1", *DATA, "--set", "training.epochs=1")[1]
    assert re.search(r"^table4 .* written +none$", listed, re.M) and "agenda  " in listed  # no star: it is prepared
    other = ("--datasets", "yelp", "--set", "model.heads=3")
    code, _, err = repulsive("reproduce", "priors", "--quick", "--jobs", "1", *FEW, *other)
    assert code == 0 and "yelp/svgd+epochs=1+heads=3/seed-0: done" in err  # a change is another run


def _check_reports(written):
    table = json.loads((written / "table1.json").read_text())
    by_row = {(row["data"], row["method"]): row for row in table["rows"]}
    assert set(by_row) == {(data, method) for data in ("yelp", "snli") for method in ("ma", "svgd")}
    run = written / "runs" / "yelp" / "svgd+epochs=1" / "seed-0" / "result.json"
    accuracy = by_row["yelp", "svgd"]["numbers"]["accuracy"]
    assert accuracy["paper"] == 71.2
    assert accuracy["mean"] == pytest.approx(100 * json.loads(run.read_text())["test"]["accuracy"])
    spos = [claim for claim in table["claims"] if claim["first"] == "spos"]
    assert spos and all("SPOS" in claim["why"] and "not run" in claim["why"] for claim in spos)
    assert any("71.7" in note for note in table["notes"])
    for figure in (
        "attention-maps-yelp",
        "redundancy-wmt14",
        "heads-yelp",
        "heads-iwslt14",
        "calibration-snli",
        "entropy-yelp",
    ):
        assert list((written / "figures" / figure).glob("*.svg")) and (written / f"{figure}.html").is_file()
    timed = json.loads((written / "modules.json").read_text())["rows"]
    assert {row["method"] for row in timed if row["numbers"].get("time", {}).get("mean")} == {"ma", "svgd"}
    judged = json.loads((written / "table5.json").read_text())
    assert {row["method"]: row["numbers"]["win (%)"]["paper"] for row in judged["rows"]}["overall"] == 65
    assert "<mark>" in (written / "sample-agenda.html").read_text()
    rte = json.loads((written / "table3.json").read_text())
    assert [row["method"] for row in rte["rows"]] == ["cola"]


def test_judges_files_are_accepted_in_any_order(repulsive, tmp_path):
    few = ("--jobs", "1", "--seeds", "1", "--set", "training.epochs=1")
    code, _, err = repulsive("reproduce", "table5", "--quick", *few)
    assert code == 0, err
    files = sorted(str(path) for path in (tmp_path / "reproduced" / "judge").glob("*.json"))
    assert len(files) == 4  # the key and three judges
    words = ("reproduce", "table5", "--full", "--out", "mine", "--judgements", *files)  # as `*.json` gives them
    code, out, err = repulsive(*words)
    assert code == 0, err
    assert "3 judges" in out and "no agenda in prepared" in out and CONFIRMED not in out.replace(NOT_CONFIRMED, "")
    code, _, err = repulsive("reproduce", "table5", "--judgements", *files[:3])
    assert code == 2 and "expected one key among 3 files, got 0" in err


def test_a_run_with_other_settings_is_an_error(tmp_path):
    options = reproduce.quick(Options(out=tmp_path, seeds=1, jobs=1, datasets=("yelp",), methods=("gaussian",)))
    (priors,) = find(["priors"])
    rows = priors.run_sets(options)
    assert count_finished(rows, options) == (0, 2)
    place = rows[0].seed_folders(options)[0]
    place.mkdir(parents=True)
    tables = as_tables(rows[0].specs(options)[0].recipe)
    (place / "recipe.json").write_text(json.dumps(tables | {"optimizer": tables["optimizer"] | {"lr": 1.0}}))
    (place / "result.json").write_text("{}")
    with pytest.raises(RunError, match=r"optimizer\.lr"):
        reproduce.reproduce([priors], options, lambda line: None)


@pytest.mark.slow
def test_all_of_it_at_toy_size(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "repulsive", "reproduce", "all", "--quick"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / "reproduced" / "runs").rglob("result.json")]
    assert 0 < sum(result["steps"] for result in results) < STEPS  # a few minutes on two cores
    counts = (tmp_path / "reproduced" / "summary.md").read_text().splitlines()[2:]
    assert len(counts) == len(ARTEFACTS) and all(line.split(" | ")[2:4] == ["0", "0"] for line in counts)
