"""The paper's numbers and claims, and notes on its inconsistencies, read from `published.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Better = Literal["higher", "lower", "same"]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper that one comparison can test.

    Args:
        artefact: the table or figure it belongs to.
        text: the claim in words.
        source: where it is in the paper.
        data: the paper's dataset.
        first: row that is claimed to be better.
        second: row that `first` is compared with.
        metric: the metric that is compared.
        better: "higher", "lower", or "same": the difference is at most `within`.
        within: margin of "same", in the metric's units.
        contradicted: the paper's own numbers contradict the claim.
        gain: the paper's difference, first - second; None if it does not print both numbers.
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
    gain: float | None = None


@dataclass(frozen=True)
class Published:
    """The content of `published.toml`; use `published()`."""

    tree: Mapping[str, Any]

    def value(self, artefact: str, data: str, row: str, metric: str) -> float | None:
        """Return a number that the paper prints; None if the paper does not print it."""
        number = self.tree["values"].get(artefact, {}).get(data, {}).get(row, {}).get(metric)
        return None if number is None else float(number)

    def source(self, artefact: str) -> str:
        """Return the place where the paper prints the numbers of an artefact."""
        return str(self.tree["values"].get(artefact, {}).get("source", ""))

    def about(self, artefact: str) -> str:
        """Return how the paper computed the numbers of an artefact; "" if nothing is recorded."""
        return str(self.tree["values"].get(artefact, {}).get("about", ""))

    def dataset(self, name: str) -> Mapping[str, Any]:
        """Return the sizes of one of the paper's datasets; empty for any other dataset."""
        facts: Mapping[str, Any] = self.tree["datasets"].get(name, {})
        return facts

    def claims(self, artefact: str) -> list[Claim]:
        """List the claims about an artefact, one for each dataset, pair of rows and metric."""
        expanded = [claim for entry in self.tree["claims"] if entry["artefact"] == artefact for claim in _expand(entry)]
        return [replace(claim, gain=self._gain(claim)) for claim in expanded]

    def notes(self, artefact: str) -> list[str]:
        """List the inconsistencies in the paper that concern an artefact."""
        return [entry["text"] for entry in self.tree["notes"] if artefact in entry["artefacts"]]

    def _gain(self, claim: Claim) -> float | None:
        first, second = (self._number(claim, row) for row in (claim.first, claim.second))
        return None if first is None or second is None else first - second

    def _number(self, claim: Claim, row: str) -> float | None:
        if claim.artefact == "table3":  # claims name its columns as datasets
            return self.value("table3", "glue", row, claim.data)
        if claim.artefact == "table5":  # claims name its rows as metrics
            return self.value("table5", claim.data, claim.metric, row)
        return self.value(claim.artefact, claim.data, row, claim.metric)


@cache
def published() -> Published:
    """Load the paper's numbers and claims."""
    return Published(tomllib.loads((files("repulsive.lab.paper") / "published.toml").read_text(encoding="utf-8")))


def _expand(entry: Mapping[str, Any]) -> list[Claim]:
    """Expand an entry of `published.toml` to one claim for each dataset, pair of rows and metric."""
    metrics = entry["metric"] if isinstance(entry["metric"], list) else [entry["metric"]]
    optional = {name: entry[name] for name in ("better", "within") if name in entry}
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
            **optional,
        )
        for data in entry["data"]
        for first, second in entry["pairs"]
        for metric in metrics
    ]
