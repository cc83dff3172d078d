"""The follow-up of the study at the paper's sizes: queue, entropy on foreign texts, attention maps and tables."""

import argparse
import json
import math
import sys

import numpy as np
import pytest
import torch

from repulsive.lab.systems.datasets import prepare
from repulsive.lab.systems.registry import open_recipe
from tests.scripts import study
from tests.studies.test_paper_sizes import record
from tests.threads import one_thread  # noqa: F401  an autouse fixture

ARMS = ["ma", "frobenius", "svgd", "spos", "cosine-smoothing"]
TEST = (
    "accuracy",
    "nll",
    "scaled_nll",
    "ece15",
    "scaled_ece15",
    "oe15",
    "overlap",
    "dist",
    "relative_dist",
    "temperature",
)


@pytest.fixture(scope="module")
def script():
    with study("studies.classification.follow_up") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare("reviews", None, folder / "yelp", train=60, dev=20, test=60, jobs=1)
    prepare("reviews", None, folder / "age", train=50, dev=20, test=25, jobs=1)
    return folder


def finished(script, data, out, **changes):
    """Make studies of both datasets whose records end with the final stage; trial 2 of every arm is chosen."""
    settings = {"data": data, "arms": ARMS, "tiny": True, "set": [], "trials": 4, "seeds": 2, "device": "cpu"}
    records = script.Records(out)
    arguments = argparse.Namespace(**settings | changes)
    studies = {name: script.Study(name, arguments, records, out / "work") for name in script.DATASETS}
    for plan in studies.values():
        for _ in range(3):
            for job in list(plan.pending()):
                test = {"test": dict.fromkeys(TEST, 0.5), "best_epoch": 1} if job.stage == "final" else {}
                loss = 1.0 - 0.1 * (job.trial == 2)
                records.add(record(job, loss, dev={"nll": loss, "accuracy": 0.5}, **test))
        assert set(plan.all_chosen().values()) == {2}
    return studies, records


def train(job, records):
    from studies.classification.lean_runs import train

    job.folder.mkdir(parents=True)
    train(job, sys.stdout)
    return records.finish(job)


def test_parts_follow_each_other_and_seeds_alternate(script, data, tmp_path):
    studies, records = finished(script, data, tmp_path)
    jobs = [job for _, job in script.queue(studies, list(script.PARTS))]
    stages = [job.stage for job in jobs]
    assert list(dict.fromkeys(stages)) == ["heads", "control", "entropy", "wide screen", "strength"]
    assert len({job.key for job in jobs}) == len(jobs)
    heads = [job for job in jobs if job.stage == "heads"]
    assert len(heads) == 2 * 2 * (1 + 3 * 4) and [job.seed for job in heads] == [0] * 26 + [1] * 26
    for job in heads:
        recipe = open_recipe(f"{job.dataset}/{job.recipe}", job.changes)
        heads_text = "1 head" if recipe.model.heads == 1 else f"{recipe.model.heads} heads"
        assert job.arm == f"{job.recipe}, {heads_text}"
        assert recipe.model.heads > 1 or job.recipe == "ma"
        if job.recipe != "ma":
            assert recipe.method.stepsize == recipe.model.heads
    controls = [job for job in jobs if job.stage == "control"]
    forces = [job for job in controls if job.force]
    assert controls[: len(forces)] == forces and len(forces) == 2 * (2 + 4)
    assert [job.seed for job in forces] == sorted(job.seed for job in forces)
    # All arms chose the same point, so that "ma@frobenius" does not exist.
    assert {(job.dataset, job.arm) for job in controls if not job.force} == {
        ("yelp", "svgd, no repulsion"),
        ("yelp", "ma, longer"),
        ("age", "svgd, no smoothing"),
        ("age", "ma, longer"),
    }
    entropy = [job for job in jobs if job.stage == "entropy"]
    assert [job.seed for job in entropy] == [50] * 5 + [51] * 5
    assert [job.arm for job in entropy if job.shown] == ["ma", "frobenius", "svgd", "cosine-smoothing"]
    assert {job.dataset for job in entropy} == {"yelp"} and {job.foreign.name for job in entropy} == {"age"}
    assert "heads: 52 runs" in script.describe_plan(studies, ["heads"], 2)
    records.add(record(jobs[0], 1.0))
    again = [job.key for _, job in script.queue(studies, list(script.PARTS))]
    assert again == [job.key for job in jobs[1:]]


