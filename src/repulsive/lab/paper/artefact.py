"""The interface that every table and figure of the paper implements."""

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
        """Name of the artefact on the command line."""
        ...

    @property
    def title(self) -> str:
        """Title: what the artefact shows."""
        ...

    @property
    def source(self) -> str:
        """Location in the paper, such as "Table 1"."""
        ...

    def required_datasets(self, options: Options) -> list[Dataset]:
        """List the datasets that have to be prepared."""
        ...

    def run_sets(self, options: Options) -> list[RunSet]:
        """List the runs that have to be trained."""
        ...

    def report(self, options: Options, log: Log) -> Report:
        """Evaluate the finished runs; write pages and figures."""
        ...
