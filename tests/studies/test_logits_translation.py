"""Logits in translation: order of the runs, choice of the learning rate, one run, and the committed table."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from repulsive.lab.engine.loop import Loop
from repulsive.particles.gram import gram
from tests.lab.systems.translation import digits
from tests.scripts import study
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

RESULTS = Path(__file__).resolve().parents[2] / "results" / "logits"
TINY = ("packed=false", "model.width=16", "model.depth=[1, 1]", "model.feed_forward=16", "training.epochs=2")
TINY += ("training.batch=300", "training.precision=fp32", "search.beam=1", "search.longest=5", "optimizer.warmup=2")


@pytest.fixture(scope="module")
def script():
    with study("studies.logits.translation") as module:
        yield module


def arguments(**changes):
    settings = {"out": Path("out"), "data": Path("prepared"), "datasets": ["multi30k"], "set": [], "device": "cpu"}
    return Namespace(**settings | {"seeds": 2} | changes)


def tuned(script, losses):
    """Records of one arm's tuning runs, by learning rate."""
    return {("multi30k", "plain", "tune", rate, 100): {"dev": {"nll": loss}} for rate, loss in losses.items()}


def test_a_rate_is_chosen_when_all_have_been_tried(script):
    losses = dict(zip(script.RATES, (1.8, 1.6, 1.5, 1.7), strict=True))
    assert script.chosen_rate(tuned(script, losses), "multi30k", "plain") == 2e-3
    records = tuned(script, losses)
    records["multi30k", "plain", "tune", 2e-3, 100] = {"failed": "the loss is nan"}
    assert script.chosen_rate(records, "multi30k", "plain") == 1e-3
    assert script.chosen_rate(dict(list(tuned(script, losses).items())[1:]), "multi30k", "plain") is None


def test_final_runs_follow_the_choice_and_finished_ones_are_left_out(script):
    records = tuned(script, dict.fromkeys(script.RATES, 1.0) | {1e-3: 0.5})
    jobs = list(script.wanted(records, arguments()))
    assert all(job.arm != "plain" for job in jobs if job.stage == "tune")
    final = [(job.arm, job.rate, job.seed) for job in jobs if job.stage == "final"]
    assert final == [("plain", 1e-3, 0), ("plain", 1e-3, 1)]
    done = records | {("multi30k", "plain", "final", 1e-3, 0): {}}
    assert [job.seed for job in script.wanted(done, arguments()) if job.stage == "final"] == [1]


def test_attraction_reverses_the_force_that_the_sampler_uses(script, tmp_path, monkeypatch):
    """The rule must be altered before it is attached: the sampler keeps the one that it is given."""
    loops = []

    def keep(loop):
        loop._build()
        loops.append(loop)
        loop.handle.remove()
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "_run", keep)
    data = digits.make_data(tmp_path, size=50) / "prepared"
    for arm in ("logits", "attraction"):
        job = script.Job("multi30k", arm, "final", 1e-3, 0, (f"data.folder={data}", *TINY), tmp_path / arm, "cpu")
        job.folder.mkdir()
        with pytest.raises(KeyboardInterrupt):
            script.train(job, sys.stdout)
    plain, reversed_ = (loop.handle._logits.rule for loop in loops)
    heads = gram(torch.randn(4, 6, dtype=torch.float64))
    first, second = plain.interact(heads), reversed_.interact(heads)
    assert torch.equal(first.repulsion, -second.repulsion) and first.repulsion.abs().max() > 0


def test_a_final_run_leaves_curves_and_redundancy(script, tmp_path):
    data = digits.make_data(tmp_path, size=100) / "prepared"
    changes = (f"data.folder={data}", *TINY)
    job = script.Job("multi30k", "attraction", "final", 1e-3, 0, changes, tmp_path / "run", "cpu")
    job.folder.mkdir()
    script.train(job, sys.stdout)
    record = json.loads((job.folder / "record.json").read_text())
    assert {"nll", "bleu"} <= record["test"].keys() and len(record["curve"]) == 2
    assert {"entropy", "similarity", "largest_logit"} <= record["curve"][0].keys()
    assert "redundant" not in record["curve"][0] and 0 <= record["curve"][1]["redundant"] <= 1


def test_the_table_is_up_to_date(script, tmp_path):
    script.write_tables(script.read_records(RESULTS / "translation.jsonl"), tmp_path)
    written = (tmp_path / "translation.md").read_text()
    assert written == (RESULTS / "translation.md").read_text(), "run: python -m studies.logits.translation --tables"


def test_tables_without_records_are_an_error(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--tables", "--records", str(tmp_path / "none.jsonl"), "--results", str(tmp_path)])
    assert "there is no such file" in capsys.readouterr().err and not list(tmp_path.iterdir())
