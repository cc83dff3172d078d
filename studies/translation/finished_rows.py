"""Rows of the study's tables whose runs have finished."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from studies.translation.rows import Row

from repulsive.lab.engine import tables
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation

if TYPE_CHECKING:
    from studies.translation.study import Translation


@dataclass(frozen=True)
class FinishedRow:
    """A row, the folder of its runs, and the finished ones by seed."""

    row: Row
    folder: Path
    runs: dict[int, RunFolder]

    def entry(self, part: str) -> tuple[str, Path, dict[int, Evaluation]]:
        """Label, folder and evaluations by seed, as `tables.table` takes them."""
        evaluations = {seed: Evaluation(run.metrics(part), run.items(part)) for seed, run in self.runs.items()}
        return self.row.label, self.folder, evaluations


def finished_rows(study: Translation, stage: str) -> list[FinishedRow]:
    """Rows of a stage that have a result."""
    folders = [(row, study.row_folder(row, stage)) for row in study.rows(stage)]
    return [FinishedRow(row, folder, tables.finished_in(folder)) for row, folder in folders if tables.ended([folder])]
