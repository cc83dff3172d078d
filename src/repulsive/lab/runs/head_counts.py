"""Plot the error against the number of heads, one curve per method, from runs that differ only in `model.heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from repulsive.diagnostics.head_count import HeadCount, HeadFit, fit_heads
from repulsive.errors import RunError
from repulsive.lab.engine.recipe_tables import differences, flatten
from repulsive.lab.runs.load import Method, facts, open_methods, part_name
from repulsive.pages import Content, Panel, Sheet
from repulsive.pages.charts import heads_chart
from repulsive.pages.text import number

# Metric -> name of the axis, and function that computes the error from the metric.
ERRORS: dict[str, tuple[str, Callable[[float], float]]] = {
    "accuracy": ("error (%)", lambda accuracy: 100 * (1 - accuracy)),
    "nll": ("NLL", float),
}
_IGNORED = ("model.heads", "seed", "label")  # settings in which the runs of one curve may differ
Groups = dict[str, list[Method]]


def head_counts(folders: Sequence[Path], part: str, title: str = "") -> Content:
    """Make a page with the error against the number of heads and a fitted curve, from the results of the runs.

    Args:
        folders: folders of runs, each with one or more seeds.
        part: data split: "test", "dev" or a further test set.
        title: title of the page.

    Raises:
        RunError: as in `open_methods`; no two runs differ only in their number of heads; or a run was not evaluated on
            the data split.
    """
    methods = open_methods(folders)
    groups = grouped(methods)
    available = {name for method in methods for run in method.runs.values() for name in run.metrics(part)}
    charts, fitted = [], []
    rows = [[label, str(heads_of(m)), str(len(m.runs))] for label, each in groups.items() for m in each]
    shown = [metric for metric in ERRORS if metric in available]
    for metric in shown:
        name, as_error = ERRORS[metric]
        points = {label: _points(each, part, metric, as_error) for label, each in groups.items()}
        fits = {label: fit_heads(measured) for label, measured in points.items() if len(measured) >= 3}
        charts.append(heads_chart(points, fits, name, f"heads-{metric}"))
        for row, point in zip(rows, (point for each in points.values() for point in each), strict=True):
            row.append(_interval(point))
        fitted += [[label, name, *_fit(fits.get(label))] for label in points]
    lead = [
        "The paper's bound on the error has a term that falls as 1/√M and one that grows as M. The curve "
        "e(M) = a/√M + b M + c is fitted to all runs by least squares with a ≥ 0 and b ≥ 0. If both are positive, its "
        "minimum is at M* = (a / 2b)^(2/3). The fit needs at least three different numbers of heads.",
    ]
    measured_as = ["method", "heads", "seeds", *(ERRORS[metric][0] for metric in shown)]
    sheets = [
        Sheet("Mean over seeds [95 % confidence interval by Student's t]", measured_as, rows),
        Sheet("Fitted curves a/√M + b M + c", ["method", "error", "a", "b", "c", "M*"], fitted),
    ]
    return Content(
        title=title or "How many heads?",
        lead=f"{', '.join(groups)} on the {part_name(part)}, with the weights that were best on the validation set.",
        facts=facts(methods),
        panels=[Panel("Error against the number of heads", lead, charts=charts, sheets=sheets)],
    )


def grouped(methods: Sequence[Method]) -> Groups:
    """Group methods whose recipes differ only in `model.heads`, by label and in ascending order of heads.

    Raises:
        RunError: no two methods differ only in their number of heads, or two have the same number.
    """
    curves: list[list[Method]] = []
    for method in methods:
        if not _has_heads(method):
            raise RunError(f"{method.folder}: its recipe has no model.heads, which --heads compares")
        same = (each for each in curves if not differences(each[0].tables(), method.tables(), _IGNORED))
        if (curve := next(same, None)) is None:
            curves.append([method])
        else:
            curve.append(method)
    if all(len(each) < 2 for each in curves):
        raise RunError(
            "--heads: no two of these runs differ only in model.heads; train some with "
            "`repulsive train RECIPE --set model.heads=4`"
        )
    groups: Groups = {}
    for each in curves:
        each.sort(key=heads_of)
        for one, next_one in pairwise(each):
            if heads_of(one) == heads_of(next_one):
                raise RunError(
                    f"{one.folder} and {next_one.folder}: both have the same recipe with {heads_of(one)} heads"
                )
    labels = [str(each[0].tables().get("label") or each[0].folder.name) for each in curves]
    for label, each in zip(labels, curves, strict=True):
        same_label = [other[0] for other_label, other in zip(labels, curves, strict=True) if other_label == label]
        groups[label if len(same_label) == 1 else f"{label} ({_distinguishing(each[0], same_label)})"] = each
    return groups


def heads_of(method: Method) -> int:
    """Return the number of heads in the recipe of a method."""
    return int(method.tables()["model"]["heads"])


def _has_heads(method: Method) -> bool:
    return "heads" in method.tables().get("model", {})


def _distinguishing(method: Method, others: Sequence[Method]) -> str:
    """Describe the settings that distinguish a method from others with its label, such as "method.alpha = 0.1"."""
    tables = method.tables()
    keys = sorted({key for other in others for key in differences(tables, other.tables(), _IGNORED)})
    settings = flatten(tables)
    return ", ".join([f"{key} = {settings.get(key)}" for key in keys][:3])


def _points(methods: Sequence[Method], part: str, metric: str, as_error: Callable[[float], float]) -> list[HeadCount]:
    return [
        HeadCount(heads_of(m), tuple(as_error(run.metrics(part)[metric]) for run in m.runs.values())) for m in methods
    ]


def _interval(point: HeadCount) -> str:
    mean, ends = number(point.mean, 3), point.interval
    return mean if ends is None else f"{mean} [{number(ends[0], 3)}, {number(ends[1], 3)}]"


def _fit(fit: HeadFit | None) -> list[str]:
    if fit is None:
        return ["–", "–", "–", "–"]
    best = "none" if fit.best is None else number(fit.best, 1)
    return [*(f"{value:.4g}".replace("-", "−") for value in (fit.a, fit.b, fit.c)), best]
