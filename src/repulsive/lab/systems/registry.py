"""Look up tasks and recipe classes by name, and make tasks from recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from repulsive.errors import ConfigError, RuleError
from repulsive.lab.engine import config
from repulsive.lab.engine.built_in import read_recipe
from repulsive.lab.engine.methods import make_rule
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.recipe_tables import apply_changes
from repulsive.lab.engine.task import Task, as_task
from repulsive.lab.systems.classification.task import Classification, ClassificationTask
from repulsive.lab.systems.electra.task import Pretraining, PretrainingTask
from repulsive.lab.systems.glue.task import Glue, GlueTask
from repulsive.lab.systems.graphs.task import GraphWriting, GraphWritingTask
from repulsive.lab.systems.lm.task import LanguageModel, LanguageModelTask
from repulsive.lab.systems.translation.task import Translation, TranslationTask
from repulsive.plugins import TASKS, load_plugins

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
    recipe = from_tables(apply_changes(read_recipe(name), changes), str(name))
    try:
        make_rule(recipe.method, num_data=1, total_steps=1)
    except RuleError as error:
        raise ConfigError(f"{name}: method: {error}") from None
    return recipe


def from_tables(tables: dict[str, Any], source: str) -> Recipe:
    """Make a recipe from nested tables, as a run folder stores them."""
    task = tables.get("task")
    recipe_class, _ = _kind(task, source)
    return config.build(recipe_class, tables, source=source)


def make_task(recipe: Recipe) -> Task:
    """Make the task of a recipe and read its data.

    Raises:
        DataError: the data are missing or damaged.
        ConfigError: the class of the task lacks required members.
    """
    return as_task(_kind(recipe.task, recipe.label)[1](recipe))


def restore_task(recipe: Recipe, assets: Mapping[str, bytes]) -> Task:
    """The task of a trained run from the assets in its folder, without its data; see `Task.restore`."""
    return as_task(_kind(recipe.task, recipe.label)[1].restore(recipe, assets))


def known_tasks() -> dict[str, tuple[type[Recipe], Any]]:
    """The tasks in `KINDS`, then those that other packages add by entry points."""
    added = load_plugins(TASKS, _problem_of)
    return {**KINDS, **cast("dict[str, tuple[type[Recipe], Any]]", added)}


def _kind(task: object, source: str) -> tuple[type[Recipe], Any]:
    """The recipe class and the task class of a name. Entry points are read only for names that are not built in."""
    known = KINDS if isinstance(task, str) and task in KINDS else known_tasks()
    if not isinstance(task, str) or task not in known:
        choices = f"one of {', '.join(known)}"
        if task is None:
            raise ConfigError(f"{source}: task is missing; write extends = RECIPE, or task = {choices}")
        raise ConfigError(f"{source}: task must be {choices}, not {task!r}")
    return known[task]


def _problem_of(name: str, value: object) -> str:
    if name in KINDS:
        return "a built-in task has this name; choose another"
    if not isinstance(value, tuple) or len(value) != 2:
        return f"expected a pair (recipe class, task class), got {type(value).__name__}"
    if not isinstance(value[0], type) or not issubclass(value[0], Recipe):
        return f"expected a subclass of Recipe as the first of the pair, got {value[0]!r}"
    return "" if isinstance(value[1], type) else f"expected a class as the second of the pair, got {value[1]!r}"
