"""How many heads? Runs that differ in nothing but `model.heads`, as one curve for each method."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from repulsive.diagnostics.head_count import HeadCount, HeadFit, fit_heads
from repulsive.errors import RunError
from repulsive.lab.runs.load import Method, facts, open_methods, part_name
from repulsive.pages import Content, Panel, Sheet
from repulsive.pages.charts import heads_chart
from repulsive.pages.text import number

# What is drawn: metric of a result -> name, and how an error is made of it.
ERRORS: dict[str, tuple[str, Callable[[float], float]]] = {
    "accuracy": ("error (%)", lambda accuracy: 100 * (1 - accuracy)),
    "nll": ("NLL", float),
}
Groups = dict[str, list[Method]]


def head_counts(folders: Sequence[Path], part: str, title: str = "") -> Content:
    """Error against the number of heads, with the fitted curve; nothing is evaluated again.

    Args:
        folders: of runs, each with one or more seeds.
        part: "test", "dev" or a further test set.
        title: of the page.

    Raises:
        RunError: as `open_methods`, no two of the runs differ in their number of heads alone, or one was not evaluated
            on the part.
    """
    methods = open_methods(folders)
    groups = grouped(methods)
    found = {name for method in methods for run in method.runs.values() for name in run.metrics(part)}
    charts, fitted = [], []
    rows = [[label, str(heads_of(m)), str(len(m.runs))] for label, each in groups.items() for m in each]
    shown = [metric for metric in ERRORS if metric in found]
    for metric in shown:
        name, made = ERRORS[metric]
        points = {label: _points(each, part, metric, made) for label, each in groups.items()}
        fits = {label: fit_heads(measured) for label, measured in points.items() if len(measured) >= 3}
        charts.append(heads_chart(points, fits, name, f"heads-{metric}"))
        for row, point in zip(rows, (point for each in points.values() for point in each), strict=True):
            row.append(_interval(point))
        fitted += [[label, name, *_fit(fits.get(label))] for label in points]
    lead = [
        "The paper's bound on the error has a term that falls as 1/√M and one that grows as M. The curve "
        "e(M) = a/√M + b M + c is fitted to all runs by least squares with a ≥ 0 and b ≥ 0; where both are above zero "
        "it is lowest at M* = (a / 2b)^(2/3). It needs three numbers of heads.",
    ]
    measured_as = ["method", "heads", "seeds", *(ERRORS[metric][0] for metric in shown)]
    sheets = [
        Sheet("Mean over seeds [95 % confidence interval by Student's t]", measured_as, rows),
        Sheet("Fitted curves a/√M + b M + c", ["method", "of", "a", "b", "c", "M*"], fitted),
    ]
    return Content(
        title=title or "How many heads?",
        lead=f"{', '.join(groups)} on the {part_name(part)}, weights chosen on the development set.",
        facts=facts(methods),
        panels=[Panel("Error against the number of heads", lead, charts=charts, sheets=sheets)],
    )


def grouped(methods: Sequence[Method]) -> Groups:
    """Label -> methods whose recipes differ in `model.heads` alone, in rising order of it.

    Raises:
        RunError: there is no such pair, or two have the same number of heads.
    """
    found: dict[str, list[Method]] = {}
    for method in methods:
        found.setdefault(_key(method), []).append(method)
    if all(len(each) < 2 for each in found.values()):
        raise RunError(
            "--heads: no two of these runs differ in model.heads alone; train some, "
            "`repulsive train RECIPE --set model.heads=4`"
        )
    groups: Groups = {}
    for each in found.values():
        each.sort(key=heads_of)
        for one, next_one in pairwise(each):
            if heads_of(one) == heads_of(next_one):
                raise RunError(f"{one.folder} and {next_one.folder}: the same recipe with {heads_of(one)} heads")
    names = [str(each[0].tables().get("label") or each[0].folder.name) for each in found.values()]
    for name, each in zip(names, found.values(), strict=True):
        twins = [other[0] for label, other in zip(names, found.values(), strict=True) if label == name]
        groups[name if len(twins) == 1 else f"{name} ({_own(each[0], twins)})"] = each
    return groups


def heads_of(method: Method) -> int:
    """`model.heads` of a recipe."""
    return int(method.tables()["model"]["heads"])


def _key(method: Method) -> str:
    tables = method.tables()
    if "heads" not in tables.get("model", {}):
        raise RunError(f"{method.folder}: its recipe has no model.heads; --heads compares runs that have")
    rest = {name: value for name, value in tables.items() if name not in ("seed", "label")}
    rest["model"] = {name: value for name, value in tables["model"].items() if name != "heads"}
    return json.dumps(rest, sort_keys=True)


def _own(method: Method, twins: Sequence[Method]) -> str:
    """Settings in which groups of one label differ, as this one has them: why they are not one curve."""
    mine = _settings(method.tables())
    others = [_settings(twin.tables()) for twin in twins]
    names = sorted({name for other in others for name in mine | other if other.get(name) != mine.get(name)})
    told = [f"{name} = {mine.get(name)}" for name in names if name not in ("model.heads", "seed", "label")]
    return ", ".join(told[:3])


def _settings(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested tables as one: `{"model": {"heads": 3}}` -> `{"model.heads": 3}`."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= _settings(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def _points(methods: Sequence[Method], part: str, metric: str, made: Callable[[float], float]) -> list[HeadCount]:
    return [HeadCount(heads_of(m), tuple(made(run.metrics(part)[metric]) for run in m.runs.values())) for m in methods]


def _interval(point: HeadCount) -> str:
    mean, ends = number(point.mean, 3), point.interval
    return mean if ends is None else f"{mean} [{number(ends[0], 3)}, {number(ends[1], 3)}]"


def _fit(fit: HeadFit | None) -> list[str]:
    if fit is None:
        return ["–", "–", "–", "–"]
    best = "none" if fit.best is None else number(fit.best, 1)
    return [*(f"{value:.4g}".replace("-", "−") for value in (fit.a, fit.b, fit.c)), best]
