"""What a report shows, as plain data. Nothing here is drawn, and what cannot be drawn is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from repulsive.metrics.compare import Comparison
from repulsive.pages.layered import Layered
from repulsive.pages.panels import Chart, Panel


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Args:
        name: what stands above the column.
        better: "higher", "lower", or "neither" for a number that is only described.
        digits: decimals shown.
        percent: the numbers are shares and are shown times 100.
        meaning: one sentence for readers who do not know the metric.
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
    """A number of the table.

    Args:
        mean: over seeds.
        sd: standard deviation over seeds; None for one seed.
        paired: the method minus the baseline on the same seeds and items, where that was compared.
    """

    mean: float
    sd: float | None = None
    paired: Comparison | None = None


@dataclass(frozen=True)
class Row:
    """A method and its numbers, one cell per metric; None where it has none.

    Args:
        method: its name, the same in charts and readings.
        cells: in the order of the metrics.
        control: it is there to tell causes apart, not to win.
    """

    method: str
    cells: Sequence[Cell | None]
    control: bool = False


@dataclass(frozen=True)
class Table:
    """Methods by metrics.

    Args:
        metrics: the columns.
        rows: the methods.
        baseline: the method the others are compared with.
        caption: what the numbers are of.
        notes: what the numbers show and what they do not, a paragraph each.
        level: largest p-value that counts as a difference.
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
            raise ValueError(f"baseline {self.baseline!r} is none of the methods {names}")
        for row in self.rows:
            if len(row.cells) != len(self.metrics):
                raise ValueError(f"row {row.method!r} has {len(row.cells)} cells for {len(self.metrics)} metrics")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a method makes of an example.

    Args:
        method: its name.
        predicted: the class it chooses, in words.
        probability: that it gives to this class.
        attention: weights [M, T], one head per row, padding cut off.
    """

    method: str
    predicted: str
    probability: float
    attention: Tensor | Sequence[Sequence[float]]

    def weights(self) -> Tensor:
        """The attention as float64 [M, T]."""
        return torch.as_tensor(self.attention, dtype=torch.float64).detach().cpu()


@dataclass(frozen=True, eq=False)
class Example:
    """A text and what the methods make of it.

    Args:
        tokens: its T words.
        label: the true class, in words.
        readings: one per method, in the same order in every example.
        evidence: for each aspect the positions of the words that speak of it.
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
                raise ValueError(f"{shape} does not fit {count} tokens: need [heads, {count}], padding cut off")
            if not weights.isfinite().all() or (weights < 0).any():
                raise ValueError(f"attention of {reading.method!r} has negative, infinite or missing weights")
        for aspect, places in self.evidence.items():
            if not all(0 <= place < count for place in places):
                raise ValueError(f"evidence of {aspect!r} at {list(places)} lies outside of {count} tokens")


@dataclass(frozen=True, eq=False)
class Content:
    """All a report shows; parts that are empty are not drawn.

    Args:
        title: of the page.
        lead: what was done, in a sentence or two.
        facts: (name, value): data set, sizes, seeds, versions, command, seconds.
        table: the results.
        charts: learning curves.
        examples: for the attention explorer, one layer whose heads read a text as a whole.
        layered: for the attention explorer of models with layers; a page has examples of one kind.
        threshold: least attention of one head on an aspect's evidence that counts as covering it.
        panels: further sections; where one of them has grids, the heads of the examples are not compared again.
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
            raise ValueError("a page has one attention explorer: give examples or layered, not both")
        seen = {tuple((r.method, len(r.attention)) for r in example.readings) for example in self.examples}
        if len(seen) > 1:
            raise ValueError(f"examples differ in their methods or numbers of heads: {sorted(seen)}")

    def methods(self) -> list[str]:
        """Every method once, in the order of the table, then of the charts and the readings."""
        rows = [row.method for row in self.table.rows] if self.table else []
        lines = [series.method for chart in self.all_charts() for series in chart.series]
        readings = [reading.method for example in self.examples for reading in example.readings]
        layers = [method for example in self.layered for method in example.readings]
        return list(dict.fromkeys([*rows, *lines, *readings, *layers]))

    def all_charts(self) -> list[Chart]:
        """Learning curves, then the charts of the panels."""
        return [*self.charts, *(chart for panel in self.panels for chart in panel.charts)]