def test_a_wider_point_gets_final_runs_only_if_it_is_better(script, data, tmp_path):
    from studies.classification.search_space import FIRST, WIDE
    from studies.tuning.space import as_settings

    studies, records = finished(script, data, tmp_path)
    losses = {"ma": 0.95, "svgd": 0.85}  # of trial 5; the first choice has 0.9
    for stage in ("wide screen", "wide refine"):
        jobs = [job for _, job in script.queue(studies, ["wide"])]
        assert {job.stage for job in jobs} == {stage} and {job.dataset for job in jobs} == {"age"}
        counts = {arm: sum(job.arm == arm for job in jobs) for arm in ARMS}
        assert set(counts.values()) == {8 if stage == "wide screen" else 9}
        for job in jobs:
            assert not job.reads_test
            records.add(record(job, losses.get(job.arm, 0.9) if job.trial == 5 else 1.0 + 0.01 * job.trial))
    final = [job for _, job in script.queue(studies, ["wide"])]
    assert [(job.stage, job.arm, job.trial, job.seed) for job in final] == [
        ("wide final", "svgd", 5, seed) for seed in (0, 1)
    ]
    assert all(job.reads_test for job in final)
    for arm in ARMS:
        for wide, first in zip(WIDE.ranges(arm), FIRST.ranges(arm), strict=True):
            assert wide.key == first.key and wide.low <= first.low and wide.high >= first.high
        for changes in WIDE.trials(arm, 8):
            point = as_settings(changes)
            assert all(r.low <= point[r.key] <= r.high for r in WIDE.ranges(arm))
    for job in final:
        records.add(record(job, 0.8, test=dict.fromkeys(TEST, 0.75)))
    text = write(script, records, tmp_path, tmp_path / "results")
    row = next(line for line in text.splitlines() if line.startswith("| svgd |"))
    assert "| 0.9000 (4) | 0.8500 (8) |" in row and "| 75.00 (2) | +25.00 [+25.00, +25.00] | +0.2500" in row
    assert next(line for line in text.splitlines() if line.startswith("| ma |")).endswith("|  |  |  |")


def test_strengths_at_plain_settings_get_final_runs_only_if_they_are_better(script, data, tmp_path):
    """Six points of every arm; svgd improves on its first choice, the control has none, and plain attention counts."""
    from studies.classification.search_space import FIRST, WIDE
    from studies.tuning.space import as_settings

    studies, records = finished(script, data, tmp_path)
    jobs = [job for _, job in script.queue({"yelp": studies["yelp"]}, ["strengths"])]
    arms = [*ARMS, "kernel-free"]
    assert {job.stage for job in jobs} == {"strength"} and not any(job.reads_test for job in jobs)
    assert {arm: sum(job.arm == arm for job in jobs) for arm in arms} == dict.fromkeys(arms, 6 * 3)
    common = as_settings(FIRST.trials("ma", 4)[2])
    for arm in arms:
        points = [as_settings(job.changes[-len(WIDE.ranges(arm)) :]) for job in jobs if job.arm == arm][:6]
        tuned = WIDE.ranges(arm)[3 if arm != "ma" else 2]
        strengths = [point[tuned.key] for point in points]
        assert strengths == sorted(set(strengths)) and tuned.low < strengths[0] < strengths[-1] < tuned.high
        assert all(point[key] == common[key] for point in points for key in common if key != tuned.key)
        assert arm != "spos" or len({point["method.beta"] for point in points}) == 1
        method = open_recipe(f"yelp/{arm}", next(job.changes for job in jobs if job.arm == arm)).method
        assert arm not in ("svgd", "kernel-free") or (method.ratio, method.stepsize) == (strengths[0], 30)
    for job in jobs:  # the first choice of every arm has 0.9
        loss = {"svgd": 0.85, "kernel-free": 0.95}.get(job.arm, 0.93) if job.trial == 4 else 1.0
        records.add(record(job, loss))
    final = [job for _, job in script.queue({"yelp": studies["yelp"]}, ["strengths"])]
    assert [(job.stage, job.arm, job.trial, job.seed) for job in final] == [
        ("strength final", arm, 4, seed) for seed in (0, 1) for arm in ("svgd", "kernel-free")
    ]
    assert all(job.reads_test for job in final)
    for job in final:
        records.add(record(job, 0.8, test=dict.fromkeys(TEST, 0.75)))
    text = write(script, records, tmp_path, tmp_path / "results")
    rows = [line for line in text.partition("## Strengths")[2].splitlines() if line.startswith("| svgd |")]
    assert ": 0.8500, " in rows[0] and rows[0].endswith("| 0.9000 |")
    assert rows[1].startswith("| svgd | 2 | 75.00 | 0.7500 |") and "| +25.00 [+25.00, +25.00] |" in rows[1]


