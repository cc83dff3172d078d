"""What the paper prints, read from `published.toml`: numbers, claims, and notes where the two do not agree."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Better = Literal["higher", "lower", "same"]


@dataclass(frozen=True)
class Claim:
    """One thing the paper says, small enough to be tested.

    Args:
        artefact: the table or figure it belongs to.
        text: what is said.
        source: where.
        data: data set of the paper.
        first: row that is said to be better.
        second: row that it is compared with.
        metric: in what.
        better: "higher", "lower", or "same": no further apart than `within`.
        within: of "same", in the metric's units.
        contradicted: the numbers the paper prints say otherwise.
    """

    artefact: str
    text: str
    source: str
    data: str
    first: str
    second: str
    metric: str
    better: Better = "higher"
    within: float = 0.0
    contradicted: bool = False


@dataclass(frozen=True)
class Published:
    """The whole file; use `published()`."""

    tree: Mapping[str, Any]

    def value(self, artefact: str, data: str, row: str, metric: str) -> float | None:
        """A printed number; None where there is none."""
        found = self.tree["values"].get(artefact, {}).get(data, {}).get(row, {}).get(metric)
        return None if found is None else float(found)

    def source(self, artefact: str) -> str:
        """Where the numbers of an artefact stand."""
        return str(self.tree["values"].get(artefact, {}).get("source", ""))

    def about(self, artefact: str) -> str:
        """How the paper got them; "" where there is nothing to say."""
        return str(self.tree["values"].get(artefact, {}).get("about", ""))

    def dataset(self, name: str) -> Mapping[str, Any]:
        """Sizes of a data set of the paper; nothing for any other."""
        found: Mapping[str, Any] = self.tree["datasets"].get(name, {})
        return found

    def claims(self, artefact: str) -> list[Claim]:
        """Claims of an artefact, one for each data set, pair of rows and metric."""
        return [claim for entry in self.tree["claims"] if entry["artefact"] == artefact for claim in _claims(entry)]

    def notes(self, artefact: str) -> list[str]:
        """What does not fit in the paper, where it matters to an artefact."""
        return [entry["text"] for entry in self.tree["notes"] if artefact in entry["artefacts"]]


@cache
def published() -> Published:
    """The paper's numbers."""
    return Published(tomllib.loads((files("repulsive.lab.paper") / "published.toml").read_text(encoding="utf-8")))


def _claims(entry: Mapping[str, Any]) -> list[Claim]:
    metrics = entry["metric"] if isinstance(entry["metric"], list) else [entry["metric"]]
    told = {name: entry[name] for name in ("better", "within") if name in entry}
    return [
        Claim(
            entry["artefact"],
            entry["text"],
            entry["source"],
            data,
            first,
            second,
            metric,
            contradicted=data in entry.get("against", ()),
            **told,
        )
        for data in entry["data"]
        for first, second in entry["pairs"]
        for metric in metrics
    ]
