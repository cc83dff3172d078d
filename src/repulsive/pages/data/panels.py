"""Content of a section: charts, grids of heads, tables, and the panel that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Point = tuple[float, float]
Band = tuple[float, float, float]  # x, low, high


@dataclass(frozen=True)
class Series:
    """Data of one method in a chart.

    Args:
        method: name of the method; its position among the methods of the page determines colour and dash.
        points: (x, y) pairs with increasing x. For bars: (left edge, height), and a last point with the right edge
            of the last bar.
        band: (x, low, high) around the points: spread over seeds, or a confidence interval.
        mark: "line", "dots", "bars", or "fit" for a thin line that was fitted, not measured.
        sizes: areas of the dots relative to the largest, one for each point; if empty, all are equal.
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
            raise ValueError(
                f"series of {self.method!r}: bars need a left edge each and the right edge of the last one"
            )


@dataclass(frozen=True)
class Chart:
    """A chart of one quantity against another, such as training loss against steps.

    Args:
        name: title above the chart.
        series: one or more for each method.
        x_name: label of the horizontal axis.
        y_name: label of the vertical axis; "" if the title says it.
        note: a sentence below the chart.
        x_limits: limits of the horizontal axis; None: those of the points.
        y_limits: limits of the vertical axis; None: those of the points.
        x_ticks: ticks of the horizontal axis; if empty, round numbers.
        x_log: logarithmic horizontal axis; all x must be positive.
        diagonal: draw y = x, the line of perfect calibration.
        file: file name of the figure for papers, without suffix; "" to derive it from `name`.
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
            raise ValueError(f"chart {self.name!r}: a logarithmic axis needs x > 0")


@dataclass(frozen=True, eq=False)
class Grid:
    """Similarity of each pair of heads of a method.

    Args:
        method: name of the method.
        values: [M, M]: 1 for identical heads, 0 for unrelated heads, -1 for opposite heads.
        what: name of the similarity measure, such as "overlap".
        layer: name of the layer of these heads, for models with several layers.
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
            raise ValueError(f"{self.what} of {self.method!r}: expected finite values [heads, heads], got {shape}")


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Table with one value per head: rows are layers or runs, columns are heads.

    Args:
        caption: description of the values.
        rows: names of the layers, or of the runs.
        values: [L, M]; NaN if a row has fewer heads.
        weight: [L, M], not negative: determines the colour of each cell.
        digits: decimals shown.
    """

    caption: str
    rows: Sequence[str]
    values: Tensor
    weight: Tensor
    digits: int = 3

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.rows) or self.values.shape != self.weight.shape:
            raise ValueError(f"{self.caption}: values {list(self.values.shape)} for {len(self.rows)} rows")


@dataclass(frozen=True)
class Sheet:
    """Plain table of text cells.

    Args:
        caption: description of the table.
        columns: column headers, including that of the first column.
        rows: one text per column.
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
    """A section of the page. Empty fields are omitted.

    Args:
        title: section heading.
        lead: paragraphs on what the section shows and how to read it.
        grids: similarity of heads; grids of the same measure form a row.
        charts: charts.
        sheets: plain tables.
        notes: what could not be measured, and why.
        heads: tables with one value per head.
    """

    title: str
    lead: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    charts: Sequence[Chart] = ()
    sheets: Sequence[Sheet] = ()
    notes: Sequence[str] = ()
    heads: Sequence[HeadTable] = ()
