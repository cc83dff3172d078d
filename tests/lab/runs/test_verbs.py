"""sweep, evaluate, ls and demo --table on a tiny generated set: what they choose, print and write."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from repulsive.cli import main
from repulsive.errors import ConfigError, RunError
from repulsive.lab.demo.table import Demo
from repulsive.lab.engine import sweep as sweeps
from repulsive.lab.engine import sweep_queue
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.tables import rows
from repulsive.lab.runs.sweep import check_points
from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import open_recipe
from repulsive.terminal.table import three_digits

TINY = {
    "model.units": 4,
    "model.hidden": 4,
    "model.heads": 3,
    "model.mlp": 8,
    "model.embedding": 6,
    "training.epochs": 1,
    "training.batch": 16,
}
CHANGES = [f"{key}={value}" for key, value in TINY.items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    prepare("reviews", None, folder / "data", train=120, dev=40, test=60)
    return folder


@pytest.fixture
def repulsive(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*words, code=0):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        seen = capsys.readouterr()
        assert left.value.code == code, seen.err
        return seen.out if code == 0 else seen.err

    return run


def settings(*more):
    return [word for change in [*CHANGES, "data.folder=data", *more] for word in ("--set", change)]


@pytest.fixture(scope="module")
def trained(place):
    """Four recipes with two seeds each, trained in one worker process through the demo's own path."""
    from repulsive.lab.text.prepared import Prepared

    demo = Demo(Prepared.load(place / "data"), "Toy.", "reviews", place / "demo", seeds=2, changes=CHANGES)
    text, page = demo.run(1, lambda line: None)
    return demo, text, page


@pytest.mark.slow
def test_the_demo_prints_what_its_runs_measured_and_draws_every_method(trained):
    demo, text, page = trained
    found = rows([demo.out / "runs" / method for method in ("ma", "frobenius", "svgd", "spos")])
    assert [row.label for row in found] == ["MA", "MA + R", "SVGD", "SPOS"]
    shown = page.read_text()
    for row in found:
        values = [RunFolder(row.folder / f"seed-{seed}").result["test"]["accuracy"] for seed in (0, 1)]
        mean = sum(values) / 2
        assert row.seeds == (0, 1) and row.cells["accuracy"].mean == pytest.approx(mean)
        assert f"  {three_digits(mean)} ± " in text and f"{100 * mean:.1f}" in shown
    assert "|" not in text and "coverage" in shown and "evidence" in shown
    assert page == demo.out / "report.html"
    review = demo.data.parts["test"].sentences[0]
    words = {demo.data.vocabulary.words[i] for i in review.values.tolist()}
    assert sum(word in shown for word in words) > 50


@pytest.mark.slow
def test_the_demo_with_one_seed_speaks_of_no_deviation(trained):
    demo, _, page = trained
    assert "standard deviation over 2 seeds" in page.read_text()
    one = replace(demo, seeds=1)
    assert dict(one._facts(9.0))["trained in"] == "9 s, one seed of 4 methods"
    table = one._content(rows([demo.out / "runs" / method for method in ("ma", "svgd")]), 9.0).table
    assert table is not None and table.caption.startswith("Test set, one seed.")


@pytest.mark.slow
def test_the_demo_does_not_train_again(trained):
    demo, text, _ = trained
    stamps = {path: path.stat().st_mtime_ns for path in demo.out.rglob("result.json")}
    again, _ = demo.run(2, lambda line: None)
    assert again == text and {p: p.stat().st_mtime_ns for p in demo.out.rglob("result.json")} == stamps


def test_evaluate_finds_what_training_reported(trained, repulsive):
    demo = trained[0]
    out = repulsive("evaluate", demo.out / "runs" / "svgd", "--device", "cpu", "--json")
    (row,) = json.loads(out)
    for seed in (0, 1):
        result = RunFolder(demo.out / "runs" / "svgd" / f"seed-{seed}").result
        assert row["label"] == "SVGD" and result is not None
    mean = sum(RunFolder(demo.out / "runs" / "svgd" / f"seed-{s}").result["test"]["nll"] for s in (0, 1)) / 2
    assert row["cells"]["nll"]["mean"] == pytest.approx(mean, rel=1e-6)
    words = ["evaluate", demo.out / "runs" / "ma", demo.out / "runs" / "spos", "--part", "dev"]
    both = repulsive(*words, "--markdown")
    assert "SPOS against MA, accuracy" in both and "2 seeds x 40 items" in both
    head, _, spos, *_ = repulsive(*words).splitlines()
    assert head.split() == ["method", "seeds", "accuracy", "nll", "accuracy", "-", "MA"]
    assert re.search(r"[+-]\d\.\d{3} \(p [\d.]+\)$", spos)
    full = repulsive(*words, "--full")
    assert "95 % interval" in full and re.search(r"^nll +SPOS .* to [+-]", full, re.M)


