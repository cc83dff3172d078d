"""Training without files: for studies whose many short runs leave one record each."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from studies.altered_forces import alter_force

from repulsive.lab.engine.loop import Loop
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.task import Evaluation
from repulsive.particles.rule import Rule


class SilentFolder(RunFolder):
    """Run folder without a log of the training."""

    def rewind(self, step: int) -> None:
        pass

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        pass


class UnsavedLoop(Loop):
    """Training loop that writes no checkpoints, weights or answers; it keeps the evaluations instead."""

    evaluations: dict[str, Evaluation]
    force = ""  # altered force of the rule, see `altered_forces`

    def _rule(self) -> Rule | None:
        rule = super()._rule()
        return alter_force(rule, self.force) if self.force else rule

    def _save(self, spare: int = 0) -> None:
        self._check_all()
        self._saved_at, self._saved_step = time.monotonic(), self.step

    def _finish(self, result: dict[str, Any], best: dict[str, Any], parts: dict[str, Evaluation]) -> dict[str, Any]:
        self.evaluations = parts
        return result
