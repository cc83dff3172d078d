"""Controls of the study of classifiers at the paper's sizes: choice, order, records and tables."""

import json
import lzma
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.scripts import ROOT
from tests.studies.test_paper_sizes import data, make_study, record, script  # noqa: F401  fixtures
from tests.threads import one_thread  # noqa: F401  an autouse fixture

TEST = ("nll", "scaled_nll", "ece15", "scaled_ece15", "oe15", "overlap", "dist", "relative_dist", "temperature")


def finish_tuning(plan, records, losses):
    """Add records of all runs up to the final stage; `losses` is (arm, trial) -> NLL on the development set."""
    for stage in ("screen", "refine"):
        for job in list(plan.pending()):
            assert job.stage == stage
            records.add(record(job, losses.get((job.arm, job.trial), 1.0)))


def finish_final(plan, records):
    for job in list(plan.pending()):
        records.add(record(job, 1.0, test={"accuracy": 0.5}))


def test_controls_change_what_their_names_say(script):  # noqa: F811
    from studies.classification.controls import list_controls

    chosen = {"ma": 10, "frobenius": 1, "svgd": 6, "spos": 10, "cosine-smoothing": 6}
    controls = {control.name: control for control in list_controls("age", chosen, 8)}
    assert [(c.name, c.recipe, c.trial, c.of, c.changes) for c in controls.values()] == [
        ("ma@svgd", "ma", 6, ("svgd", "cosine-smoothing"), ()),
        ("cosine, no repulsion", "cosine-smoothing", 6, ("cosine-smoothing",), ("method.alpha=0.0",)),
        ("svgd, no repulsion", "svgd", 6, ("svgd",), ("method.alpha=0.0",)),
        ("ma@frobenius", "ma", 1, ("frobenius",), ()),
        ("svgd, no smoothing", "svgd", 6, ("svgd",), ("method.smoothing=0",)),
        ("ma, longer", "ma", 10, ("frobenius", "svgd", "spos", "cosine-smoothing"), ("training.epochs=12",)),
        ("cosine@ma", "cosine-smoothing", 10, ("cosine-smoothing",), ()),
        ("svgd@ma", "svgd", 10, ("svgd",), ()),
        ("cosine, attraction", "cosine-smoothing", 6, ("cosine-smoothing",), ()),
        ("cosine, wrong partner", "cosine-smoothing", 6, ("cosine-smoothing",), ()),
        ("svgd, attraction", "svgd", 6, ("svgd",), ()),
        ("svgd, wrong partner", "svgd", 6, ("svgd",), ()),
    ]
    assert {name: c.force for name, c in controls.items() if c.force} == {
        f"{arm}, {force}": force for arm in ("cosine", "svgd") for force in ("attraction", "wrong partner")
    }
    yelp = list_controls("yelp", dict.fromkeys(chosen, 5), 2)
    assert [control.name for control in yelp] == [
        "cosine, no repulsion",
        "ma, longer",
        "svgd, no repulsion",
        "svgd, no smoothing",
        "cosine, attraction",
        "cosine, wrong partner",
        "svgd, attraction",
        "svgd, wrong partner",
    ]
    assert yelp[1].changes == ("training.epochs=3",)


def test_the_last_changes_of_a_control_reach_the_recipe(script, data, tmp_path):  # noqa: F811
    from repulsive.lab.systems.registry import open_recipe

    plan, records = make_study(script, data, tmp_path, arms=["ma", "svgd", "cosine-smoothing"], seeds=1)
    finish_tuning(plan, records, {("ma", 2): 0.5})
    finish_final(plan, records)
    jobs = {job.arm: job for _, job in plan.pending_controls()}
    recipes = {name: open_recipe(f"yelp/{job.recipe}", job.changes) for name, job in jobs.items()}
    for name in ("svgd, no repulsion", "cosine, no repulsion"):
        assert recipes[name].method.alpha == 0 and recipes[name].method.smoothing == 1
        assert recipes[name].method.stepsize == 30
    no_smoothing = recipes["svgd, no smoothing"].method
    assert (no_smoothing.alpha, no_smoothing.smoothing) == ("auto", 0)
    arm = next(run for run in records.runs.values() if run["stage"] == "final" and run["arm"] == "svgd")
    ours, theirs = recipes["ma@svgd"], open_recipe("yelp/svgd", arm["changes"])
    assert ours.optimizer == theirs.optimizer and ours.model == theirs.model and ours.method.rule == "none"
    assert recipes["ma, longer"].training.epochs == 2  # one epoch, times 1.5, rounded up
    assert plan.expected(jobs["ma, longer"]) == pytest.approx(2 * plan.expected(jobs["ma@svgd"]))


