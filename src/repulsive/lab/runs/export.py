"""`repulsive export`: write a pre-trained run as a folder for the package transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from repulsive.errors import RunError
from repulsive.lab.runs.score import load_trained, only_run
from repulsive.lab.systems.electra.export import check_free, save_model
from repulsive.lab.systems.electra.task import PretrainingTask


def export(folder: Path, out: Path) -> list[Path]:
    """Write the best model of a finished pre-training run.

    Args:
        folder: folder of the run, or of a recipe with a single seed.
        out: the folder to make: the discriminator, or the model of BERT's objective, with its tokenizer; the generator
            goes into the subfolder `generator`.

    Returns:
        The folders of the written models.

    Raises:
        RunError: the run has not finished or is of another task, or `out` exists or cannot be written.
    """
    run = only_run(folder)
    if run.recipe.get("task") != "electra":
        raise RunError(f"{run.path}: is a run of {run.recipe.get('task')}; only pre-training is exported")
    if run.result is None:
        raise RunError(f"{run.path}: has not finished; rerun the command that started it")
    check_free(out)
    task, model = load_trained(run, torch.device("cpu"))
    assert isinstance(task, PretrainingTask)
    return save_model(model, task.data.pieces, out)
