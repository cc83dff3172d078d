"""What a figure shows, as plain data: lines, dots and bars, grids of heads, and the section they stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Point = tuple[float, float]
Band = tuple[float, float, float]  # x, low, high


@dataclass(frozen=True)
class Series:
    """What a chart shows of a method.

    Args:
        method: its name; the place among the methods of the page chooses its colour and dash.
        points: (x, y) pairs in rising order of x; of bars, (left edge, height), the last closing the last bar.
        band: (x, low, high) around the points: over seeds, or a confidence interval.
        mark: "line", "dots", "bars", or "fit" for a thin line that was computed, not measured.
        sizes: of dots, shares of the largest, one for each point; none: all alike.
    """

    method: str
    points: Sequence[Point]
    band: Sequence[Band] = ()
    mark: Literal["line", "dots", "bars", "fit"] = "line"
    sizes: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.sizes and len(self.sizes) != len(self.points):
            raise ValueError(f"series of {self.method!r}: {len(self.sizes)} sizes for {len(self.points)} points")
        if self.mark == "bars" and len(self.points) < 2:
            raise ValueError(f"series of {self.method!r}: bars need a left edge each and the end of the last")


@dataclass(frozen=True)
class Chart:
    """A quantity against another: "train loss", "accuracy by confidence".

    Args:
        name: what stands above it.
        series: one or more for each method.
        x_name: below the horizontal axis.
        y_name: what the vertical axis is; "" where the name says it.
        note: a sentence below the chart.
        x_limits: ends of the horizontal axis; None: as the points have it.
        y_limits: ends of the vertical axis; None: as the points have it.
        x_ticks: marks of the horizontal axis; none: round numbers.
        x_log: equal factors are equally far apart; all x must be above zero.
        diagonal: draw y = x, where predictions are as sure as they are right.
        file: name of the figure for papers, without an ending; "" to make one of `name`.
    """

    name: str
    series: Sequence[Series]
    x_name: str = "step"
    y_name: str = ""
    note: str = ""
    x_limits: tuple[float, float] | None = None
    y_limits: tuple[float, float] | None = None
    x_ticks: Sequence[float] = ()
    x_log: bool = False
    diagonal: bool = False
    file: str = ""

    def __post_init__(self) -> None:
        if self.x_log and any(x <= 0 for series in self.series for x, *_ in (*series.points, *series.band)):
            raise ValueError(f"chart {self.name!r}: a logarithmic axis has no place for x <= 0")


@dataclass(frozen=True, eq=False)
class Grid:
    """How alike each pair of heads of a method is.

    Args:
        method: its name.
        values: [M, M], 1 for heads that are the same, 0 and below for heads that have nothing in common.
        what: the values are, in a word or two.
        layer: whose heads they are, where there are several layers.
    """

    method: str
    values: Tensor
    what: str = "overlap"
    layer: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer} · {self.method}" if self.layer else self.method

    def __post_init__(self) -> None:
        shape = list(self.values.shape)
        if len(shape) != 2 or shape[0] != shape[1] or not self.values.isfinite().all():
            raise ValueError(f"{self.what} of {self.method!r}: need finite [heads, heads], not {shape}")


@dataclass(frozen=True, eq=False)
class HeadTable:
    """A number for each head of each layer, or of each run.

    Args:
        caption: what the numbers are.
        rows: names of the layers, or of the runs.
        values: [L, M]; nan where there is no such head.
        weight: not negative, [L, M]: how much each counts, which is its colour.
        first: number of the first head.
        digits: decimals shown.
    """

    caption: str
    rows: Sequence[str]
    values: Tensor
    weight: Tensor
    first: int = 0
    digits: int = 3

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.rows) or self.values.shape != self.weight.shape:
            raise ValueError(f"{self.caption}: values {list(self.values.shape)} for {len(self.rows)} rows")


@dataclass(frozen=True)
class Sheet:
    """A plain table of words and numbers that are words already.

    Args:
        caption: what it is of.
        columns: names, that of the first column included.
        rows: as many words each.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.caption!r}: {len(row)} cells for {len(self.columns)} columns in {row}")


@dataclass(frozen=True, eq=False)
class Panel:
    """A section of the page; parts that are empty are not drawn.

    Args:
        title: its heading.
        lead: what it shows and how to read it, a paragraph each.
        grids: how alike heads are, a row of grids for each thing that was measured.
        charts: figures.
        sheets: numbers.
        notes: what could not be measured, and why.
        heads: numbers of single heads.
    """

    title: str
    lead: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    charts: Sequence[Chart] = ()
    sheets: Sequence[Sheet] = ()
    notes: Sequence[str] = ()
    heads: Sequence[HeadTable] = ()
