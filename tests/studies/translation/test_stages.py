"""The translation study at toy size: all stages, and the content of its tables."""

import json

import pytest

from repulsive.lab.engine.files import write_json
from repulsive.lab.engine.result_checksums import with_new_checksum
from repulsive.lab.engine.runs import RunFolder
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")

FEW = ("--tasks", "multi30k", "europarl", "--methods", "ma", "svgd", "spos", "control-scaled")


def call(script, folder, *words):
    places = ("--data", folder / "data", "--out", folder / "runs", "--results", folder / "results")
    script.main([*map(str, places), "--scale", "tiny", "--jobs", "1", "--device", "cpu", *words])


def results(folder):
    return sorted((folder / "runs").rglob("result.json"))


@pytest.mark.slow
def test_every_stage_runs_to_its_table(script, folder, capsys):
    call(script, folder, *FEW, "--stage", "tune", "--limit", "0")
    assert not results(folder) and "4 left" in capsys.readouterr().out  # two points of the baseline on each dataset

    call(script, folder, *FEW, "--stage", "question", "tune")
    tuning = results(folder)
    assert {path.parent.name for path in tuning} == {"seed-100"}
    # two points each of MA, SVGD and SPOS; the question's rows are points of the first two
    assert len(tuning) == 2 * 3 * 2
    call(script, folder, *FEW, "--stage", "question", "tune")
    assert "0 to do" in capsys.readouterr().out and results(folder) == tuning

    call(script, folder, *FEW, "--seeds", "2", "--more-seeds", "1", "--drop-weights")
    found = folder / "results"
    tuned = json.loads((found / "tuned.json").read_text())
    for task in ("multi30k", "europarl"):
        for method in ("ma", "svgd", "spos"):
            tried = tuned[task][method]["tried"]
            best = min(tried, key=lambda point: point["dev"]["nll"])
            assert len(tried) == 2 and tuned[task][method]["chosen"] == best["changes"]
    assert tuned["multi30k"]["spos"]["chosen"][:3] == tuned["multi30k"]["svgd"]["chosen"]

    check_question(found)
    check_final(found, tuned)
    check_ablation(found)
    check_heads(found)
    check_redundancy(folder, found)
    assert all(not (path.parent / "best").exists() for path in results(folder) if "final" in path.parts)

    with pytest.raises(SystemExit, match="2"):
        call(script, folder, *FEW, "--stage", "tune", "--set", "training.epochs=3")
    assert "was trained with another training.epochs" in capsys.readouterr().err
    check_added_texts(script, folder)


def check_question(found):
    rows = json.loads((found / "question.json").read_text())
    assert [row["label"] for row in rows] == ["MA", "SVGD, as published"]
    for row in rows:
        curve = row["curves"]["100"]
        assert len(curve) == 2 and row["early"] == [curve[0][1]] and row["lowest"] == [min(nll for _, nll in curve)]
        assert -1 / 3 <= row["cosine"][0] <= 1 and row["norm"][0] > 0
    assert rows[0]["ratio"] == [0.0] and rows[1]["ratio"][0] > 0 and rows[0]["difference"] == ""
    difference = rows[1]["end"][0] - rows[0]["end"][0]
    assert float(rows[1]["difference"].split()[0]) == pytest.approx(difference, abs=1e-4)
    assert "change SVGD alone: SVGD, as published." in (found / "question.md").read_text()
    for name in ("question.svg", "question-difference.svg"):
        assert (found / name).read_text().startswith("<?xml")


def check_final(found, tuned):
    for task, parts in (("multi30k", 2), ("europarl", 2)):
        tables = json.loads((found / f"{task}.json").read_text())
        assert list(tables) == ["test", "iwslt14"] and len(tables) == parts
        for table in tables.values():
            labels = [row["label"] for row in table["rows"]]
            assert labels[:4] == ["MA", "SVGD", "SPOS", "control: gradient x eps/M"]
            published = tuned[task]["svgd"]["chosen"][-1] == "method.alpha=0.01"
            decayed = ["MA, weight decay 0.3", "SVGD, as published, weight decay 0.3"] if task == "multi30k" else []
            assert labels[4:] == ([] if published else ["SVGD, as published"]) + decayed
            assert all(row["seeds"] == [0, 1] for row in table["rows"])
            assert set(table["rows"][1]["against"]) == {"bleu", "nll", "accuracy"}
    line = "- SVGD, as published, weight decay 0.3 against MA, weight decay 0.3, bleu: "
    assert line in (found / "multi30k.md").read_text()
    text = (found / "europarl.md").read_text()
    assert "## iwslt14" in text and "| method | seeds | bleu | sacrebleu | chrf | nll | accuracy |" in text
    assert f"- SPOS: {', '.join(tuned['europarl']['spos']['chosen'])}" in text


def check_ablation(found):
    rows = json.loads((found / "ablation.json").read_text())["test"]["rows"]
    assert [row["label"] for row in rows] == ["MA", "RMA (Q)", "RMA (K)"]
    assert rows[1]["cells"]["nll"]["mean"] != rows[2]["cells"]["nll"]["mean"]


