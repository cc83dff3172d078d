"""The results table of a report: which metrics it has, and what it says about differences from the baseline."""

from pathlib import Path

from repulsive.lab.engine.tables import Cell, Row
from repulsive.lab.runs.results import notes, results
from repulsive.metrics.compare import Comparison


def row(label, against, *metrics):
    return Row(label, Path(label), (0, 1), {name: Cell(0.5, 0.1) for name in metrics}, against)


def comparison(difference, p_value=0.01):
    return Comparison(difference, difference - 0.01, difference + 0.01, p_value, "items", 6, 100)


def test_every_compared_metric_has_a_verdict_in_its_own_direction():
    against = {"matthews": comparison(0.1), "pearson": comparison(-0.1), "mse": comparison(-0.1), "f1": comparison(0.1)}
    (note,) = notes([row("A", {}), row("B", against)])
    assert note == "B against A: Matthews better, Pearson worse, F1 better, MSE better."
    (note,) = notes([row("A", {}), row("B", {"pearson": comparison(0.1, 0.2)})])
    assert note == "B against A: Pearson not significantly different."
    (note,) = notes([row("A", {}), row("B", {})])
    assert note == "B against A: not compared: they share no seed."


def test_the_metric_of_a_task_is_a_column():
    names = ("matthews", "spearman", "pearson", "accuracy", "f1", "mse", "nll")
    table = results([row("A", {}, *names)], "")
    assert [metric.name for metric in table.metrics] == [
        "Matthews",
        "Spearman",
        "Pearson",
        "accuracy",
        "F1",
        "MSE",
        "NLL",
    ]
