"""Ratios at the initial weights: of every kind of attention, from unchanged weights, and as the rule defines them."""

import math

import pytest
import torch

from repulsive import find_heads
from repulsive.lab.runs.plan import plan
from repulsive.lab.systems.registry import make_task
from repulsive.particles.named import rule_by_name
from tests.lab.systems.translation import digits
from tests.scripts import study

pytest.importorskip("sacremoses")
pytest.importorskip("tokenizers")
pytest.importorskip("sacrebleu")

SETTINGS = ["model.width=16", "model.depth=[1, 1]", "model.feed_forward=16", "training.batch=200"]


@pytest.fixture(scope="module")
def script():
    with study("studies.translation.first_ratios") as module:
        yield module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return digits.make_data(tmp_path_factory.mktemp("data"), size=100) / "prepared"


def test_ratios_are_those_of_the_rule_at_the_initial_weights(script, data):
    reports = script.measure(data, 2, [*SETTINGS, "model.dropout=0"])
    assert sorted(reports) == [(where, part) for where in ("cross", "decoder", "encoder") for part in "kqv"]

    more = [f"data.folder={data}", "packed=false", *SETTINGS, "model.dropout=0"]
    (spec,) = plan(["iwslt14/svgd"], more, seed=0, device="cpu")
    task = make_task(spec.recipe)
    torch.manual_seed(0)
    model = task.model()
    rule = rule_by_name("paper")
    for number, batch in enumerate(task.order(0)[:2]):
        model.zero_grad()
        task.loss(model, task.fetch(batch), batch.length).backward()
        for group in find_heads(model):
            (own,) = group.slices
            theta, grad = own.take(own.parameter().detach()).double(), own.take(own.parameter().grad).double()
            drive = rule.gradient(theta, grad) - rule.gradient(theta, 0 * grad)
            repulsion = rule.gradient(theta, 0 * grad)
            report = reports[group.where, group.part][number]
            assert report.drive == pytest.approx(float(drive.norm()), rel=1e-4)
            assert report.ratio == pytest.approx(float(repulsion.norm() / drive.norm()), rel=1e-4)


def test_the_page_has_the_means(script, data, tmp_path, capsys):
    words = ["--data", data, "--batches", 1, "--tokens", 200, "--width", 16, "--results", tmp_path]
    script.main([str(word) for word in words])
    page = (tmp_path / "first_ratios.md").read_text()
    assert page == capsys.readouterr().out.removesuffix("\n") and "width 16, 4 heads" in page
    reports = script.measure(data, 1, ["training.batch=200", "model.width=16"])
    mean = sum(report.ratio for report in reports["cross", "q"]) / 6
    drive = sum(report.drive for report in reports["cross", "q"]) / 6 / math.sqrt(16 * 16)
    assert f"| cross | q | {mean:.4f} | {drive:.1e} |" in page


def test_missing_data_are_one_line(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--data", str(tmp_path / "none"), "--results", str(tmp_path)])
    assert "none" in capsys.readouterr().err.splitlines()[-1]
