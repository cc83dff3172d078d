"""Build charts from the results of diagnostics. Pages and figures for papers draw the same charts."""

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
from repulsive.pages.data.panels import Chart, Point, Series

_BINS = 12  # approximate number of bars of a histogram


def learning_curve(name: str, runs: Mapping[str, Sequence[Sequence[Point]]], file: str = "") -> Chart:
    """Plot the mean over seeds at each step, with a band of one standard deviation if there are several seeds.

    Args:
        name: name of the quantity.
        runs: method -> (step, value) pairs of each seed. Only steps that all seeds have are plotted.
        file: file name of the figure for papers.
    """
    series = []
    for method, seeds in runs.items():
        tables = [dict(points) for points in seeds]
        steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
        values = {step: [table[step] for table in tables] for step in steps}
        points = [(step, statistics.fmean(of_seeds)) for step, of_seeds in values.items()]
        band = [
            (step, mean - statistics.stdev(values[step]), mean + statistics.stdev(values[step]))
            for step, mean in points
            if len(tables) > 1 and all(map(math.isfinite, values[step]))
        ]
        series.append(Series(method, points, band))
    return Chart(name, series, file=file)


def reliability_charts(diagrams: Mapping[str, Reliability]) -> list[Chart]:
    """Plot accuracy against confidence for each method; the area of a dot is the share of items in its bin."""
    charts = []
    for number, (method, diagram) in enumerate(diagrams.items(), 1):
        filled = [b for b in range(len(diagram.count)) if int(diagram.count[b])]
        points = [(float(diagram.confidence[b]), float(diagram.accuracy[b])) for b in filled]
        sizes = [float(diagram.count[b] / diagram.count.max()) for b in filled]
        series = [Series(method, points, mark="fit"), Series(method, points, mark="dots", sizes=sizes)]
        charts.append(
            Chart(
                method,
                series,
                "confidence",
                "accuracy",
                f"All seeds pooled: ECE {diagram.ece:.3f}, OE {diagram.oe:.3f}, {len(diagram.count)} bins.",
                x_limits=(0.0, 1.0),
                y_limits=(0.0, 1.0),
                diagonal=True,
                file=f"reliability-{number}",
            )
        )
    return charts


def entropy_chart(name: str, curves: Mapping[str, EntropyCDF], file: str = "") -> Chart:
    """Plot the share of predictions with at most a given entropy (cumulative distribution)."""
    series = [
        Series(method, list(zip(curve.entropy.tolist(), curve.share.tolist(), strict=True)))
        for method, curve in curves.items()
    ]
    end = max(float(curve.entropy[-1]) for curve in curves.values())
    return Chart(name, series, "entropy in nats", "share of predictions", "", (0.0, end), (0.0, 1.0), file=file)


def redundancy_charts(changes: Mapping[str, Tensor], what: str) -> list[Chart]:
    """Plot a histogram per method of the change of a metric when single heads are ablated, all with the same bins.

    Args:
        changes: method -> change for each head, of any shape; NaN entries are ignored.
        what: label of the horizontal axis.
    """
    kept = {method: change[~change.isnan()].flatten() for method, change in changes.items()}  # [heads]
    edges = histogram_edges(torch.cat(list(kept.values())))  # [bins + 1]
    shares = {method: histogram(change, edges) for method, change in kept.items()}  # [bins]
    top = 100 * max(float(share.max()) for share in shares.values())
    charts = []
    for number, (method, share) in enumerate(shares.items(), 1):
        bars = [*zip(edges[:-1].tolist(), (100 * share).tolist(), strict=True), (float(edges[-1]), 0.0)]
        charts.append(
            Chart(
                method,
                [Series(method, bars, mark="bars")],
                what,
                "% of heads",
                x_limits=(float(edges[0]), float(edges[-1])),
                y_limits=(0.0, top),
                file=f"redundancy-{number}",
            )
        )
    return charts


def pruning_chart(curves: Mapping[str, Sequence[Curve]], metric: str) -> Chart:
    """Plot a metric against the share of pruned heads: mean over seeds with a band of one standard deviation.

    Args:
        curves: method -> one curve for each seed.
        metric: name of the metric.
    """
    runs = {
        method: [[(100 * n / len(c.order), y) for n, y in zip(c.removed, c.metric, strict=True)] for c in seeds]
        for method, seeds in curves.items()
    }
    return replace(learning_curve(metric, runs, "pruning"), x_name="% of heads pruned", x_limits=(0.0, 100.0))


def histogram_edges(values: Tensor) -> Tensor:
    """Choose equal bins with round centres that hold all values, one of them centred at zero: float64 [bins + 1].

    Example:
        >>> histogram_edges(torch.tensor([-0.9, 0.05])).tolist()[-3:]
        [-0.05, 0.05, 0.15]
    """
    centres = ticks(min(0.0, float(values.min())), max(0.0, float(values.max())), _BINS)
    step = centres[1] - centres[0]
    edges = [*(round(centre - step / 2, 12) for centre in centres), round(centres[-1] + step / 2, 12)]
    return torch.tensor(edges, dtype=torch.float64)


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Compute the share of the values [N] in each bin [left, right), float64 [bins]."""
    bins = torch.bucketize(values.double(), edges.to(values.device), right=True) - 1  # [N]
    counts = torch.bincount(bins.clamp(0, len(edges) - 2), minlength=len(edges) - 1)
    return counts.double() / len(values)


def heads_chart(
    groups: Mapping[str, Sequence[HeadCount]], fits: Mapping[str, HeadFit], name: str, file: str = "heads"
) -> Chart:
    """Plot the error against the number of heads: means with a confidence band, and the fitted curve.

    Args:
        groups: method -> measurements, sorted by the number of heads.
        fits: method -> fitted curve, for methods with enough points.
        name: name of the error.
        file: file name of the figure for papers.
    """
    series = []
    for method, points in groups.items():
        band = [(p.heads, *p.interval) for p in points if p.interval is not None]
        series.append(Series(method, [(p.heads, p.mean) for p in points], band, mark="dots"))
        if method in fits:
            low, high = points[0].heads, points[-1].heads
            grid = [low * (high / low) ** (i / 120) for i in range(121)]
            series.append(Series(method, [(m, fits[method].at(m)) for m in grid], mark="fit"))
    note = "Dots: mean over seeds. Band: 95 % confidence interval of the mean. Line: fit of a / √M + b M + c."
    counts = sorted({p.heads for points in groups.values() for p in points})
    return Chart(name, series, "number of heads M", "", note, x_ticks=counts, x_log=True, file=file)
