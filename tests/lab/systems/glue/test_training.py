"""Fine-tuning on GLUE: learning, metrics, resuming, repelled heads and captured graphs."""

import signal

import pytest

from repulsive import find_heads
from repulsive.lab.engine import methods
from repulsive.lab.engine.loop import Stopped
from repulsive.lab.engine.tables import rows
from repulsive.lab.systems.registry import make_task
from tests.lab.engine import tiny
from tests.lab.systems.glue import toy_glue
from tests.threads import one_thread  # noqa: F401  an autouse fixture

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.mark.parametrize(
    ("task", "metric", "epochs"),
    [
        pytest.param("cola", "matthews", 12, marks=pytest.mark.slow),
        pytest.param("sst", "accuracy", 12, marks=pytest.mark.slow),
        ("mnli", "accuracy", 12),
        ("sts", "spearman", 6),
    ],
)
def test_it_learns(task, metric, epochs, tmp_path):
    data = toy_glue.make_data(tmp_path, task, sizes=(400, 40, 9))
    made = toy_glue.train(data, task, tmp_path / "run", f"training.epochs={epochs}", "model.dropout=0")
    result = made.folder.result
    assert made.task.select_by == metric and result["test"][metric] > 0.8
    assert result["best_step"] == result["steps"] and result["averaged"] == 1  # the last weights, nothing picked
    assert "nothing was selected on it" in result["notes"]["split"]


def test_what_a_run_leaves(mnli):
    result = mnli.folder.result
    assert result["dev"] == result["test"] and result["mismatched"] != result["test"]
    items = mnli.folder.items("mismatched")
    assert {"logits", "labels", "correct", "nll"} <= items.keys() and len(items["nll"]) == 40
    for part in ("test", "mismatched"):
        found = mnli.folder.items(part)
        assert float(found["correct"].double().mean()) == pytest.approx(result[part]["accuracy"])
        assert float(found["nll"].mean()) == pytest.approx(result[part]["nll"])
    assert "f1" not in result["test"] and "matthews" not in result["test"]


def test_metrics_are_the_benchmarks(data, tmp_path):
    for task, also in (("mrpc", "f1"), ("qqp", "f1"), ("sts", "pearson"), ("cola", "matthews")):
        made = toy_glue.train(data, task, tmp_path / task, "training.epochs=1")
        assert also in made.folder.result["test"], task
    points = made.folder.path.parent / "sts"
    (row,) = rows([points])
    assert {"spearman", "pearson", "mse"} <= row.cells.keys() and "nll" not in row.cells
    other = toy_glue.train(data, "sts", tmp_path / "other", "training.epochs=2", "label=longer")
    found = rows([points, other.folder.path])[1]
    assert set(found.against) == {"pearson", "mse"}
    difference = found.cells["pearson"].mean - row.cells["pearson"].mean
    assert found.against["pearson"].difference == pytest.approx(difference, abs=1e-6)
    assert found.against["mse"].difference == pytest.approx(found.cells["mse"].mean - row.cells["mse"].mean)
    other = toy_glue.train(data, "cola", tmp_path / "again", "training.epochs=1", "method.rule=svgd", "label=SVGD")
    assert set(rows([tmp_path / "cola", other.folder.path])[1].against) == {"matthews", "accuracy", "nll"}
    assert rows([points, tmp_path / "cola"])[1].against == {}  # other rows: nothing to pair


def test_picking_by_the_test_set_is_told(data, tmp_path):
    made = toy_glue.train(data, "cola", tmp_path / "run", "training.epochs=2", "training.average=0")
    assert "the best weights were selected on it" in made.folder.result["notes"]["split"]
    held = toy_glue.make_data(tmp_path, "rte", held_out=0.25)
    made = toy_glue.train(held, "rte", tmp_path / "held", "training.epochs=2", "training.average=0")
    assert "selected on 0.25 of the training rows, held out" in made.folder.result["notes"]["split"]
    assert len(made.folder.items("dev")["nll"]) == 40 and len(made.folder.items("test")["nll"]) == 40


def test_stopped_and_resumed_it_is_the_same_run(data, tmp_path):
    """Groups with rates of their own come back from a checkpoint too."""
    more = ("training.epochs=2", "rates.layer_decay=0.8", "training.log_every=1")
    toy_glue.train(data, "rte", tmp_path / "whole", *more)
    stop = tiny.At(7, tiny.signalled(signal.SIGTERM))
    with pytest.raises(Stopped):
        toy_glue.train(data, "rte", tmp_path / "parts", *more, watcher=stop)
    toy_glue.train(data, "rte", tmp_path / "parts", *more)
    tiny.assert_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(("changes", "groups"), [([], 6), (["method.layers=first"], 3), (["method.parts=q"], 2)])
def test_heads_repel_on_any_layer(changes, groups, data, tmp_path):
    recipe = toy_glue.recipe(data, "cola", "method.rule=svgd", *changes)
    task = make_task(recipe)
    model = task.model()
    assert len(find_heads(model)) == 6
    optimizer = methods.make_optimizer(recipe.optimizer, model, task.rate_factors(model))
    assert len(methods.attach(model, optimizer, recipe, methods.make_rule(recipe.method, 100, 10)).report()) == groups
    if not changes:
        made = toy_glue.train(data, "cola", tmp_path / "run", "method.rule=svgd", "training.epochs=1")
        assert any(line["kind"] == "heads" and line["repulsion"] > 0 for line in made.folder.lines())


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["cola", "sts"])
def test_captured_training_is_the_same_training(task, data, tmp_path):
    """No dropout: the loss of every step, with graphs of several shapes and without any."""
    more = ("model.dropout=0", "training.log_every=1", "training.tf32=false", "training.epochs=6")
    losses = []
    for capture in ("true", "false"):
        made = toy_glue.train(data, task, tmp_path / capture, *more, f"training.capture={capture}", device="cuda")
        losses.append([line["loss"] for line in made.folder.lines() if line["kind"] == "train"])
        assert capture == "false" or len(made._gradients.captured._graphs) >= (2 if task == "cola" else 1)
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
