"""From what diagnostics measured to what a chart shows. The page and the figures for papers draw the same charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from repulsive.diagnostics.calibration import Reliability
from repulsive.diagnostics.head_count import HeadCount, HeadFit
from repulsive.diagnostics.redundancy import Curve
from repulsive.diagnostics.uncertainty import EntropyCDF
from repulsive.pages.axes import ticks
from repulsive.pages.panels import Chart, Point, Series

_BINS = 12  # about so many bars of a histogram


def learning_curve(name: str, runs: Mapping[str, Sequence[Sequence[Point]]], file: str = "") -> Chart:
    """The mean over seeds, step by step, in a band of one standard deviation; one seed has no band.

    Args:
        name: of the quantity.
        runs: method -> for each seed its (step, value) pairs. Steps that not every seed has are left out.
        file: name of the figure for papers.
    """
    series = []
    for method, seeds in runs.items():
        tables = [dict(points) for points in seeds]
        steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
        values = {step: [table[step] for table in tables] for step in steps}
        points = [(step, statistics.fmean(found)) for step, found in values.items()]
        band = [
            (step, mean - statistics.stdev(values[step]), mean + statistics.stdev(values[step]))
            for step, mean in points
            if len(tables) > 1 and all(map(math.isfinite, values[step]))
        ]
        series.append(Series(method, points, band))
    return Chart(name, series, file=file)


def reliability_charts(diagrams: Mapping[str, Reliability], file: str = "reliability") -> list[Chart]:
    """Accuracy against confidence for each method, a dot for each bin, its area the share of items."""
    charts = []
    for place, (method, found) in enumerate(diagrams.items()):
        full = [b for b in range(len(found.count)) if int(found.count[b])]
        points = [(float(found.confidence[b]), float(found.accuracy[b])) for b in full]
        sizes = [float(found.count[b] / found.count.max()) for b in full]
        series = [Series(method, points, mark="fit"), Series(method, points, mark="dots", sizes=sizes)]
        charts.append(
            Chart(
                method,
                series,
                "confidence",
                "accuracy",
                f"All seeds together: ECE {found.ece:.3f}, OE {found.oe:.3f}, {len(found.count)} bins.",
                x_limits=(0.0, 1.0),
                y_limits=(0.0, 1.0),
                diagonal=True,
                file=f"{file}-{place + 1}",
            )
        )
    return charts


def entropy_chart(name: str, curves: Mapping[str, EntropyCDF], note: str = "", file: str = "") -> Chart:
    """Share of predictions with at most this entropy."""
    series = [
        Series(method, list(zip(curve.entropy.tolist(), curve.share.tolist(), strict=True)))
        for method, curve in curves.items()
    ]
    end = max(float(curve.entropy[-1]) for curve in curves.values())
    return Chart(name, series, "entropy in nats", "share of predictions", note, (0.0, end), (0.0, 1.0), file=file)


def redundancy_charts(changes: Mapping[str, Tensor], what: str, file: str = "redundancy") -> list[Chart]:
    """How the heads of each method are spread over what their absence changes; all methods in the same bins.

    Args:
        changes: method -> change of the metric without each head, of any shape; nan where there is no head.
        what: the change is, for the axis.
        file: start of the names of the figures for papers.
    """
    kept = {method: change[~change.isnan()].flatten() for method, change in changes.items()}  # [heads]
    edges = histogram_edges(torch.cat(list(kept.values())))  # [bins + 1]
    shares = {method: histogram(change, edges) for method, change in kept.items()}  # [bins]
    top = 100 * max(float(share.max()) for share in shares.values())
    charts = []
    for place, (method, share) in enumerate(shares.items()):
        bars = [*zip(edges[:-1].tolist(), (100 * share).tolist(), strict=True), (float(edges[-1]), 0.0)]
        charts.append(
            Chart(
                method,
                [Series(method, bars, mark="bars")],
                what,
                "% of heads",
                x_limits=(float(edges[0]), float(edges[-1])),
                y_limits=(0.0, top),
                file=f"{file}-{place + 1}",
            )
        )
    return charts


def pruning_chart(curves: Mapping[str, Sequence[Curve]], metric: str, file: str = "pruning") -> Chart:
    """A metric as more and more heads go: the mean over seeds, in a band of one standard deviation.

    Args:
        curves: method -> one for each seed.
        metric: what falls as heads go.
        file: name of the figure for papers.
    """
    runs = {
        method: [[(100 * n / len(c.order), y) for n, y in zip(c.removed, c.metric, strict=True)] for c in each]
        for method, each in curves.items()
    }
    return replace(learning_curve(metric, runs, file), x_name="% of heads taken away", x_limits=(0.0, 100.0))


def histogram_edges(values: Tensor) -> Tensor:
    """Equal bins with round middles that hold all values, one of them around zero: float64 [bins + 1].

    Example:
        >>> histogram_edges(torch.tensor([-0.9, 0.05])).tolist()[-3:]
        [-0.05, 0.05, 0.15]
    """
    middles = ticks(min(0.0, float(values.min())), max(0.0, float(values.max())), _BINS)
    step = middles[1] - middles[0]
    edges = [*(round(middle - step / 2, 12) for middle in middles), round(middles[-1] + step / 2, 12)]
    return torch.tensor(edges, dtype=torch.float64)


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Share of the values [N] in each bin [left, right), float64 [bins]."""
    place = torch.bucketize(values.double(), edges.to(values.device), right=True) - 1  # [N]
    counts = torch.bincount(place.clamp(0, len(edges) - 2), minlength=len(edges) - 1)
    return counts.double() / len(values)


def heads_chart(
    groups: Mapping[str, Sequence[HeadCount]], fits: Mapping[str, HeadFit], name: str, file: str = "heads"
) -> Chart:
    """Error against the number of heads: dots with their confidence band, and the fitted curve.

    Args:
        groups: method -> what was measured, in rising order of heads.
        fits: method -> its curve, where there are enough points for one.
        name: of the error.
        file: name of the figure for papers.
    """
    series = []
    for method, points in groups.items():
        band = [(p.heads, *p.interval) for p in points if p.interval is not None]
        series.append(Series(method, [(p.heads, p.mean) for p in points], band, mark="dots"))
        if method in fits:
            low, high = points[0].heads, points[-1].heads
            grid = [low * (high / low) ** (i / 120) for i in range(121)]
            series.append(Series(method, [(m, fits[method].at(m)) for m in grid], mark="fit"))
    note = "Dots: mean over seeds. Band: its 95 % confidence interval. Line: a / √M + b M + c, fitted."
    counts = sorted({p.heads for points in groups.values() for p in points})
    return Chart(name, series, "number of heads M", "", note, x_ticks=counts, x_log=True, file=file)