def check_heads(found):
    curves = json.loads((found / "heads.json").read_text())["nll"]
    assert list(curves) == ["MA", "SVGD, as published"]
    check_models(found)
    for curve in curves.values():
        assert [point["heads"] for point in curve["points"]] == [1, 2, 4]
        assert curve["fit"]["a"] >= 0 and curve["fit"]["b"] >= 0
    assert (found / "heads-nll.svg").exists() and "| SVGD, as published | NLL | 4 |" in (found / "heads.md").read_text()


def check_models(found):
    """Scores and attention of the models behind the curves, for each method and number of heads."""
    stored = json.loads((found / "heads.json").read_text())
    points = {label: curve["points"] for label, curve in stored["nll"].items()}
    assert [(model["method"], model["heads"]) for model in stored["models"]] == [
        (label, point["heads"]) for label in points for point in points[label]
    ]
    for model in stored["models"]:
        (point,) = (point for point in points[model["method"]] if point["heads"] == model["heads"])
        assert list(model["nll"].values()) == point["errors"]
        assert model["norm"]["0"] > 0 and -1 <= model["token_cosine"]["0"] <= 1 and model["entropy/cross"]["0"] > 0
    plain = stored["models"][0]
    row = f"| MA | 1 | {plain['bleu']['0']:.1f} | {plain['nll']['0']:.3f} |"
    assert row in (found / "heads.md").read_text()


def check_redundancy(folder, found):
    """Three methods, two seeds, all heads of three attentions; weights are deleted after the measurement."""
    changes = json.loads((found / "redundancy.json").read_text())
    assert list(changes) == ["MA", "SVGD", "SVGD, as published"] or list(changes) == ["MA", "SVGD"]
    heads = 3 * RunFolder(next((folder / "runs" / "multi30k" / "kept").glob("*/seed-0"))).recipe["model"]["heads"]
    every = [change for runs in changes.values() for change in runs.values()]
    assert all(list(runs) == ["0", "1"] for runs in changes.values()) and {len(change) for change in every} == {heads}
    assert all(-100 <= x <= 100 for change in every for x in change) and any(x for change in every for x in change)
    text = (found / "redundancy.md").read_text()
    small = sum(abs(x) < 0.5 for change in changes["MA"].values() for x in change) / (2 * heads)
    assert f"| MA | 2 | {2 * heads} |" in text and f"| {100 * small:.0f} % |" in text
    models = json.loads((found / "redundancy-models.json").read_text())
    assert list(models) == list(changes) and all(list(one["bleu"]) == ["0", "1"] for one in models.values())
    means = {label: sum(one["nll"].values()) / 2 for label, one in models.items()}
    assert f"- SVGD minus MA, NLL: {means['SVGD'] - means['MA']:+.3f} [" in text
    curves = json.loads((found / "pruning.json").read_text())
    assert list(curves) == list(changes) and "## pruning" in text and (found / "pruning.svg").is_file()
    for runs in curves.values():
        for curve in runs.values():
            assert curve["removed"][0] == 0 and curve["removed"][-1] == len(curve["order"]) == heads
            assert len(curve["metric"]) == len(curve["removed"]) and all(0 <= y <= 1 for y in curve["metric"])
    assert (found / "redundancy-1.svg").is_file() and not list((folder / "runs").glob("*/kept/*/*/best"))


def check_added_texts(script, folder):
    """Scores computed from stored translations equal those of the run itself."""
    paths = [path for path in results(folder) if "final" in path.parts]
    known = {path: json.loads(path.read_text()) for path in paths}
    for path, result in known.items():
        less = {
            name: {key: x for key, x in part.items() if key not in ("sacrebleu", "chrf")} if name != "notes" else {}
            for name, part in result.items()
            if isinstance(part, dict)
        }
        write_json(path, with_new_checksum(result | less))
    call(script, folder, *FEW, "--stage", "tables")
    for path, result in known.items():
        again = json.loads(path.read_text())
        for part in ("test", "dev", "iwslt14"):
            assert again[part] == pytest.approx(result[part])
        assert again["notes"]["sacrebleu"] == result["notes"]["sacrebleu"]


@pytest.mark.slow
def test_a_run_that_diverges_is_not_tried_again(script, folder, capsys):
    from studies.translation import rows

    words = ("--tasks", "multi30k", "--methods", "ma", "--stage", "tune", "--set", "optimizer.warmup=0")
    with pytest.MonkeyPatch.context() as patch:
        grid = [{"optimizer.lr": (1e-3, 1e30)}]
        patch.setitem(rows.GRIDS["multi30k"], "ma", grid)
        call(script, folder, *words, "--out", str(folder / "far"))
        assert "finite number" in capsys.readouterr().out
        call(script, folder, *words, "--out", str(folder / "far"))
        assert "0 to do" in capsys.readouterr().out
    (only,) = (folder / "far").rglob("result.json")
    assert RunFolder(only.parent).recipe["optimizer"]["lr"] == 1e-3
