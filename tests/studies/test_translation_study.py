"""The translation study at toy size: its plan, all stages, and the content of its tables."""

import json
import statistics
from pathlib import Path

import pytest
import torch

from repulsive import HeadMonitor
from repulsive.heads import find_heads
from repulsive.lab.engine import methods
from repulsive.lab.engine.files import write_json
from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.progress import Watcher
from repulsive.lab.engine.result_checksums import with_new_checksum
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.translation.attention import Mask
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.text.pieces import BOS
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import PAD
from tests.lab.systems.translation import digits
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")

FEW = ("--tasks", "multi30k", "europarl", "--methods", "ma", "svgd", "spos", "control-scaled")


@pytest.fixture(scope="module")
def script():
    with study("studies.translation.run") as module:
        yield module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = digits.make_data(tmp_path_factory.mktemp("study"), size=120, iwslt14="valid")
    for task in ("multi30k", "europarl"):
        (made / "data").mkdir(exist_ok=True)
        (made / "data" / task).symlink_to(made / "prepared")
    return made


def call(script, folder, *words):
    places = ("--data", folder / "data", "--out", folder / "runs", "--results", folder / "results")
    script.main([*map(str, places), "--scale", "tiny", "--jobs", "1", "--device", "cpu", *words])


def results(folder):
    return sorted((folder / "runs").rglob("result.json"))


