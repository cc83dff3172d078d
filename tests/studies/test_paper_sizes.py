"""The study of classifiers at the paper's sizes: trials, stages, records, calibration and tables."""

import argparse
import json
import sys

import numpy as np
import pytest
import torch

from repulsive.lab.systems.datasets import prepare
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

ARMS = ["ma", "svgd"]


@pytest.fixture(scope="module")
def script():
    with study("studies.classification.paper_sizes") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare("reviews", None, folder / "yelp", train=60, dev=20, test=30, jobs=1)
    return folder


def make_study(script, data, out, **changes):
    settings = {"data": data, "arms": ARMS, "tiny": True, "set": [], "trials": 4, "seeds": 2, "device": "cpu"}
    records = script.Records(out)
    return script.Study("yelp", argparse.Namespace(**settings | changes), records, out / "work"), records


def record(job, loss, **more):
    names = ("dataset", "stage", "arm", "trial", "seed")
    values = {"label": job.arm, "train": job.train, "steps": 1, "seconds": 2.0, "changes": list(job.changes)}
    return dict(zip(names, job.key, strict=True)) | values | {"dev": {"nll": loss}} | more


def test_all_arms_try_the_same_points_inside_their_ranges(script):
    from studies.classification.search_space import COMMON, FIRST, OWN
    from studies.tuning.space import as_settings

    for arm, own in OWN.items():
        points = [as_settings(changes) for changes in FIRST.trials(arm, 12)]
        assert len(points) == 12 and len({tuple(point.values()) for point in points}) == 12
        for point, plain in zip(points, FIRST.trials("ma", 12), strict=True):
            assert as_settings(plain).items() <= point.items()
            assert all(r.low <= point[r.key] <= r.high for r in (*COMMON, *own))
    rate = COMMON[0]
    assert rate.share(rate.value(0.25)) == pytest.approx(0.25, abs=2e-3)
    middle = [f"{r.key}={r.value(0.5)}" for r in COMMON]
    assert FIRST.at_edges("ma", middle) == []
    assert FIRST.at_edges("ma", [f"{rate.key}={rate.value(0.05)}", *middle[1:]]) == [rate.key]


def test_the_kernel_free_control_is_searched_as_svgd_is_but_not_by_default(script):
    from studies.classification.search_space import ARMS, FIRST, FIXED, OWN, WIDE

    assert set(OWN) - set(ARMS) == {"kernel-free"} and FIXED["kernel-free"] == FIXED["svgd"]
    assert FIRST.trials("kernel-free", 12) == FIRST.trials("svgd", 12)
    assert WIDE.trials("kernel-free", 12) == WIDE.trials("svgd", 12)


def test_later_stages_follow_from_the_records(script, data, tmp_path):
    plan, records = make_study(script, data, tmp_path)
    screen = list(plan.pending())
    assert [job.key[:4] for job in screen[:3]] == [
        ("yelp", "screen", "ma", 0),
        ("yelp", "screen", "svgd", 0),
        ("yelp", "screen", "ma", 1),
    ]
    for job in screen:  # trial 3 is the worst, trial 0 diverged
        values = record(job, 1.0 + 0.1 * job.trial)
        records.add(values if job.trial else {k: v for k, v in values.items() if k != "dev"} | {"failed": "diverged"})
    assert plan.refined("ma") == [1, 2, 3]
    refine = list(plan.pending())
    assert {job.stage for job in refine} == {"refine"} and len(refine) == 2 * 3 * 3
    for job in refine:  # the order of the screening is reversed
        records.add(record(job, 2.0 - 0.1 * job.trial))
    assert plan.chosen("svgd") == 3
    final = [(job.stage, job.arm, job.trial, job.seed) for job in plan.pending()]
    assert final == [("final", arm, 3, seed) for seed in range(2) for arm in ARMS]
    again = make_study(script, data, tmp_path)[0]  # reads the same file
    assert [job.key for job in again.pending()] == [job.key for job in plan.pending()]


def test_the_training_size_is_the_largest_that_fits(script, data, tmp_path, monkeypatch):
    plan, records = make_study(script, data, tmp_path, tiny=False, seeds=1)
    settings = sys.modules[type(plan).__module__]
    monkeypatch.setattr(plan, "plan", settings.Plan(("training.epochs=2",), screen=10, sizes=(10, 20, 40)))
    plan.decide_size(1000, 2)
    assert plan.size("refine") is None  # the screening has not ended
    for job in list(plan.pending()):
        records.add(record(job, 1.0))
    # 2 seconds per 10 items, 2 arms x (9 + 1) runs, 2 side by side: 20 s, 40 s or 80 s
    for seconds, size in ((81, 40), (79, 20), (41, 20), (19, 10)):
        records.sizes.clear()
        plan.decide_size(seconds / settings.SHARE, 2)
        assert plan.size("final") == size
    assert plan.expected(next(plan.pending())) == pytest.approx(settings.MARGIN * 0.2 * 10)


