"""Content of a report: results table, readings of examples, and the page as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from repulsive.metrics.compare import Comparison
from repulsive.pages.data.layers import Layered
from repulsive.pages.data.panels import Chart, Panel


@dataclass(frozen=True)
class Metric:
    """A column of the results table.

    Args:
        name: column header.
        better: "higher", "lower", or "neither" for a number without a preferred direction.
        digits: decimals shown.
        percent: values are fractions and are shown times 100.
        meaning: one sentence that explains the metric.
    """

    name: str
    better: Literal["higher", "lower", "neither"] = "higher"
    digits: int = 3
    percent: bool = False
    meaning: str = ""

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower", "neither"):
            raise ValueError(f"metric {self.name!r}: better={self.better!r}; choose 'higher', 'lower' or 'neither'")


@dataclass(frozen=True)
class Cell:
    """One cell of the results table: a mean over seeds.

    Args:
        mean: mean over seeds.
        sd: standard deviation over seeds; None for one seed.
        paired: paired comparison of the method with the baseline on the same seeds and items, if there is one.
    """

    mean: float
    sd: float | None = None
    paired: Comparison | None = None


@dataclass(frozen=True)
class Row:
    """A method and its values, one cell per metric; None where a value was not measured.

    Args:
        method: name of the method, the same as in charts and readings.
        cells: values in the order of the metrics.
        control: the method is a control experiment, not a competitor.
    """

    method: str
    cells: Sequence[Cell | None]
    control: bool = False


@dataclass(frozen=True)
class Table:
    """Results table: one row per method, one column per metric.

    Args:
        metrics: the columns.
        rows: the methods.
        baseline: the method that the others are compared with.
        caption: data and setting of the numbers.
        notes: conclusions and caveats, one paragraph each.
        level: significance level: differences with a larger p-value are not significant.
    """

    metrics: Sequence[Metric]
    rows: Sequence[Row]
    baseline: str
    caption: str = ""
    notes: Sequence[str] = ()
    level: float = 0.05

    def __post_init__(self) -> None:
        names = [row.method for row in self.rows]
        if self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not one of the methods {names}")
        for row in self.rows:
            if len(row.cells) != len(self.metrics):
                raise ValueError(f"row {row.method!r} has {len(row.cells)} cells for {len(self.metrics)} metrics")


@dataclass(frozen=True, eq=False)
class Reading:
    """Prediction and attention of a method for one example.

    Args:
        method: name of the method.
        predicted: name of the predicted class.
        probability: predicted probability of this class.
        attention: weights [M, T], one row per head, without padding.
    """

    method: str
    predicted: str
    probability: float
    attention: Tensor | Sequence[Sequence[float]]

    def weights(self) -> Tensor:
        """Return the attention as float64 [M, T]."""
        return torch.as_tensor(self.attention, dtype=torch.float64).detach().cpu()


@dataclass(frozen=True, eq=False)
class Example:
    """A text and the readings of all methods.

    Args:
        tokens: the T words of the text.
        label: name of the true class.
        readings: one per method, in the same order in every example.
        evidence: aspect -> positions of the words that mention it.
    """

    tokens: Sequence[str]
    label: str
    readings: Sequence[Reading]
    evidence: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if not count or not self.readings:
            raise ValueError("an example needs at least one token and one reading")
        for reading in self.readings:
            weights = reading.weights()
            if weights.ndim != 2 or not len(weights) or weights.shape[1] != count:
                shape = f"attention {list(weights.shape)} of {reading.method!r}"
                raise ValueError(f"{shape} does not fit {count} tokens: expected [heads, {count}] without padding")
            if not weights.isfinite().all() or (weights < 0).any():
                raise ValueError(f"attention of {reading.method!r} has negative, infinite or NaN weights")
        for aspect, positions in self.evidence.items():
            if not all(0 <= position < count for position in positions):
                raise ValueError(f"evidence of {aspect!r} at {list(positions)} is outside the {count} tokens")


@dataclass(frozen=True, eq=False)
class Content:
    """All content of a report. Empty fields are omitted.

    Args:
        title: page title.
        lead: the experiment in one or two sentences.
        facts: (name, value) pairs such as dataset, sizes, seeds, versions, command and duration.
        table: the results.
        charts: learning curves.
        examples: examples for the attention explorer of models with one attention layer over the whole text.
        layered: examples for the attention explorer of models with several layers; not together with `examples`.
        threshold: a head covers an aspect if it gives at least this much attention to the aspect's evidence.
        panels: further sections. If one of them has grids, the overlap of heads on the examples is not shown.
    """

    title: str
    lead: str = ""
    facts: Sequence[tuple[str, str]] = ()
    table: Table | None = None
    charts: Sequence[Chart] = ()
    examples: Sequence[Example] = ()
    threshold: float = 0.3
    panels: Sequence[Panel] = ()
    layered: Sequence[Layered] = ()

    def __post_init__(self) -> None:
        if self.examples and self.layered:
            raise ValueError("a page has one attention explorer: pass examples or layered, not both")
        shapes = {tuple((r.method, len(r.attention)) for r in example.readings) for example in self.examples}
        if len(shapes) > 1:
            raise ValueError(f"examples differ in their methods or numbers of heads: {sorted(shapes)}")

    def methods(self) -> list[str]:
        """List every method once: first those of the table, then of the charts, then of the readings."""
        rows = [row.method for row in self.table.rows] if self.table else []
        lines = [series.method for chart in self.all_charts() for series in chart.series]
        readings = [reading.method for example in self.examples for reading in example.readings]
        layers = [method for example in self.layered for method in example.readings]
        return list(dict.fromkeys([*rows, *lines, *readings, *layers]))

    def all_charts(self) -> list[Chart]:
        """List the learning curves, then the charts of all panels."""
        return [*self.charts, *(chart for panel in self.panels for chart in panel.charts)]
