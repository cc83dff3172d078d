"""Lists of recipes and runs, as text for `repulsive ls`."""

from __future__ import annotations

from pathlib import Path

from repulsive.errors import RepulsiveError
from repulsive.lab.engine import built_in
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.recipe_tables import as_toml
from repulsive.lab.engine.runs import RECIPE, RunFolder
from repulsive.lab.systems.registry import from_tables, open_recipe

_METRICS = ("bleu", "matthews", "spearman", "accuracy", "nats_per_byte", "nll")


def describe_recipes() -> str:
    """List name, label and description of every built-in recipe."""
    rows = [(name, recipe.tables()["label"], recipe.description) for name, recipe in built_in.recipes().items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:{widths[0]}}  {label:{widths[1]}}  {description}" for name, label, description in rows]
    return "\n".join(["recipes (repulsive train NAME; repulsive ls NAME shows all settings):", *lines])


def describe_recipe(name: str) -> str:
    """Format a recipe with all its settings, defaults included, as TOML.

    Args:
        name: a TOML file, or the name of a built-in recipe.

    Raises:
        ConfigError: there is no such recipe, or it has an unknown key or an invalid value.
    """
    return f"# repulsive train {name}\n{as_toml(as_tables(open_recipe(name)))}".rstrip()


def describe_runs(folder: Path) -> str:
    """List every run below a folder with its scores, or its progress if it has not finished."""
    paths = sorted(path.parent for path in folder.rglob(RECIPE)) if folder.is_dir() else []
    if not paths:
        return f"no runs in {folder}"
    width = max(len(str(path)) for path in paths)
    return "\n".join([f"runs in {folder}:", *(f"  {path!s:{width}}  {_describe(RunFolder(path))}" for path in paths)])


def _describe(run: RunFolder) -> str:
    """Describe the state of a run; for a damaged run, return its error message instead of raising it."""
    try:
        return _state(run)
    except RepulsiveError as error:
        return f"cannot be read: {error}"


def _state(run: RunFolder) -> str:
    result = run.result
    if result is not None:
        test = run.metrics("test")
        scores = "  ".join(f"{name} {test[name]:.4f}" for name in _METRICS if name in test)
        warning = f"  collapsed at step {step:,}" if (step := run.collapsed) is not None else ""
        return f"done in {float(result.get('seconds', 0)):.0f} s  test {scores}{warning}"
    if run.diverged:
        return "diverged; see diverged.txt"
    epochs = from_tables(run.recipe, str(run.path)).training.epochs
    epoch, loss = (run.curve("train", key) for key in ("epoch", "loss"))
    if not epoch or not loss:
        return f"started, 0 of {epochs} epochs"
    return f"epoch {epoch[-1][1]:.2f} of {epochs}  loss {loss[-1][1]:.4f}"
