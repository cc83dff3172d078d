"""A pre-training task that exports its model, as `repulsive export` does, at every evaluation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from torch import nn

from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Task
from repulsive.lab.systems.electra.batches import BlockBatch
from repulsive.lab.systems.electra.export import save_model
from repulsive.lab.systems.electra.task import Pretraining, PretrainingTask
from repulsive.lab.systems.glue.start import CONFIG


class ExportingPretrainingTask(PretrainingTask):
    """`PretrainingTask` that exports a model after every epoch, to `out/020` after 20 % of the epochs.

    Args:
        recipe: the training; its `training.evaluate_every` is 0, so that it evaluates after every epoch.
        out: folder of its models.
    """

    def __init__(self, recipe: Pretraining, out: Path) -> None:
        super().__init__(recipe)
        self._out, self._epoch = out, 0

    def order(self, epoch: int) -> Sequence[BlockBatch]:
        self._epoch = epoch  # right for a resumed training, too
        return super().order(epoch)

    def validate(self, model: nn.Module) -> Evaluation:
        folder = self._out / percent(self._epoch + 1, self.recipe.training.epochs)
        if not (folder / CONFIG).is_file():
            save_model(model, self.data.pieces, folder)
        return self.evaluate(model, "dev")


def percent(part: int, parts: int) -> str:
    """Name of the folder of a model after some of the parts of its training."""
    return f"{round(100 * part / parts):03d}"


def export_folder(recipe: Recipe, out: Path) -> Path:
    """Folder of the models of a training: `out/svgd/seed-0` for the label "SVGD"."""
    return out / re.sub(r"\W+", "-", recipe.label.lower()).strip("-") / f"seed-{recipe.seed}"


def make_exporting_task(recipe: Recipe, out: Path) -> Task:
    """Make the task of a recipe; at module level, so that other processes can import it."""
    return ExportingPretrainingTask(cast(Pretraining, recipe), export_folder(recipe, out))