def test_controls_come_last_and_alternate_by_seed(script, data, tmp_path, monkeypatch):  # noqa: F811
    plan, records = make_study(script, data, tmp_path)
    assert not list(script.queue([plan], controls_only=True)) and not plan.has_final
    finish_tuning(plan, records, {("svgd", 2): 0.5})
    assert {job.stage for _, job in script.queue([plan], controls_only=False)} == {"final"}
    finish_final(plan, records)
    monkeypatch.setattr("studies.classification.controls.ORDER", (("yelp/ma@svgd", "yelp/svgd, no smoothing"),))
    jobs = [job for _, job in script.queue([plan], controls_only=True)]
    assert {job.stage for job in jobs} == {"control"}
    assert [(job.arm, job.seed) for job in jobs[:4]] == [
        (name, seed) for seed in range(2) for name in ("ma@svgd", "svgd, no smoothing")
    ]
    assert [job.key for job in jobs] == [job.key for _, job in script.queue([plan], controls_only=False)]
    records.add(record(jobs[0], 1.0))
    again = make_study(script, data, tmp_path)[0]  # reads the same file
    assert [job.key for _, job in script.queue([again], controls_only=True)] == [job.key for job in jobs[1:]]


def test_a_control_reads_the_test_set_and_is_tabulated(script, data, tmp_path):  # noqa: F811
    from studies.classification.lean_runs import train

    plan, records = make_study(script, data, tmp_path, trials=3, seeds=2)
    finish_tuning(plan, records, {})
    names = ("ma", "svgd", "svgd, no repulsion")
    for controls_only in (False, True):
        for _, job in list(script.queue([plan], controls_only)):
            if job.arm in names:
                job.folder.mkdir(parents=True)
                train(job, sys.stdout)
                records.finish(job)
    script.store_labels(data, tmp_path, "yelp")
    with np.load(tmp_path / "answers-yelp.npz") as file:
        assert len(file.files) == 2 * 2 * len(names) + 1
    text = script.write_tables(list(records.runs.values()), {}, tmp_path, tmp_path / "results")
    assert "### Controls" in text and "| svgd, no repulsion | 2 |" in text
    assert "| svgd minus svgd, no repulsion | 2 |" in text and "| svgd, no repulsion minus ma | 2 |" in text
    summary = json.loads((tmp_path / "results" / "paper_sizes.json").read_text())["yelp"]
    control = summary["controls"]["svgd, no repulsion"]
    for name in ("accuracy", "nll"):
        difference = summary["arms"]["svgd"]["test"][name]["mean"] - control["test"][name]["mean"]
        assert control["of"]["svgd"][name]["difference"] == pytest.approx(difference, abs=1 / 64)
        assert control["of"]["svgd"][name]["over"] == "seeds and items"
    assert summary["arms"]["svgd"]["seeds"] == control["seeds"] == [0, 1]


