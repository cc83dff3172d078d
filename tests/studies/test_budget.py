"""Equal tuning budgets of translation and graphs to text: trials, stages, epochs, one run, controls and tables."""

import argparse
import json
import sys

import pytest

from repulsive.errors import RunError
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.systems.registry import open_recipe
from repulsive.metrics.student import interval
from tests.lab.systems.graphs import toy_graphs
from tests.lab.systems.translation import digits
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

SYSTEMS = ("translation", "graphs")


@pytest.fixture(scope="module")
def script():
    with study("studies.budget.run") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Toy data under the names of the real datasets."""
    folder = tmp_path_factory.mktemp("prepared")
    graphs = toy_graphs.make_data(tmp_path_factory.mktemp("graphs"))
    (folder / "webnlg").symlink_to(graphs / "prepared")
    if all(pytest.importorskip(name) for name in ("sacremoses", "tokenizers", "sacrebleu")):
        numbers = digits.make_data(tmp_path_factory.mktemp("digits"), size=100)
        (folder / "multi30k").symlink_to(numbers / "prepared")
    return folder


def make_study(script, out, system="translation", **changes):
    chosen = script.SYSTEMS[system]
    settings = {"arms": list(chosen.arms), "tiny": True, "set": ["data.share=1"], "trials": 4, "seeds": 3, "epochs": 0}
    arguments = argparse.Namespace(**settings | {"data": out, "device": "cpu"} | changes)
    records = script.Records(out)
    return script.Study(chosen, arguments, records, out / "work"), records


def record(job, loss, **more):
    names = ("dataset", "stage", "arm", "trial", "seed")
    values = {"label": job.label, "epochs": job.epochs, "changes": list(job.changes)[1:]}
    times = {"seconds": 1.0 + 2.0 * job.epochs, "epoch_seconds": 2.0, "device": "cpu"}
    if job.control_of:
        values["control_of"] = job.control_of
    return dict(zip(names, job.key, strict=True)) | values | times | {"dev": {"nll": loss}} | more


def finish(plan, records, stage, loss=lambda job: 1.0, **test):
    """Add the records of all runs of a stage; `test` are functions from a job to a metric on the test set."""
    jobs = [job for job in plan.pending() if job.stage == stage]
    for job in jobs:
        more = {"test": {name: value(job) for name, value in test.items()}} if test else {}
        records.add(record(job, loss(job), **more))
    return jobs


def finish_tuning(plan, records):
    finish(plan, records, "screen", lambda job: 1.0 + 0.1 * job.trial)
    plan.decide_epochs(1e6, 2)
    finish(plan, records, "refine", lambda job: 2.0 - 0.1 * job.trial)


@pytest.mark.parametrize("name", SYSTEMS)
def test_all_arms_try_the_same_points_inside_their_ranges(script, name):
    from studies.tuning.space import as_settings

    system = script.SYSTEMS[name]
    plain = [as_settings(changes) for changes in system.space.trials(system.baseline, system.trials)]
    keys = {"optimizer.lr", "model.dropout", "optimizer.weight_decay"}
    for arm in system.arms:
        points = [as_settings(changes) for changes in system.space.trials(arm, system.trials)]
        assert len({tuple(point.values()) for point in points}) == system.trials
        for point, other in zip(points, plain, strict=True):
            assert other.keys() == keys and other.items() <= point.items()
            assert all(r.low <= point[r.key] <= r.high for r in system.space.ranges(arm))
            assert (arm == system.baseline) == (point.keys() == keys)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_arm_has_the_rule_that_its_name_says(script, tmp_path, name):
    from studies.altered_forces import ATTRACTION, WRONG_PARTNER, alter_force

    plan, _ = make_study(script, tmp_path, name, tiny=False)
    rules = {}
    for job in list(plan.pending())[: len(plan.arms)]:
        recipe = open_recipe(job.recipe, [*job.changes, f"training.epochs={job.epochs}"])
        rules[job.arm] = rule = make_rule(recipe.method, 100, 10)
        strength = dict(change.split("=") for change in job.changes)
        assert recipe.optimizer.weight_decay == float(strength["optimizer.weight_decay"])
        if "method.alpha" in strength and strength["method.alpha"] != "auto":
            assert rule.alpha == float(strength["method.alpha"])
        if plan.arms[job.arm].has_force:
            for force in (ATTRACTION, WRONG_PARTNER):
                assert type(alter_force(rule, force)) is not type(rule)
    sphere = rules["sphere"]
    assert (sphere.space, sphere.smoothing, sphere.alpha, sphere.act_every) == ("sphere", 0, "auto", 4)
    published = rules["svgd" if name == "translation" else "rma"]
    assert (published.space, published.smoothing, published.stepsize) == ("weights", 1, 0.1)
    assert rules[plan.system.baseline] is None and type(rules["kernel-free"]).__name__ == "KernelFree"


def test_later_stages_follow_from_the_records(script, tmp_path):
    plan, records = make_study(script, tmp_path)
    count = len(plan.arms)
    screen = finish(plan, records, "screen", lambda job: 1.0 + 0.1 * job.trial)
    assert len(screen) == 4 * count and {job.seed for job in screen} == {100} and {job.epochs for job in screen} == {1}
    assert not list(plan.pending())  # the epochs of the next stage are not decided
    plan.decide_epochs(1e6, 2)
    refine = finish(plan, records, "refine", lambda job: 2.0 - 0.1 * job.trial)
    assert len(refine) == 9 * count and {job.trial for job in refine} == {0, 1, 2}  # trial 3 is the worst
    assert plan.chosen() == dict.fromkeys(plan.arms, 2)
    final = [(job.stage, job.trial, job.seed) for job in plan.pending() if job.arm == "spos"]
    assert final == [("final", 2, seed) for seed in range(3)]
    again, _ = make_study(script, tmp_path)  # reads the same file
    assert [job.key for job in again.pending()] == [job.key for job in plan.pending()]


def test_a_failed_trial_is_not_chosen(script, tmp_path):
    plan, records = make_study(script, tmp_path, arms=["ma"])
    for job in list(plan.pending()):
        if job.trial == 0:
            records.fail(job, "its process died")
        else:
            records.add(record(job, 1.0))
    assert plan.ranked("screen", "ma")[-1] == 0
    assert records.of("multi30k", "screen", "ma")[0]["failed"] == "its process died"


def test_the_number_of_epochs_is_the_largest_that_fits(script, tmp_path):
    plan, records = make_study(script, tmp_path, tiny=False, arms=["ma", "svgd"])
    finish(plan, records, "screen")
    # 2 arms x (9 + 3) runs and 9 controls; a run takes 1 + 2 x epochs seconds, 4 side by side
    for epochs in (6, 8, 12):
        seconds = 33 * (1 + 2 * epochs) / 4 / 0.85
        assert plan.fitting_epochs(seconds + 1, 4) == epochs
        assert plan.fitting_epochs(seconds - 1, 4) < max(epochs, 7)
    plan.decide_epochs(1.0, 4)
    assert records.epochs == 6  # the shortest if none fits
    plan.decide_epochs(1e6, 4)
    assert records.epochs == 6 and {job.epochs for job in plan.pending()} == {6}
    assert plan.expected(next(plan.pending()), 4) == pytest.approx(1.3 * 13)


def test_controls_are_trained_only_for_arms_that_beat_plain_attention(script, tmp_path):
    plan, records = make_study(script, tmp_path, arms=["ma", "svgd", "spos"])
    finish(plan, records, "screen")
    plan.decide_epochs(1e6, 2)
    finish(plan, records, "refine", lambda job: 1.0 if job.trial == (job.arm != "ma") else 2.0)
    gain = {"svgd": 0.1, "ma": 0.0, "spos": -0.1}
    finish(plan, records, "final", bleu=lambda job: 40.0, nll=lambda job: 1.5 - gain[job.arm] + 0.01 * job.seed**2)
    assert [plan.beats_plain(arm) for arm in plan.arms] == [False, True, False]
    jobs = {job.arm: job for job in plan.pending()}
    assert {(job.stage, job.trial, job.control_of) for job in jobs.values()} == {("control", 1, "svgd")}
    assert {name: (job.recipe, job.force) for name, job in jobs.items()} == {
        "ma@svgd": ("multi30k/ma", ""),
        "svgd, attraction": ("multi30k/svgd", "attraction"),
        "svgd, wrong partner": ("multi30k/svgd", "wrong partner"),
    }
    point = plan.system.space.trials("svgd", 4)[1]
    assert jobs["svgd, attraction"].changes[-4:] == point and jobs["ma@svgd"].changes[-3:] == point[:3]


def test_records_of_other_settings_are_refused(script, tmp_path):
    plan, records = make_study(script, tmp_path)
    records.check_settings(plan.settings)
    other, records = make_study(script, tmp_path, trials=5)
    with pytest.raises(RunError, match="another trials"):
        records.check_settings(other.settings)
    same, records = make_study(script, tmp_path, seeds=9)  # more seeds extend a study
    records.check_settings(same.settings)


@pytest.mark.parametrize("name", SYSTEMS)
def test_only_final_runs_read_the_test_set(script, data, tmp_path, name):
    plan, records = make_study(script, tmp_path, name, data=data)
    screen = next(plan.pending())
    finish_tuning(plan, records)
    final = next(job for job in plan.pending() if job.arm == "sphere")
    for job in (screen, final):
        job.folder.mkdir(parents=True)
        script.train(job, sys.stdout)
        run = records.finish(job)
        assert not job.folder.exists() and run["dev"]["nll"] > 0 and run["seconds"] >= run["epoch_seconds"] > 0
        assert ("test" in run) == (job is final) and "bleu" not in run["dev"]
        assert "data.folder" not in " ".join(run["changes"]) and run["epochs"] == job.epochs
    assert plan.system.shown.keys() <= run["test"].keys()


def test_tables_have_paired_intervals_and_report_values_near_an_end(script, tmp_path):
    plan, records = make_study(script, tmp_path, arms=["ma", "svgd"])
    records.check_settings(plan.settings)
    finish_tuning(plan, records)
    gaps = (0.1, 0.2, 0.6)

    def nll(job):
        return 1.5 + 0.3 * job.seed + (gaps[job.seed] if job.arm == "svgd" else 0.0)

    finish(plan, records, "final", bleu=lambda job: 40.0 + job.seed, nll=nll, accuracy=lambda job: 0.5)
    text = script.write_tables(plan.system, records, tmp_path / "tables")
    low, high = interval(gaps)
    assert f"| SVGD, published rule | 3 | +0.00 [+0.00, +0.00] | +0.3000 [{low:+.4f}, {high:+.4f}] |" in text
    assert "| MA | 3 | 41.00 ± 1.00 | 1.8000 ± 0.3000 |" in text
    stored = json.loads((tmp_path / "tables" / "budget-multi30k.json").read_text())
    for arm in ("ma", "svgd"):
        chosen = stored["arms"][arm]["chosen"]
        assert chosen["trial"] == 2 and tuple(chosen["settings"]) == plan.system.space.trials(arm, 4)[2]
        edges = plan.system.space.at_edges(arm, chosen["settings"])
        assert chosen["at_edges"] == edges and all(edge in text for edge in edges)
        assert len(stored["arms"][arm]["tried"]) == 4


def test_tables_of_an_unfinished_screening_state_no_epochs_of_later_stages(script, tmp_path):
    plan, records = make_study(script, tmp_path, arms=["ma", "svgd"])
    records.check_settings(plan.settings)
    records.add(record(next(plan.pending()), 1.0))
    text = script.write_tables(plan.system, records, tmp_path / "tables")
    assert "1 runs on" in text and "for longer with three seeds" in text and "None" not in text


def test_tables_compare_an_arm_with_its_controls(script, tmp_path):
    plan, records = make_study(script, tmp_path, arms=["ma", "sphere"])
    finish_tuning(plan, records)
    losses = {"ma": 1.5, "sphere": 1.3, "sphere, attraction": 1.4, "sphere, wrong partner": 1.6}

    def nll(job):
        return losses[job.arm] + 0.01 * job.seed

    metrics = {"nll": nll, "bleu": lambda job: 40.0, "accuracy": lambda job: 0.5}
    finish(plan, records, "final", **metrics)
    assert "control: 0 runs done, 6 to do, " in script.describe_plan(plan, 100.0, 2)
    assert len(finish(plan, records, "control", **metrics)) == 2 * 3  # the same point as plain attention: no ma@sphere
    assert "control: 6 runs done, 0 to do, " in script.describe_plan(plan, 100.0, 2)
    text = script.write_tables(plan.system, records, tmp_path)
    assert "SVGD, recommended rule minus sphere, attraction | 3 | +0.00 [+0.00, +0.00] | -0.1000 [-0.1000" in text
    assert "sphere, wrong partner minus MA | 3 | +0.00 [+0.00, +0.00] | +0.1000 [+0.1000" in text


def test_the_default_plans_fit_into_ten_minutes(script, tmp_path, capsys):
    for name, seconds in (("translation", 600), ("graphs", 500)):
        script.main(["--system", name, "--plan", "--seconds", str(seconds), "--out", str(tmp_path / "none")])
        *stages, total = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in stages] == ["screen", "refine", "final", "control"]
        assert float(total.split()[2]) < seconds
    assert not (tmp_path / "none").exists()


def test_mistakes_on_the_command_line_are_one_line(script, tmp_path, capsys):
    place = ["--system", "graphs", "--out", str(tmp_path), "--data", str(tmp_path / "none")]
    for words, message in (
        ([*place, "--arms", "spos"], "expected some of gw, rma"),
        ([*place, "--tables"], "no runs; train them first"),
        (place, "repulsive prepare graphs"),
    ):
        with pytest.raises(SystemExit):
            script.main(words)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_study_resumes(script, data, tmp_path):
    words = ["--system", "graphs", "--tiny", "--set", "data.share=1", "--trials", "2", "--seeds", "2", "--arms", "rma"]
    words += ["--data", str(data), "--out", str(tmp_path), "--jobs", "2", "--device", "cpu"]
    script.main([*words, "--seconds", "14"])
    runs = script.Records(tmp_path / "graphs").runs
    stopped = {key: run["seconds"] for key, run in runs.items()}
    script.main([*words, "--seconds", "300"])
    runs = script.Records(tmp_path / "graphs").runs
    assert stopped.items() <= {key: run["seconds"] for key, run in runs.items()}.items()
    counts = {stage: sum(key[1] == stage for key in runs) for stage in ("screen", "refine", "final")}
    assert counts == {"screen": 4, "refine": 12, "final": 4}
    assert "| GW | 2 |" in (tmp_path / "graphs" / "budget-webnlg.md").read_text()
