"""All tables and figures of the paper, by id."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from repulsive.errors import ConfigError
from repulsive.lab.paper.artefact import Artefact
from repulsive.lab.paper.classifier_figures import AttentionMaps, Calibration, Entropy
from repulsive.lab.paper.figure2_redundancy import Redundancy
from repulsive.lab.paper.figure3_head_counts import HeadCounts
from repulsive.lab.paper.graph_texts import SampleTexts
from repulsive.lab.paper.method_tables import TABLES
from repulsive.lab.paper.table3_glue import GlueTable
from repulsive.lab.paper.table5_judgements import JudgementTable

ALL = "all"
CLAIMS = "claims"  # not a table of the paper: all claims and the committed results

_TABLES: dict[str, Artefact] = {table.id: table for table in TABLES}
ARTEFACTS: dict[str, Artefact] = {
    "table1": _TABLES["table1"],
    "table2": _TABLES["table2"],
    "table3": GlueTable(),
    "table4": _TABLES["table4"],
    "table5": JudgementTable(),
    "sgld": _TABLES["sgld"],
    "priors": _TABLES["priors"],
    "modules": _TABLES["modules"],
    "cosine": _TABLES["cosine"],
    "attention-maps": AttentionMaps(),
    "redundancy": Redundancy(),
    "heads": HeadCounts(),
    "calibration": Calibration(),
    "entropy": Entropy(),
    "sample": SampleTexts(),
}
FIGURES = ("attention-maps", "redundancy", "heads", "calibration", "entropy")  # artefacts that Matplotlib draws


def find(ids: Sequence[str]) -> list[Artefact]:
    """Look up artefacts by id, each once, in the order of `ARTEFACTS`; "all" selects all artefacts.

    Raises:
        ConfigError: an id is unknown; the message suggests similar ids. Or "claims" is among other ids.
    """
    if CLAIMS in ids:
        raise ConfigError(f"{CLAIMS} is made from committed results and trains nothing; run it alone")
    for name in ids:
        if name not in ARTEFACTS and name != ALL:
            near = get_close_matches(name, [*ARTEFACTS, ALL, CLAIMS], n=3, cutoff=0.4)
            choices = ", ".join([*ARTEFACTS, ALL, CLAIMS])
            hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {choices}"
            raise ConfigError(f"unknown table or figure {name!r}; {hint}")
    return [artefact for name, artefact in ARTEFACTS.items() if name in ids or ALL in ids]