def test_evaluate_refuses_what_it_cannot_do(trained, repulsive, place):
    run = trained[0].out / "runs" / "ma" / "seed-0"
    assert "no finished run" in repulsive("evaluate", place / "data", code=2)
    assert "part 'tset'" in repulsive("evaluate", run, "--part", "tset", code=2)
    prepare("reviews", None, place / "other", train=30, dev=10, test=10)
    assert "vocabulary.json differs" in repulsive("evaluate", run, "--data", place / "other", "--device", "cpu", code=2)


def test_ls_shows_recipes_and_runs(trained, repulsive):
    out = repulsive("ls", "--out", trained[0].out / "runs")
    assert "yelp/svgd" in out and "SVGD" in out
    assert out.count("done in") == 8
    assert "no runs in nowhere" in repulsive("ls", "--out", "nowhere")
    assert "runs in" not in repulsive("ls", "--recipes")


def test_ls_groups_recipes_by_dataset_and_filters_them(trained, repulsive, place):
    lines = repulsive("ls", "yelp/control", "--out", place / "none").splitlines()
    assert lines[0] == "yelp" and lines[1].split() == ["recipe", "method"]
    assert [line.split()[0] for line in lines[2:4]] == ["yelp/control-scaled", "yelp/control-smoothed"]
    groups = [line for line in repulsive("ls", "SPHERE", "--recipes").splitlines() if line and " " not in line]
    assert len(groups) > 5 and groups == sorted(groups)
    out = repulsive("ls", "spos", "--out", trained[0].out / "runs")
    assert out.count("done in") == 2 and "yelp/spos" in out and "yelp/svgd " not in out
    out = repulsive("ls", "svgd/seed-0", "--out", trained[0].out / "runs")  # in no recipe's name
    assert "svgd/seed-0" in out and "seed-1" not in out and "repulsive train NAME" not in out
    assert "stepsize" in repulsive("ls", "yelp/svgd")  # the name of a recipe shows its settings
    assert "did you mean" in repulsive("ls", "yelp/svdg", code=2)


@pytest.mark.slow
def test_a_sweep_chooses_on_dev_stage_by_stage_and_resumes(repulsive, place):
    words = [
        "sweep",
        "reviews/spos",
        *settings(),
        "--over",
        "method.ratio=0.1,3.0",
        "--then",
        "method.beta=100.0,1e6",
        "--jobs",
        2,
        "--device",
        "cpu",
        "--out",
        "swept",
    ]
    out = repulsive(*words)
    table = out.splitlines()
    assert table[0].split() == ["stage", "settings", "dev", "accuracy"] and len(table) == 7  # four trials and the best
    recipe = open_recipe(place / "swept" / "best.toml")
    assert recipe.model.units == 4 and recipe.method.rule == "spos"
    found = {}
    for path in (place / "swept" / "runs").rglob("result.json"):
        tables = json.loads((path.parent / "recipe.json").read_text())
        found[tables["method"]["ratio"], tables["method"]["beta"]] = json.loads(path.read_text())["dev"]["accuracy"]
    default = open_recipe("reviews/spos").method.beta
    first = max((0.1, 3.0), key=lambda ratio: found[ratio, default])
    second = max((100.0, 1e6), key=lambda beta: found[first, beta])
    assert (recipe.method.ratio, recipe.method.beta) == (first, second)
    stamps = {path: path.stat().st_mtime_ns for path in (place / "swept").rglob("result.json")}
    again = repulsive(*words)
    assert again.splitlines()[-1] == out.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in (place / "swept").rglob("result.json")} == stamps


@pytest.mark.slow
def test_a_point_that_diverges_is_the_worst_of_a_sweep(repulsive, place):
    words = ["sweep", "reviews/ma", *settings("optimizer.clip=0"), "--jobs", 2, "--device", "cpu", "--out", "far"]
    out = repulsive(*words, "--over", "optimizer.lr=1e35,0.001").splitlines()
    assert out[2].split() == ["1", "optimizer.lr=1e35", "diverged"] and out[-1].startswith("best: optimizer.lr=0.001,")
    assert repulsive(*words, "--over", "optimizer.lr=1e35,0.001").splitlines()[-1] == out[-1]  # and is not tried again
    (folder,) = (path.parent for path in (place / "far" / "runs").rglob("diverged.txt"))
    assert "finite number" in (folder / "diverged.txt").read_text() and not (folder / "result.json").exists()
    assert re.search(r"lr=1e35\S*\s.*diverged", repulsive("ls", "--out", "far/runs"))
    assert "every run here diverged" in repulsive("report", folder.parent, code=2)
    assert "diverged at all 1 points" in repulsive(*words, "--over", "optimizer.lr=1e35", code=2)


