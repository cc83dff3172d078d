"""Look up tasks and recipe classes by name, and make tasks from recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError
from repulsive.lab.engine import config
from repulsive.lab.engine.built_in import read_recipe
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import apply_changes
from repulsive.lab.engine.task import Task, as_task
from repulsive.lab.systems.classification.task import Classification, ClassificationTask
from repulsive.lab.systems.electra.task import Pretraining, PretrainingTask
from repulsive.lab.systems.glue.task import Glue, GlueTask
from repulsive.lab.systems.graphs.task import GraphWriting, GraphWritingTask
from repulsive.lab.systems.lm.task import LanguageModel, LanguageModelTask
from repulsive.lab.systems.translation.task import Translation, TranslationTask

KINDS: dict[str, tuple[type[Recipe], Any]] = {
    "classification": (Classification, ClassificationTask),
    "translation": (Translation, TranslationTask),
    "electra": (Pretraining, PretrainingTask),
    "glue": (Glue, GlueTask),
    "graphs": (GraphWriting, GraphWritingTask),
    "lm": (LanguageModel, LanguageModelTask),
}


def open_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Open a recipe and apply `key=value` changes.

    Args:
        name: a TOML file, or the name of a built-in recipe, such as "yelp/svgd".
        changes: such as "optimizer.lr=0.001".

    Raises:
        ConfigError: there is no such recipe, or it has an unknown key or an invalid value.
    """
    return from_tables(apply_changes(read_recipe(name), changes), str(name))


def from_tables(tables: dict[str, Any], source: str) -> Recipe:
    """Make a recipe from nested tables, as a run folder stores them."""
    task = tables.get("task")
    if not isinstance(task, str) or task not in KINDS:
        raise ConfigError(f"{source}: task must be one of {', '.join(KINDS)}, not {task!r}")
    return config.build(KINDS[task][0], tables, source=source)


def make_task(recipe: Recipe) -> Task:
    """Make the task of a recipe and read its data.

    Raises:
        DataError: the data are missing or damaged.
        ConfigError: the class of the task lacks required members.
    """
    return as_task(KINDS[recipe.task][1](recipe))


def restore_task(recipe: Recipe, assets: Mapping[str, bytes]) -> Task:
    """Rebuild the task of a trained run from the assets in its folder, without its data; see `Task.restore`."""
    return as_task(KINDS[recipe.task][1].restore(recipe, assets))
