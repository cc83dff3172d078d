"""`repulsive translate`: open a trained translator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.runs.score import load_trained, only_run
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.lab.systems.translation.translate import Search
from repulsive.lab.text.pieces import Pieces


def open_translator(
    folder: Path, device: str | None = None, *, beam: int | None = None, lenpen: float | None = None, nbest: int = 1
) -> tuple[Transformer, Pieces, Search]:
    """Load model, tokenizer and search settings of a finished run, for `translate_lines`.

    Args:
        folder: folder of the run, or of a recipe with a single seed.
        device: "cpu", "cuda" or None for the default.
        beam: beam size, as in `Search`; None: the recipe's.
        lenpen: length penalty, as in `Search`; None: the recipe's.
        nbest: number of translations per line that will be requested.

    Raises:
        RunError: the run has not finished, is of another task, or there are several seeds.
        ConfigError: a setting is out of range.
    """
    run = only_run(folder)
    if run.recipe.get("task") != "translation":
        raise RunError(f"{run.path}: is a run of {run.recipe.get('task')}, not of translation")
    task, model = load_trained(run, chosen_device(device))
    assert isinstance(task, TranslationTask) and isinstance(model, Transformer)
    given = {name: value for name, value in (("beam", beam), ("lenpen", lenpen)) if value is not None}
    try:
        search = replace(task.recipe.search, **given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not 1 <= nbest <= search.beam:
        raise ConfigError(f"nbest={nbest}: at least 1, and at most the beam, {search.beam}")
    return model, task.pieces, search
