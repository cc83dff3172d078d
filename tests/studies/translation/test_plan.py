"""The plan of the translation study: which runs each stage needs, and their settings."""

import pytest
import torch

from repulsive.lab.engine import methods
from repulsive.lab.engine.files import write_json
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")
pytest.importorskip("matplotlib")


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