def test_outcomes_follow_from_the_intervals(script):  # noqa: F811
    from studies.classification.sizes_tables import as_lines, summarize

    noise = (0.0, 0.01, -0.01, 0.0)

    def runs(arm, stage, accuracy, shift=1, **more):
        for seed, x in enumerate(noise):
            test = dict.fromkeys(TEST, 0.5) | {"accuracy": accuracy + shift * x}
            values = {
                "train": 9,
                "changes": ["a=1"],
                "best_epoch": 1,
                "seconds": 1.0,
                "test": test,
                "label": arm.upper(),
            }
            yield {"dataset": "yelp", "stage": stage, "arm": arm, "trial": 0, "seed": seed} | values | more

    def lines(svgd):
        settings = {"changes": ["optimizer.lr=1e-3", "model.dropout=0.3", "optimizer.weight_decay=1e-5"]}
        own = {"changes": [*settings["changes"], "method.ratio=0.3"]}
        listed = [*runs("ma", "final", 0.5, **settings), *runs("svgd", "final", svgd, 1.1, **own)]
        for name, accuracy, shift in (("low", 0.5, 1), ("same", 0.7, -1), ("high", 0.9, 1)):
            listed += runs(name, "control", accuracy, shift, control_of=["svgd"], label=name)
        return as_lines({"versions": {}} | summarize(listed, {}))

    assert lines(0.7)[-1] == (
        "- SVGD, accuracy: better than `low`; no significant difference from `same`; worse than `high`"
    )
    assert (
        lines(0.5)[-1] == "No method that has controls is significantly better than plain attention in accuracy or NLL."
    )


def test_compressed_records_are_read_before_new_ones(script, tmp_path):  # noqa: F811
    line = {"dataset": "yelp", "stage": "final", "arm": "ma", "trial": 0, "seed": 0, "seconds": 1.0}
    with lzma.open(tmp_path / "runs.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(line | {"seed": seed}) + "\n" for seed in (0, 1)))
    script.Records(tmp_path).add(line | {"seconds": 2.0})
    runs = script.Records(tmp_path).of("yelp", "final", "ma")
    assert [(run["seed"], run["seconds"]) for run in runs] == [(0, 2.0), (1, 1.0)]


@pytest.mark.slow
def test_controls_only_resumes_earlier_records(script, data, tmp_path, capsys):  # noqa: F811
    options = ["--datasets", "yelp", "--arms", "ma", "svgd", "--data", str(data), "--out", str(tmp_path), "--tiny"]
    options += [
        "--trials",
        "3",
        "--seeds",
        "2",
        "--device",
        "cpu",
        "--jobs",
        "2",
        "--seconds",
        "300",
        "--controls-only",
    ]
    with pytest.raises(SystemExit):
        script.main(options)
    assert "no final runs of ma" in capsys.readouterr().err
    script.main(options[:-1])
    path = tmp_path / "runs.jsonl"
    complete = path.read_text().splitlines()
    kept = [line for line in complete if '"stage": "control"' not in line]
    assert len(complete) - len(kept) == 2 * 5  # two seeds of five controls: the two arms have the same point
    path.write_text("\n".join(kept) + "\n")
    (tmp_path / "answers-yelp.npz").unlink()
    script.main([*options, "--seeds", "1"])
    script.main(options)
    capsys.readouterr()
    lines = path.read_text().splitlines()
    stages = [json.loads(line).get("stage") for line in lines[len(kept) :]]
    assert [stage for stage in stages if stage] == ["control"] * 10
    script.main([*options, "--tables"])
    assert "### Controls" in capsys.readouterr().out


def test_the_figure_follows_from_the_results(script):  # noqa: F811
    from studies.classification.sizes_figure import draw_figure

    results = ROOT / "results" / "classification"
    drawn = draw_figure(json.loads((results / "paper_sizes.json").read_text()))
    assert drawn == (results / "paper_sizes.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawn)
    classes = [element.get("class") for element in root.iter()]
    assert classes.count("heading") == 3
    controls = 1 + 4 + 15  # on Yelp, Age and SNLI
    assert classes.count("bar") == 3 * 4 + controls and classes.count("control") == controls + 1  # one in the legend
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Age, 27 or 28 seeds" in texts and texts.count("… minus plain, same settings") == 4
