"""The results of a table or figure as data: the paper's numbers, ours, and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repulsive.lab.paper.datasets import PreparedData
from repulsive.lab.paper.published import published
from repulsive.lab.paper.verdicts import Finding
from repulsive.metrics.student import interval

_LABELS = {
    "ma": "MA",
    "frobenius": "MA + R",
    "disagreement": "MA + R",
    "svgd": "SVGD",
    "spos": "SPOS",
    "sgld": "SGLD",
    "sgld-tempered": "SGLD, tempered",
    "spos-tempered": "SPOS, tempered",
    "gaussian": "SVGD, Gaussian prior",
    "big": "Transformer-big",
    "q": "RMA (Q)",
    "k": "RMA (K)",
    "v": "RMA (V)",
    "encoder": "RMA (En)",
    "decoder": "RMA (De)",
    "cross": "RMA (En-De)",
    "first": "RMA (first layer)",
    "last": "RMA (last layer)",
    "cosine-regulariser": "cosine: regulariser",
    "cosine-derivative": "cosine: derivative",
    "cosine-smoothing": "cosine: smoothing",
    "gw": "GW",
    "cosine": "GW + R",
    "rma": "GW + RMA",
}


def label_of(method: str) -> str:
    """Return the name of a method in tables and charts."""
    return _LABELS.get(method, method)


@dataclass(frozen=True)
class Number:
    """A number of a table: the paper's value and ours.

    Args:
        paper: the number that the paper prints; None if it prints none.
        values: our numbers, one for each seed; empty if not measured.
        given_interval: 95 % interval of our mean; None for Student's t over the seeds.
    """

    paper: float | None
    values: Sequence[float] = ()
    given_interval: tuple[float, float] | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.given_interval or interval(self.values)


@dataclass(frozen=True)
class Row:
    """Results of a method on a dataset, a row of the table.

    Args:
        dataset: name of the dataset.
        method: name of the row in `published.toml`.
        label: name of the row in the table.
        seeds: number of finished runs.
        numbers: metric -> number.
        folder: folder of the runs.
    """

    dataset: str
    method: str
    label: str
    seeds: int
    numbers: Mapping[str, Number]
    folder: Path | None = None


@dataclass(frozen=True)
class Report:
    """The results of one table or figure.

    Args:
        id: id of the table or figure.
        title: what it shows.
        source: where in the paper.
        data: the prepared datasets.
        rows: the numbers.
        findings: the verdicts on its claims.
        texts: Markdown between the numbers and the claims.
        files: figures and pages that were written.
        counted: column title that names what the numbers are averaged over.
    """

    id: str
    title: str
    source: str
    data: Sequence[PreparedData] = ()
    rows: Sequence[Row] = ()
    findings: Sequence[Finding] = ()
    texts: Sequence[str] = ()
    files: Sequence[Path] = ()
    counted: str = "seeds"

    @property
    def notes(self) -> list[str]:
        """Inconsistencies in the paper that concern this table or figure."""
        return published().notes(self.id)
