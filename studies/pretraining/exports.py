"""Pre-training that leaves its model, as `repulsive export` writes it, at every look at the development set."""

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


class SavedPretraining(PretrainingTask):
    """As `PretrainingTask`; where it looks after every epoch, folders `out/020`, ... have the models, by per cent.

    Args:
        recipe: the training, of whose settings `training.evaluate_every` is 0.
        out: where its models go.
    """

    def __init__(self, recipe: Pretraining, out: Path) -> None:
        super().__init__(recipe)
        self._out, self._epoch = out, 0

    def order(self, epoch: int) -> Sequence[BlockBatch]:
        self._epoch = epoch  # also where a training goes on
        return super().order(epoch)

    def validate(self, model: nn.Module) -> Evaluation:
        folder = self._out / percent(self._epoch + 1, self.recipe.training.epochs)
        if not (folder / CONFIG).is_file():
            save_model(model, self.data.pieces, folder)
        return self.evaluate(model, "dev")


def percent(part: int, parts: int) -> str:
    """Name of the folder of a model after some parts of its training."""
    return f"{round(100 * part / parts):03d}"


def exports_of(recipe: Recipe, out: Path) -> Path:
    """Where the models of a training go: `out/svgd/seed-0` for the label "SVGD"."""
    return out / re.sub(r"\W+", "-", recipe.label.lower()).strip("-") / f"seed-{recipe.seed}"


def make_saving(recipe: Recipe, out: Path) -> Task:
    """The task of a recipe; a function of a module, so that other processes find it."""
    return SavedPretraining(cast(Pretraining, recipe), exports_of(recipe, out))
