"""All tables and figures of the paper by id."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Protocol

from repulsive.errors import ConfigError
from repulsive.lab.paper.classifier_figures import AttentionMaps, Calibration, Entropy
from repulsive.lab.paper.comparison import TABLES
from repulsive.lab.paper.datasets import DataSet
from repulsive.lab.paper.glue import GlueTable
from repulsive.lab.paper.head_figure import HeadFigure
from repulsive.lab.paper.judged import JudgedTable
from repulsive.lab.paper.outcome import Report
from repulsive.lab.paper.running import Options, RunSet, Tell
from repulsive.lab.paper.texts import SampleFigure
from repulsive.lab.paper.translator_figures import Redundancy

ALL = "all"


class Artefact(Protocol):
    """A table or figure."""

    @property
    def id(self) -> str:
        """What the command line calls it."""
        ...

    @property
    def title(self) -> str:
        """What it shows."""
        ...

    @property
    def source(self) -> str:
        """Where it is in the paper."""
        ...

    def needs(self, options: Options) -> list[DataSet]:
        """Data sets that have to be prepared."""
        ...

    def rows(self, options: Options) -> list[RunSet]:
        """Runs that have to be trained."""
        ...

    def report(self, options: Options, tell: Tell) -> Report:
        """What runs that have ended come to; pages and figures are written."""
        ...


_TABLES: dict[str, Artefact] = {table.id: table for table in TABLES}
ARTEFACTS: dict[str, Artefact] = {
    "table1": _TABLES["table1"],
    "table2": _TABLES["table2"],
    "table3": GlueTable(),
    "table4": _TABLES["table4"],
    "table5": JudgedTable(),
    "sgld": _TABLES["sgld"],
    "priors": _TABLES["priors"],
    "modules": _TABLES["modules"],
    "cosine": _TABLES["cosine"],
    "attention-maps": AttentionMaps(),
    "redundancy": Redundancy(),
    "heads": HeadFigure(),
    "calibration": Calibration(),
    "entropy": Entropy(),
    "sample": SampleFigure(),
}
FIGURES = ("attention-maps", "redundancy", "heads", "calibration", "entropy")  # these are drawn by Matplotlib


def find(ids: Sequence[str]) -> list[Artefact]:
    """Artefacts by id, each once, in the paper's order; "all" is all of them.

    Raises:
        ConfigError: an id is unknown; the nearest ones are named.
    """
    for name in ids:
        if name not in ARTEFACTS and name != ALL:
            near = get_close_matches(name, [*ARTEFACTS, ALL], n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(ARTEFACTS)}, {ALL}"
            raise ConfigError(f"{name!r}: is no table or figure of the paper; {hint}")
    return [artefact for name, artefact in ARTEFACTS.items() if name in ids or ALL in ids]
