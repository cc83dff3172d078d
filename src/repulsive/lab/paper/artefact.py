"""The interface of every table and figure."""

from __future__ import annotations

from typing import Protocol

from repulsive.lab.paper.datasets import Dataset
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import Report
from repulsive.lab.paper.run_sets import RunSet


class Artefact(Protocol):
    """A table or figure of the paper."""

    @property
    def id(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def title(self) -> str:
        """What it shows."""
        ...

    @property
    def source(self) -> str:
        """Where it is in the paper."""
        ...

    def required_datasets(self, options: Options) -> list[Dataset]:
        """Datasets that have to be prepared."""
        ...

    def run_sets(self, options: Options) -> list[RunSet]:
        """Runs that have to be trained."""
        ...

    def report(self, options: Options, log: Log) -> Report:
        """Evaluate the finished runs; write pages and figures."""
        ...
