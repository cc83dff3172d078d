"""Recipes and tasks by name: "yelp/svgd" is a file in lab/recipes, "classification" the task of a system."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repulsive.errors import ConfigError
from repulsive.lab.engine import config
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Task, as_task
from repulsive.lab.systems.classification.task import Classification, ClassificationTask
from repulsive.lab.systems.electra.task import Pretraining, PretrainingTask
from repulsive.lab.systems.glue.task import Glue, GlueTask
from repulsive.lab.systems.graphs.task import GraphWriting, GraphWritingTask
from repulsive.lab.systems.lm.task import LanguageModel, LanguageModelTask
from repulsive.lab.systems.translation.task import Translation, TranslationTask

HERE = Path(__file__).parents[1] / "recipes"
KINDS: dict[str, tuple[type[Recipe], Any]] = {
    "classification": (Classification, ClassificationTask),
    "translation": (Translation, TranslationTask),
    "electra": (Pretraining, PretrainingTask),
    "glue": (Glue, GlueTask),
    "graphs": (GraphWriting, GraphWritingTask),
    "lm": (LanguageModel, LanguageModelTask),
}


def names() -> list[str]:
    """Names of the built-in recipes, such as "yelp/svgd"."""
    files = (path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob("*.toml"))
    return sorted(name for name in files if not name.split("/")[-1].startswith("_"))


def find(name: str | Path) -> Path:
    """The file of a recipe, given by its path or by the name of a built-in one.

    Raises:
        ConfigError: it is neither a file nor a built-in recipe.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    built_in = HERE / f"{name}.toml"
    if ".." not in path.parts and not path.is_absolute() and built_in.is_file():
        return built_in
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`repulsive ls` lists the built-in ones"
    raise ConfigError(f"{name}: no such file, nor a built-in recipe; {hint}")


def open_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe, with `key=value` changes.

    Raises:
        ConfigError: there is no such recipe, or a key or value in it is wrong.
    """
    path = find(name)
    return from_tables(config.changed(config.read(path, find), changes), str(name))


def from_tables(tables: dict[str, Any], source: str) -> Recipe:
    """A recipe from nested tables, as a run folder stores them."""
    task = tables.get("task")
    if not isinstance(task, str) or task not in KINDS:
        raise ConfigError(f"{source}: task must be one of {', '.join(KINDS)}, not {task!r}")
    return config.build(KINDS[task][0], tables, source=source)


def make_task(recipe: Recipe) -> Task:
    """The task of a recipe, with its data read.

    Raises:
        DataError: the data are missing or damaged.
        ConfigError: the class of the task lacks required members.
    """
    return as_task(KINDS[recipe.task][1](recipe))


def restore_task(recipe: Recipe, assets: Mapping[str, bytes]) -> Task:
    """The task of a trained run from the assets in its folder, without its data; see `Task.restore`."""
    return as_task(KINDS[recipe.task][1].restore(recipe, assets))