def test_a_final_run_leaves_a_record_and_answers(script, data, tmp_path):
    from studies.classification.lean_runs import train

    plan, records = make_study(script, data, tmp_path, trials=3, seeds=2)
    for stage in ("screen", "refine"):
        for job in list(plan.pending()):
            assert job.stage == stage
            records.add(record(job, 1.0))
    for job in list(plan.pending()):
        job.folder.mkdir(parents=True)
        train(job, sys.stdout)
        records.finish(job)
        assert not job.folder.exists()
    script.store_labels(data, tmp_path, "yelp")
    runs = [run for run in records.runs.values() if run["stage"] == "final"]
    with np.load(tmp_path / "answers-yelp.npz") as file:
        answers = dict(file)
    assert len(runs) == 4 and len(answers) == 2 * 4 + 1
    for run in runs:
        own = f"{run['arm']}/{run['seed']}"
        right = np.mean(answers[f"{own}/predicted"] == answers["labels"])
        assert run["test"]["accuracy"] == pytest.approx(right, abs=1e-6)
        assert run["test"]["nll"] == pytest.approx(answers[f"{own}/nll"].mean(dtype=float), abs=1 / 64)
        assert run["test"]["scaled_nll"] > 0 and {"oe15", "scaled_oe15"} <= run["test"].keys()
        assert "data.folder" not in " ".join(run["changes"])
    text = script.write_tables(list(records.runs.values()), records.versions, tmp_path, tmp_path / "results")
    assert " OE % |" in text and "| ma | 2 |" in text and "| svgd | 2 |" in text and "seeds and items" in text
    stored = json.loads((tmp_path / "results" / "paper_sizes.json").read_text())["yelp"]["arms"]
    by_seed = {run["seed"]: run["test"]["accuracy"] for run in runs if run["arm"] == "svgd"}
    plain = {run["seed"]: run["test"]["accuracy"] for run in runs if run["arm"] == "ma"}
    mean = np.mean([by_seed[seed] - plain[seed] for seed in plain])
    assert stored["svgd"]["against_plain"]["accuracy"]["difference"] == pytest.approx(mean, abs=2e-6)
    assert stored["ma"]["test"]["accuracy"]["mean"] == pytest.approx(np.mean(list(plain.values())))


def test_tuning_never_reads_the_test_set(script, data, tmp_path):
    from studies.classification.lean_runs import train
    from studies.tuning.records import RECORD

    plan, _ = make_study(script, data, tmp_path)
    job = next(plan.pending())
    job.folder.mkdir(parents=True)
    train(job, sys.stdout)
    written = json.loads((job.folder / RECORD).read_text())
    assert "test" not in written and written["dev"]["nll"] > 0
    assert not list(job.folder.glob("*.npz")) and not (job.folder / "best").exists()


def test_the_temperature_minimises_the_nll(script):
    from studies.classification.lean_runs import fit_temperature

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=generator).squeeze(1)
    grid = torch.linspace(-2, 2, 4001, dtype=torch.float64).exp()
    losses = torch.stack([torch.nn.functional.cross_entropy(3 * logits / t, labels) for t in grid])
    assert fit_temperature(3 * logits, labels) == pytest.approx(float(grid[losses.argmin()]), rel=2e-3)


def test_scores_after_scaling(script):
    """Three times too confident: scaling finds it, and lowers the overconfidence error as well."""
    from studies.classification.lean_runs import after_scaling

    from repulsive.metrics.classification import oe

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=generator).squeeze(1)
    answers = {"logits": 3 * logits, "labels": labels}
    scores = after_scaling(answers, answers)
    assert set(scores) == {"temperature", "scaled_nll", "scaled_ece15", "scaled_oe15"}
    by_hand = oe((3 * logits / scores["temperature"]).softmax(-1), labels, 15)
    assert scores["scaled_oe15"] == pytest.approx(float(by_hand), abs=1e-5)
    assert scores["scaled_oe15"] < 0.1 * float(oe((3 * logits).softmax(-1), labels, 15))


def test_yelp_splits_share_no_text(script, tmp_path):
    from studies.classification.splits import split_yelp

    lines = {"train": [f"{i % 5 + 1}\ttext {i}" for i in range(40)], "dev": ["1\tTEXT 3"], "test": ["2\ttext  4"]}
    (tmp_path / "raw").mkdir()
    for name, rows in lines.items():
        (tmp_path / "raw" / f"{name}.tsv").write_text("\n".join(["stars\ttext", *rows, rows[0]]) + "\n")
    counts = split_yelp(tmp_path / "raw", tmp_path / "out", {"dev": 5, "test": 10})
    assert counts == {"test": 11, "dev": 6, "train": 40 - 2 - 15}
    texts = [
        " ".join(line.split("\t")[1].lower().split())
        for name in counts
        for line in (tmp_path / "out" / f"{name}.tsv").read_text().splitlines()[1:]
    ]
    assert len(texts) == len(set(texts)) == 40