def test_the_plan_counts_every_run_once(script, folder, capsys):
    """Multi30k: 8 points of the baseline, of which one is a row of the question, and 30 rows."""
    script.main(["--dry-run", "--data", str(folder / "data"), "--out", str(folder / "none"), "--stage", "question"])
    words = capsys.readouterr().out.splitlines()[1].split()
    assert words[:7] == ["question", "multi30k", "30", "37", "37", "37", "30"]
    script.main(["--dry-run", "--out", str(folder / "none")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(line[0], line[1]) for line in lines[:4]] == [
        ("question", "multi30k"),
        ("tune", "multi30k"),
        ("tune", "tatoeba"),
        ("tune", "europarl"),
    ]
    assert {(line[0], int(line[2])) for line in lines} >= {("ablation", 10), ("heads", 10)}
    assert not (folder / "none").exists()


def test_modules_and_numbers_of_heads_use_the_published_rule(script, folder, monkeypatch):
    """The paper's claims (Appendix C.3, Figure 3b) are about its rule, at the tuned settings of plain attention."""
    studies = []
    monkeypatch.setattr(script, "show_plan", lambda found, stages: studies.extend(found))
    script.main(["--dry-run", "--out", str(folder / "none")])
    main = studies[0]
    plain = {row.label: row for row in main.rows("final")}["MA"].changes
    for stage, count in (("ablation", 9), ("heads", 5)):
        rows = [row for row in main.rows(stage) if row.method == "svgd"]
        assert len(rows) == count and all(row.changes[: len(plain)] == plain for row in rows)
        recipes = [main.runs(row, stage)[0].recipe for row in rows]
        rule = {(r.method.alpha, r.method.stepsize, r.method.smoothing, r.method.space) for r in recipes}
        assert rule == {(0.01, 0.1, 1.0, "weights")}
        tuned = [spec for path, spec in main.required_runs(stage).items() if "seed-100" in path.name]
        assert {spec.recipe.method.rule for spec in tuned} == {"none"}  # only plain attention is tuned first
    assert [main.runs(row, "heads")[0].recipe.model.heads for row in rows] == [1, 2, 4, 8, 16]
    published = next(row for row in main.rows("final") if row.label == "SVGD, as published")
    whole = main.row_folder(main.rows("ablation")[-1], "ablation")
    assert whole == main.row_folder(published, "final")  # the same runs as in the table of all methods


@pytest.mark.slow
def test_every_rule_of_the_plan_takes_a_step(script, folder):
    """All rules of all stages at full scale, on a small model."""
    arguments = ["--dry-run", "--out", str(folder / "none")]
    with pytest.MonkeyPatch.context() as patch:
        studies = []
        patch.setattr(script, "show_plan", lambda found, stages: studies.extend(found))
        script.main(arguments)
    specs = [spec for study in studies for stage in script.STAGES for spec in study.required_runs(stage).values()]
    seen = {(spec.recipe.method, spec.recipe.model.heads): spec.recipe for spec in specs}
    assert len(seen) > 40
    for recipe in seen.values():
        model = Transformer(TransformerConfig(20, 16, recipe.model.heads, (1, 1), 16))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        handle = methods.attach(model, optimizer, recipe, methods.make_rule(recipe.method, 100, 10))
        tokens = torch.randint(4, 20, (2, 5), generator=torch.Generator().manual_seed(0))
        model(tokens, tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        assert all(weight.isfinite().all() for weight in model.parameters()) and handle.report()


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


def test_pruning_curves_are_compared_over_seeds(script):
    from studies.translation.redundancy import pruning_lines

    from repulsive.diagnostics.redundancy import Curve

    order = tuple((0, head) for head in range(4))
    curves = {
        "MA": {seed: Curve((0, 2, 4), (0.5, 0.45 + 0.01 * seed, 0.1), order) for seed in (0, 1)},
        "SVGD": {seed: Curve((0, 2, 4), (0.4, 0.37 + 0.01 * seed, 0.1), order) for seed in (0, 1)},
    }
    table, _, differences = pruning_lines(curves)
    assert table.splitlines()[2:] == ["| MA | 2 | -4.50 | -40.00 |", "| SVGD | 2 | -2.50 | -30.00 |"]
    assert differences.splitlines()[2] == ("| SVGD minus MA | 2 | +2.00 [+2.00, +2.00] | +10.00 [+10.00, +10.00] |")


def test_the_page_of_results_has_the_numbers_of_heads():
    root = Path(__file__).resolve().parents[2] / "results" / "translation"
    page = (root / "README.md").read_text()
    models = json.loads((root / "heads.json").read_text())["models"]
    for name, label in (("plain", "MA"), ("published", "SVGD, as published")):
        for metric, title, decimals in (("nll", "NLL", 2), ("bleu", "BLEU", 1)):
            values = [list(model[metric].values()) for model in models if model["method"] == label]
            cells = " | ".join(f"{sum(each) / len(each):.{decimals}f}" for each in values)
            assert f"| {name}: {title} | {cells} |" in page


def test_stored_settings_are_used_where_nothing_is_tuned(script, tmp_path):
    from studies.translation.study import stored_choices

    chosen = {"ma": ["model.dropout=0.4"], "svgd": ["model.dropout=0.4", "method.alpha=0.1"], "spos": None}
    write_json(tmp_path / "tuned.json", {"multi30k": {method: {"chosen": x} for method, x in chosen.items()}})
    for stages in (["redundancy"], ["heads", "tables"]):
        found = stored_choices(tmp_path / "tuned.json", "multi30k", stages)
        assert found == {method: tuple(x) for method, x in chosen.items() if x}
    for stages in (["tables"], ["redundancy", "tune"], ["final"]):
        assert stored_choices(tmp_path / "tuned.json", "multi30k", stages) == {}
    for stored in (chosen, {"ma": chosen["ma"]}):  # only plain attention and the published rule are trained
        write_json(tmp_path / "tuned.json", {"multi30k": {method: {"chosen": x} for method, x in stored.items()}})
        main = planned(script, "--stage", "redundancy", "--methods", "ma", "--seeds", "10", "--results", tmp_path)
        specs = main.required_runs("redundancy").values()
        assert [spec.recipe.method.rule for spec in specs] == ["none"] * 10 + ["svgd"] * 10
        assert all(spec.recipe.model.dropout == 0.4 and spec.recipe.method.alpha == 0.01 for spec in specs)


def test_a_grid_is_tuned_after_the_one_that_it_starts_from(script, tmp_path):
    tuned = planned(script, "--stage", "tune", "--methods", "spos", "--out", tmp_path).required_runs("tune")
    rules = dict.fromkeys(spec.recipe.method.rule for spec in tuned.values())
    assert list(rules) == ["none", "svgd", "spos"]


def test_no_run_is_measured_after_the_time_limit(script, tmp_path, capsys):
    from studies.translation.redundancy import measure_all

    main = planned(script, "--stage", "redundancy", "--methods", "ma", "--seeds", "2", "--out", tmp_path)
    for row in main.rows("redundancy"):
        for spec in main.runs(row, "redundancy"):
            (spec.folder / "best").mkdir(parents=True)
    measure_all(main, drop=False, jobs=1, end=0.0)
    assert capsys.readouterr().out.endswith("redundancy: 4 runs left to measure\n")


def planned(script, *words):
    """The plan of a call on Multi30k that trains nothing."""
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "show_plan", lambda studies, stages: plans.extend(studies))
        script.main(["--dry-run", "--tasks", "multi30k", *map(str, words)])
    return plans[0]


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


def test_heads_are_measured_as_diagnostics_do(script):
    from studies.translation.measuring_task import measure_heads

    from repulsive.diagnostics.similarity import of_weights

    torch.manual_seed(0)
    groups = find_heads(Transformer(TransformerConfig(20, 16, 4, (1, 2), 16)))
    found = measure_heads(groups)
    cosines = [(each.cosine.sum() - each.cosine.trace()).item() / 12 for each in of_weights(groups)]
    assert found["cosine"] == pytest.approx(statistics.fmean(cosines), abs=1e-6)
    assert found["norm"] == pytest.approx(statistics.fmean(group.read().norm(dim=1).mean().item() for group in groups))
    assert set(measure_heads(find_heads(Transformer(TransformerConfig(20, 16, 1, (1, 1), 16))))) == {"norm"}


def test_attention_is_measured_as_the_model_computes_it(script, folder):
    """Entropy from the weights that the model returns; the largest logit of the encoder from its first layer."""
    from studies.translation.measuring_task import KINDS, measure_attention, probe_of

    part = Prepared.load(folder / "prepared").parts["dev"]
    source, before = probe_of(part)
    assert 1 <= len(source) == len(before) <= 16 and (source != PAD).all() and (before != PAD).all()
    assert (before[:, 0] == BOS).all() and before.shape[1] > 1
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(120, 16, 4, (1, 1), 16)).eval()
    found = measure_attention(HeadMonitor(model, every=1, probe=(source, before), items=16).measure())
    weights = model(source, before, collect="weights")[1]  # encoder, decoder, cross: [B, M, T, S] each
    entropies = [torch.special.entr(each).sum(-1).mean().item() for each in weights]
    assert [found[f"entropy/{kind}"] for kind in KINDS] == pytest.approx(entropies, rel=1e-4)
    assert found["entropy"] == pytest.approx(statistics.fmean(entropies), rel=1e-4)
    attention, x = model.encoder.layers[0].self_attention, model.embed(source)
    q, k = (project(x).unflatten(-1, (4, 4)).transpose(1, 2) for project in (attention.q_proj, attention.k_proj))
    largest = (q @ k.mT / 2).detach().amax((0, 2, 3)).mean()  # over sentences and pairs of tokens; mean over heads
    assert found["largest_logit/encoder"] == pytest.approx(float(largest), rel=1e-4)
    assert -1 <= found["similarity"] <= 1 and found["largest_logit"] > 0