def write(script, records, out, results, with_items=False):
    return script.write_follow_up(list(records.runs.values()), {}, out, results, with_items=with_items)


def test_altered_forces_reach_the_training(script, data, tmp_path):
    studies, records = finished(script, data, tmp_path, set=["training.batch=4"], seeds=1)
    jobs = {job.arm: job for _, job in script.queue(studies, ["forces", "controls"]) if job.dataset == "age"}
    runs = {name: train(jobs[name], records) for name in ("svgd, attraction", "svgd, wrong partner")}
    dist = {run["force"]: run["test"]["dist"] for run in runs.values()}
    plain = studies["age"].make_jobs("heads", "svgd", 2, script.FIRST.trials("svgd", 4)[2], [0], name="svgd, unaltered")
    repelled = train(next(plain), records)["test"]["dist"]
    assert dist["attraction"] < repelled and len({dist["attraction"], dist["wrong partner"], repelled}) == 3


def test_entropy_and_attention_of_a_run(script, data, tmp_path, monkeypatch):
    studies, records = finished(script, data, tmp_path, set=["training.batch=4", "training.epochs=2"])
    jobs = [job for _, job in script.queue(studies, ["entropy"]) if job.arm in ("ma", "svgd")]
    runs = [train(job, records) for job in jobs]
    script.store_labels(data, tmp_path, "yelp")
    with np.load(tmp_path / "answers-yelp.npz") as file:
        answers = dict(file)
    for run in runs:
        own, foreign = (
            answers[f"entropy/{run['arm']}/{run['seed']}/{kind}_entropy"] / 1e4 for kind in ("own", "foreign")
        )
        assert own.shape == (60,) and foreign.shape == (25,)
        wins = np.mean([(f > o) + 0.5 * (f == o) for f in foreign for o in own])
        assert run["foreign"]["auroc"] == pytest.approx(wins, abs=4e-3)  # stored entropies are rounded
        assert run["foreign"]["own_entropy"] == pytest.approx(own.mean(), abs=1e-4)
        assert run["foreign"]["foreign_entropy"] == pytest.approx(foreign.mean(), abs=1e-4)
        assert 0 < foreign.max() <= math.log(5) + 1e-3
    files = sorted(path.name for path in (tmp_path / "maps").iterdir())
    assert files == ["yelp-ma-50.json", "yelp-svgd-50.json"]
    for name in files:
        shown = json.loads((tmp_path / "maps" / name).read_text())
        assert len(shown) == script.SHOWN and {len(each["attention"]) for each in shown} == {3}  # heads of --tiny
        for each in shown:
            rows = torch.tensor(each["attention"])
            assert rows.shape[1] == len(each["tokens"])
            torch.testing.assert_close(rows.sum(1), torch.ones(3), atol=0.01, rtol=0)
    results, drawn = tmp_path / "results", []
    monkeypatch.setattr("studies.classification.follow_up_tables.write_content_svgs", lambda *args: drawn.append(args))
    text = write(script, records, tmp_path, results, with_items=True)
    mean = 100 * np.mean([run["test"]["accuracy"] for run in runs if run["arm"] == "svgd"])
    assert f"| SVGD | 2 | {mean:.2f}" in text and "| SVGD minus MA |  |" in text
    summary = json.loads((results / "follow_up.json").read_text())["entropy, yelp"]
    assert summary["svgd"]["against_plain"]["foreign_entropy"]["over"] == "seeds and items"
    assert (results / "follow_up" / "maps.html").is_file()
    ((content, folder),) = drawn
    assert folder == results / "follow_up" and [chart.file for chart in content.charts] == [
        "entropy-own",
        "entropy-foreign",
    ]
    assert [[reading.method for reading in example.readings] for example in content.examples] == [["MA", "SVGD"]]