def test_a_sweep_says_what_is_wrong_before_it_trains(repulsive, place):
    assert "did you mean 'ratio'" in repulsive(
        "sweep", "reviews/svgd", *settings(), "--over", "method.rato=0.1", "--out", "wrong", code=2
    )
    assert "key=value,value" in repulsive("sweep", "reviews/svgd", *settings(), "--over", "method.ratio", code=2)
    assert "cannot be opened" in repulsive(
        "sweep", "reviews/svgd", *settings(), "--over", "method.ratio=0.1", "--storage", "nonsense", code=2
    )
    assert not (place / "wrong").exists()


@pytest.mark.slow
def test_a_sweep_answers_what_it_is_asked_and_not_what_was_tried_before(repulsive, place):
    def sweep(*words):
        out = repulsive("sweep", "reviews/svgd", *settings("method.alpha=5.0"), *words, "--jobs", 1, "--out", "asked")
        return out.splitlines()

    assert len(sweep("--over", "method.alpha=0.5")) == 4  # titles, a trial, an empty line and the best
    assert len(sweep("--over", "method.alpha=0.5,1.0")) == 5  # a grid may grow; Optuna's own must not
    other = sweep("--over", "method.ratio=0.2")
    assert len(other) == 4 and other[-1].startswith("best: method.ratio=0.2,")
    assert len(sweep("--over", "method.ratio=0.2", "--seeds", "2")) == 4
    assert len(list((place / "asked" / "runs").rglob("result.json"))) == 4
    sweep("--over", "method.alpha=0.5")
    assert open_recipe(place / "asked" / "best.toml").method.alpha == 0.5  # and --set said 5.0


@pytest.mark.slow
def test_a_sweep_on_other_data_is_another_one(repulsive, place):
    def sweep(count, **more):
        repulsive("prepare", "reviews", "--train", count, "--dev", 20, "--test", 20, "--out", "changing", "--force")
        words = [*settings(), "--set", "data.folder=changing", "--over", "method.ratio=0.1", "--jobs", 1]
        return repulsive("sweep", "reviews/svgd", *words, "--out", "moved", **more)

    assert "best: method.ratio=0.1" in sweep(60)
    assert "was trained on other data" in sweep(70, code=2)


def test_what_a_sweep_is_given_twice_is_told(repulsive, place):
    words = ["sweep", "reviews/svgd", *settings(), "--out", "twice", "--over"]
    assert "given twice" in repulsive(*words, "method.ratio=0.1", "--over", "method.ratio=0.2", code=2)
    assert "not both" in repulsive(*words, "method.ratio=0.1", "--set", "seed=3", code=2)
    assert not (place / "twice" / "runs").exists()


def test_lists_can_be_swept():
    from repulsive.lab.engine.sweep import parse_stage

    assert parse_stage(["method.layers=[0, 1],[0],first"]) == {"method.layers": ["[0, 1]", "[0]", "first"]}


def test_a_sweep_needs_a_folder_of_its_own(repulsive, place):
    words = ["sweep", "reviews/svgd", *settings(), "--over", "method.ratio=0.1", "--out"]
    with RunFolder(place / "taken").locked():
        assert "another process is training here" in repulsive(*words, "taken", code=2)
    (place / "file").touch()
    assert "cannot be written" in repulsive(*words, "file", code=2)


def test_trials_of_a_killed_process_are_taken_up_again(tmp_path):
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'a.db'}"
    stage = {"x": ["1", "2"]}
    study = sweep_queue.open_study("s/1", storage)
    sweep_queue.enqueue(study, stage, "here")
    (taken,) = sweep_queue.take(study, stage, 1, "here")  # and the process dies here
    sweep_queue.enqueue(study, stage, "elsewhere")
    assert len(study.get_trials(states=(optuna.trial.TrialState.WAITING,))) == 1  # for all one knows there, it lives
    with pytest.raises(RunError, match="1 trials of this sweep are not finished at here"):
        sweep_queue.check_all_ended(study)
    sweep_queue.enqueue(study, stage, "here")
    waiting = study.get_trials(states=(optuna.trial.TrialState.WAITING,))
    assert sorted(t.system_attrs["fixed_params"]["x"] for t in waiting) == ["1", "2"]
    assert taken.params["x"] in ("1", "2")