def test_tokens_are_compared_after_the_whole_encoder(script):
    from studies.translation.measuring_task import measure_attention

    torch.manual_seed(0)
    model = Transformer(TransformerConfig(120, 16, 4, (2, 1), 16)).eval()
    source = torch.randint(4, 120, (3, 5))
    states = model.encoder(model.embed(source), Mask()).detach()
    cosines = [
        torch.cosine_similarity(tokens[i], tokens[j], dim=0) for tokens in states for i in range(5) for j in range(i)
    ]
    found = measure_attention(HeadMonitor(model, every=1, probe=(source, source)).measure())
    assert found["token_cosine"] == pytest.approx(float(torch.stack(cosines).mean()), rel=1e-4)


@pytest.mark.parametrize("packed", ["true", "false"])
def test_attention_is_logged_at_every_evaluation(script, folder, tmp_path, packed):
    from studies.translation.measuring_task import make_task

    recipe = digits.recipe(folder, f"packed={packed}", "training.batch=300", "training.epochs=2", "search.beam=1")
    run = RunFolder(tmp_path)
    Loop(make_task(recipe), recipe, run, Watcher(), "cpu").run()
    lines = [line for line in run.lines() if line["kind"] == "dev"]
    assert len(lines) == 2 and all(line["entropy"] > 0 and "largest_logit/cross" in line for line in lines)
    assert all(-1 <= line["token_cosine"] <= 1 for line in lines)
    assert lines[0]["entropy"] != lines[1]["entropy"]
    assert run.curve("dev", "largest_logit") == [(line["step"], line["largest_logit"]) for line in lines]
