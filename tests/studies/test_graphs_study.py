"""The graph-to-text study at toy size: its plan, all stages, the content of its tables, and METEOR added later."""

import json
import statistics

import pytest

from repulsive.lab.engine import methods
from repulsive.lab.engine.files import read_json, write_json
from repulsive.lab.engine.result_checksums import with_new_checksum
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.graphs import meteor
from repulsive.lab.systems.graphs import metrics as generation
from repulsive.lab.systems.graphs.model import GraphWriter, GraphWriterConfig
from tests.lab.systems.graphs import toy_graphs
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

FEW = ("--tasks", "webnlg", "--methods", "gw", "rma", "control-scaled")


@pytest.fixture(scope="module")
def script():
    with study("studies.graphs.run") as module:
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = toy_graphs.make_data(tmp_path_factory.mktemp("study"))
    (made / "data").mkdir()
    (made / "data" / "webnlg").symlink_to(made / "prepared")
    return made


@pytest.fixture
def no_java(monkeypatch):
    """A machine without Java: runs finish without METEOR."""
    monkeypatch.setattr(meteor, "official_program", lambda: None)
    monkeypatch.setattr(meteor, "_nltk", lambda *_: None)


def call(script, folder, *words):
    places = ("--data", folder / "data", "--out", folder / "runs", "--results", folder / "results")
    script.main([*map(str, places), "--scale", "tiny", "--jobs", "1", "--device", "cpu", *words])


def results(folder):
    return sorted((folder / "runs").rglob("result.json"))