def test_a_setting_whose_metric_is_no_number_loses(tmp_path):
    pytest.importorskip("optuna")
    scores = {"x=1": "NaN", "x=2": "0.25"}

    def runs_of(changes):
        (change,) = changes or ["x=1"]
        folder = tmp_path / change
        folder.mkdir(exist_ok=True)
        (folder / "result.json").write_text(f'{{"dev": {{"accuracy": {scores[change]}}}}}')
        return [Spec(open_recipe("yelp/ma"), folder)]

    storage = sweeps.storage_in(tmp_path)
    trials = sweeps.sweep("s", [{"x": ["1", "2"]}], runs_of, lambda specs: None, "accuracy", storage)
    assert [(trial.changes, trial.value) for trial in trials] == [(("x=1",), -math.inf), (("x=2",), 0.25)]


def test_a_process_killed_before_it_noted_its_trial(tmp_path):
    """Optuna marks a trial as running before the process can write where it runs."""
    pytest.importorskip("optuna")
    study, stage = sweep_queue.open_study("s/1", f"sqlite:///{tmp_path / 'a.db'}"), {"x": ["1", "2"]}
    sweep_queue.enqueue(study, stage, "here")
    study.ask()  # and the process dies here
    sweep_queue.enqueue(study, stage, "here")
    for trial in sweep_queue.take(study, stage, 8, "here"):
        study.tell(trial, float(trial.params["x"]))
    sweep_queue.check_all_ended(study)
    assert [trial.value for trial in sweep_queue.ended_trials(study, stage)] == [1.0, 2.0]


def test_stages_are_read_or_refused():
    assert sweeps.parse_stage(["a.b=1, 2", "c=x"]) == {"a.b": ["1", "2"], "c": ["x"]}
    for word in ("a", "=1", "a=", "a=1,,2"):
        with pytest.raises(ConfigError, match="key=value"):
            sweeps.parse_stage([word])


@pytest.mark.parametrize("name", ["yelp/ma", "lm/toy-ma", "webnlg/gw", "electra/tiny-ma", "multi30k/ma", "glue/cola"])
def test_default_grids_have_settings_of_the_task(name):
    for rule in sweeps.DEFAULTS:
        recipe = open_recipe(name, [f"method.rule={rule}"])
        stages = sweeps.default_stages(recipe)
        words = [f"{key}={values[0]}" for stage in stages for key, values in stage.items()]
        assert all(stages) and open_recipe(name, [f"method.rule={rule}", *words]).method.rule == rule
    assert "optimizer.lr" in sweeps.default_stages(open_recipe(name))[0]


def test_every_point_is_checked_before_training(repulsive, place):
    words = ["sweep", "reviews/svgd", *settings(), "--out", "mistaken", "--over"]
    assert "ratio: must be float, not 'abc'" in repulsive(*words, "method.ratio=0.1,abc", code=2)
    assert "reviews/svgd: method: SVGD(ratio=-1.0)" in repulsive(*words, "method.ratio=0.1,-1", code=2)
    second = ["method.ratio=0.1", "--then", "optimizer.lr=0.1,0"]
    assert "lr=0.0 must be positive" in repulsive(*words, *second, code=2)
    for settings_of_rule, message in (
        (["method.alpha=0.1,-1"], "alpha=-1.0): must be a number >= 0"),
        (["method.smoothing=0", "--then", "method.kernel=rbf,hinge"], "this kernel compares directions"),
    ):
        assert message in repulsive(*words, *settings_of_rule, code=2)
    assert not (place / "mistaken").exists()
    check_points(
        "reviews/svgd", [], [{"method.smoothing": ["0"], "method.space": ["sphere"]}, {"method.kernel": ["hinge"]}]
    )


def test_words_of_the_page_are_those_of_the_test_set(trained):
    demo = trained[0]
    examples = demo._examples(rows([demo.out / "runs" / "ma"]))
    for example in examples:
        (reading,) = example.readings
        assert reading.attention.shape == (3, len(example.tokens))
        assert torch.allclose(reading.attention.sum(-1), torch.ones(3))
        assert example.evidence and all(p < len(example.tokens) for places in example.evidence.values() for p in places)