def test_stored_entropies_give_the_curve_of_the_probabilities(script):
    from studies.classification.entropy_tables import entropy_curve

    from repulsive.diagnostics.uncertainty import entropy_cdf
    from repulsive.metrics.classification import entropy

    p = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3).softmax(-1)
    ours, theirs = entropy_curve(entropy(p)), entropy_cdf(p)
    torch.testing.assert_close(ours.share, theirs.share)
    torch.testing.assert_close(ours.entropy, theirs.entropy)


def test_errors_against_the_number_of_heads(script, data, tmp_path):
    studies, records = finished(script, data, tmp_path)
    errors = {1: 0.4, 5: 0.3, 10: 0.25, 20: 0.2, 40: 0.35}
    for _, job in script.queue(studies, ["heads"]):
        if job.dataset == "age":
            count = int(job.arm.split()[-2])
            accuracy = 1 - errors[count] + 0.01 * job.seed + 0.05 * (job.recipe == "svgd")
            test = dict.fromkeys(TEST, 0.5) | {"accuracy": accuracy}
            more = {"test": test, "dev": {"nll": 1.0, "accuracy": accuracy}, "label": job.recipe, "recipe": job.recipe}
            records.add(record(job, 1.0) | more)
    text = write(script, records, tmp_path, tmp_path / "results")
    assert "| method | 1 head | 5 heads | 10 heads | 20 heads | 30 heads | 40 heads |" in text
    assert "| ma | 39.50 ± 0.71 (2) | 29.50 ± 0.71 (2) |" in text and "| 50.00 ± 0.00 (2) |" in text
    assert "| svgd minus ma |  | -5.00 [-5.00, -5.00] |" in text
    assert "- ma: best on the development set with 20 heads; error with 1 head minus that: +20.00" in text
    stored = json.loads((tmp_path / "results" / "follow_up.json").read_text())["heads, age"]["accuracy"]
    assert stored["svgd"]["5"] == {"0": pytest.approx(25), "1": pytest.approx(24)}


def test_missing_records_are_an_error(script, data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--data", str(data), "--out", str(tmp_path)])
    assert "no final runs of ma on yelp" in capsys.readouterr().err


def test_missing_data_take_one_line(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        script.main(["--data", str(tmp_path / "absent"), "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert left.value.code == 2 and "absent/yelp: nothing prepared here" in error and error.count("\n") == 1


@pytest.mark.slow
def test_all_parts_run_and_resume(script, data, tmp_path, capsys):
    finished(script, data, tmp_path, seeds=1)
    options = ["--data", str(data), "--out", str(tmp_path), "--tiny", "--trials", "4", "--seeds", "1", "--jobs", "2"]
    options += ["--device", "cpu"]
    script.main([*options, "--seconds", "300"])
    records = script.Records(tmp_path)
    assert not [run for run in records.runs.values() if "failed" in run]
    counts = {stage: sum(key[1] == stage for key in records.runs) for stage in ("heads", "control", "entropy")}
    assert counts == {"heads": 26, "control": 10, "entropy": 5}
    assert sum(key[1] == "wide refine" for key in records.runs) == 45
    before = len(records.runs)
    script.main([*options, "--seconds", "60"])
    assert len(script.Records(tmp_path).runs) == before
    capsys.readouterr()
    script.main([*options, "--tables"])
    printed = capsys.readouterr().out
    assert "## Number of heads: age" in printed and "## Wider search: age" in printed and "wrong partner" in printed
    assert (tmp_path / "follow_up" / "maps.html").is_file()
    pytest.importorskip("matplotlib")
    drawn = {path.stem for path in (tmp_path / "follow_up").glob("*.svg")}
    heads = {f"heads-{dataset}-{metric}" for dataset in ("yelp", "age") for metric in ("accuracy", "nll")}
    assert drawn == heads | {"entropy-own", "entropy-foreign"} | {"attention-1"}