def test_the_plan_counts_every_run_once(script, folder, capsys):
    script.main(["--dry-run", "--out", str(folder / "none"), "--seeds", "4"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    # 6 points of the baseline, 3 penalties, 6 of the rule; then five methods, and the published rule if not chosen
    assert lines == [
        ["tune", "webnlg", "15", "15", "15", "20"],
        ["final", "webnlg", "6", "24", "24", "20"],
        ["final", "agenda", "5", "20", "20", "20"],
    ]
    assert not (folder / "none").exists()


@pytest.mark.slow
def test_every_rule_of_the_plan_can_be_attached(script, folder):
    studies = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "show_plan", lambda found, stages: studies.extend(found))
        script.main(["--dry-run", "--out", str(folder / "none")])
    specs = [spec for study in studies for stage in script.STAGES for spec in study.required_runs(stage).values()]
    seen = {spec.recipe.method: spec.recipe for spec in specs}
    assert len(seen) == 1 + 3 + 6 + 2
    for recipe in seen.values():
        model = GraphWriter(GraphWriterConfig(20, 9, 5, recipe.model.config(20, 9, 5).graph, titles=False))
        optimizer = methods.make_optimizer(recipe.optimizer, model)
        groups = methods.attach(model, optimizer, recipe, methods.make_rule(recipe.method, 100, 10)).report()
        assert recipe.method.rule == "none" or len(groups) == 18  # q, k, v of six layers


def test_tables_of_one_dataset_keep_those_of_others(script, tmp_path):
    for task in ("webnlg", "agenda"):
        script.main(["--stage", "tables", "--tasks", task, "--out", str(tmp_path / "runs"), "--results", str(tmp_path)])
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert {"webnlg", "agenda"} < set(tuned) and tuned["webnlg"]["gw"]["points"] == 6


@pytest.mark.slow
def test_every_stage_runs_to_its_table(script, folder, capsys, no_java):
    call(script, folder, *FEW, "--stage", "tune", "--limit", "0")
    assert not results(folder) and "2 left" in capsys.readouterr().out  # two points of the baseline

    call(script, folder, *FEW, "--stage", "tune")
    tuning = results(folder)
    assert {path.parent.name for path in tuning} == {"seed-100"} and len(tuning) == 2 * 2
    call(script, folder, *FEW, "--stage", "tune")
    assert "0 to do" in capsys.readouterr().out and results(folder) == tuning

    call(script, folder, *FEW, "--seeds", "2", "--drop-weights")
    tuned = json.loads((folder / "results" / "tuned.json").read_text())["webnlg"]
    for method in ("gw", "rma"):
        points = tuned[method]["tried"]
        best = min(points, key=lambda point: point["dev"]["nll"])
        assert len(points) == 2 and tuned[method]["chosen"] == best["changes"]
    assert tuned["rma"]["chosen"][:2] == tuned["gw"]["chosen"] == tuned["control-scaled"]["chosen"]
    assert all(not (path.parent / "best").exists() for path in results(folder) if "final" in path.parts)
    check_table(folder, tuned)

    with pytest.raises(SystemExit, match="2"):
        call(script, folder, *FEW, "--stage", "tune", "--set", "training.epochs=3")
    assert "was trained with another training.epochs" in capsys.readouterr().err


def check_table(folder, tuned):
    table = json.loads((folder / "results" / "webnlg.json").read_text())
    published = [] if tuned["rma"]["chosen"][-1] == "method.alpha=0.01" else ["GW + RMA, as published"]
    assert [row["label"] for row in table["rows"]] == ["GW", "GW + RMA", "control: gradient x eps/M", *published]
    text = (folder / "results" / "webnlg.md").read_text()
    for row in table["rows"]:
        runs = [RunFolder(folder / "runs" / "webnlg" / "final" / row["folder"] / f"seed-{seed}") for seed in (0, 1)]
        for name, part, metric in (("bleu", "test", "bleu"), ("ROUGE-L", "test", "ROUGE-L"), ("dev nll", "dev", "nll")):
            values = [run.metrics(part)[metric] for run in runs]
            mean, half = statistics.fmean(values), 12.706 * statistics.stdev(values) / 2**0.5
            assert row["cells"][name]["mean"] == pytest.approx(mean)
            assert row["intervals"][name] == pytest.approx([mean - half, mean + half], rel=1e-3)
            assert f" {mean:.3f} [" in text
    assert set(table["rows"][1]["against"]) == {"bleu", "nll", "accuracy"}
    assert table["device"] in text and f"{table['seconds_a_run']:.0f} s a run (median)" in text
    assert "| method | seeds | BLEU-4 | BLEU-1 | BLEU-2 | BLEU-3 | ROUGE-1 |" in text and "METEOR" not in text
    assert f"- GW + RMA: {', '.join(tuned['rma']['chosen'])}" in text


@pytest.mark.slow
def test_scores_are_added_from_the_texts_that_runs_kept(script, folder, monkeypatch, no_java):
    """Missing scores, METEOR among them, are added; stored ones do not change."""
    from studies.graphs import tables as graphs_tables

    paths = [path for path in results(folder) if "final" in path.parts]
    assert paths, "the study has to have run"
    known = {path: json.loads(path.read_text()) for path in paths}
    for path, result in known.items():
        less = {name: x for name, x in result["test"].items() if not name.startswith("ROUGE")}
        write_json(path, with_new_checksum(result | {"test": less}))

    def judged(texts, references):
        share = statistics.fmean(text in some for text, some in zip(texts, references, strict=True))
        return meteor.Meteor(100 * share, meteor.OFFICIAL)

    monkeypatch.setattr(generation, "meteor", judged)
    monkeypatch.setattr(graphs_tables, "official_program", lambda: ["java"])
    call(script, folder, *FEW, "--seeds", "2", "--stage", "tables")
    for path, result in known.items():
        again = json.loads(path.read_text())
        assert again["test"].pop(meteor.OFFICIAL) >= 0
        assert again["test"] == pytest.approx(result["test"]) and again["dev"] == result["dev"]
    assert "| METEOR 1.5 |" in (folder / "results" / "webnlg.md").read_text()

    write_json(paths[0], known[paths[0]] | {"test": known[paths[0]]["test"] | {"BLEU-2": 1.0}})
    with pytest.raises(SystemExit, match="2"):
        call(script, folder, *FEW, "--seeds", "2", "--stage", "tables")
    write_json(paths[0], known[paths[0]])


def test_equal_training_and_development_sets_are_refused(script, folder, tmp_path, capsys):
    (tmp_path / "data" / "webnlg").mkdir(parents=True)
    manifest = read_json(folder / "prepared" / "manifest.json")
    manifest["files"]["dev.safetensors"] = manifest["files"]["train.safetensors"]
    write_json(tmp_path / "data" / "webnlg" / "manifest.json", manifest)
    with pytest.raises(SystemExit, match="2"):
        call(script, tmp_path, *FEW, "--stage", "tune")
    assert "train and dev are the same graphs" in capsys.readouterr().err
