"""Lists of recipes and runs for `repulsive ls`, as tables and as data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from repulsive.errors import RepulsiveError
from repulsive.lab.engine import built_in
from repulsive.lab.engine.config import as_tables
from repulsive.lab.engine.recipe_tables import as_toml
from repulsive.lab.engine.run_reader import RECIPE
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.systems.registry import from_tables, open_recipe
from repulsive.terminal.table import Table, three_digits

_METRICS = ("bleu", "matthews", "spearman", "accuracy", "nats_per_byte", "nll")
DONE, DIVERGED, TRAINING, DAMAGED = "done", "diverged", "training", "cannot be read"


def list_recipes(pattern: str = "") -> list[dict[str, str]]:
    """List the built-in recipes whose name or label contains `pattern`, sorted by name.

    Returns:
        The keys name, dataset, label and description of each recipe.
    """
    entries = [
        {
            "name": name,
            "dataset": name.split("/")[0],
            "label": str(recipe.tables()["label"]),
            "description": recipe.description,
        }
        for name, recipe in built_in.recipes().items()
    ]
    return [entry for entry in entries if _matches(pattern, entry["name"], entry["label"])]


def describe_recipes(pattern: str = "", full: bool = False) -> list[Table | str]:
    """Make one table of recipes per dataset.

    Args:
        pattern: list recipes whose name or label contains this text.
        full: show the description of each recipe.
    """
    entries = list_recipes(pattern)
    if not entries:
        return []
    columns = ["name", "label", *(["description"] if full else [])]
    widths = [max(len(entry[column]) for entry in entries) for column in ("name", "label")]
    blocks: list[Table | str] = []
    for dataset, group in groupby(entries, key=lambda entry: entry["dataset"]):
        rows = [[entry[column] for column in columns] for entry in group]
        blocks.append(Table(["recipe", "method", *columns[2:]], rows, dataset, () if full else widths))
    return [*blocks, "repulsive train NAME trains a recipe; repulsive ls NAME shows its settings."]


def is_pattern(word: str, folder: Path) -> bool:
    """Check that a word is not the name of a recipe, but part of the name of a recipe or of a run below a folder."""
    if word.endswith(".toml") or word in built_in.recipes():
        return False
    return bool(list_recipes(word) or _run_folders(folder, word))


def recipe_settings(name: str) -> dict[str, Any]:
    """Return a recipe with all its settings, defaults included.

    Args:
        name: a TOML file, or the name of a built-in recipe.

    Raises:
        ConfigError: there is no such recipe, or it has an unknown key or an invalid value.
    """
    return as_tables(open_recipe(name))


def describe_recipe(name: str) -> str:
    """Format a recipe with all its settings as TOML; arguments and errors as in `recipe_settings`."""
    return f"# repulsive train {name}\n{as_toml(recipe_settings(name))}".rstrip()


def list_runs(folder: Path, pattern: str = "") -> list[dict[str, Any]]:
    """List the runs below a folder whose path contains `pattern`.

    Returns:
        For each run: folder, state ("done", "diverged", "training" or "cannot be read"), epoch and epochs, seconds of
        a finished run, test metrics, the step at which the model collapsed, and an error message.
    """
    return [_entry(RunFolder(path)) for path in _run_folders(folder, pattern)]


def describe_runs(folder: Path, pattern: str = "") -> list[Table | str]:
    """Make a table of all runs below a folder: state, and test scores or training loss."""
    entries = list_runs(folder, pattern)
    if not entries:
        return [f"no runs in {folder}{f' match {pattern!r}' if pattern else ''}"]
    rows = [[str(entry["folder"]), *_cells(entry)] for entry in entries]
    return [Table(["run", "state", "result"], rows, f"runs in {folder}")]


def _run_folders(folder: Path, pattern: str) -> list[Path]:
    paths = sorted(path.parent for path in folder.rglob(RECIPE)) if folder.is_dir() else []
    return [path for path in paths if _matches(pattern, str(path.relative_to(folder)))]


def _matches(pattern: str, *texts: str) -> bool:
    return any(pattern.lower() in text.lower() for text in texts)


def _entry(run: RunFolder) -> dict[str, Any]:
    """Describe a run; for a damaged run, return its error message instead of raising it."""
    entry: dict[str, Any] = {"folder": run.path, "state": DAMAGED, "epoch": None, "epochs": None, "loss": None}
    entry |= {"seconds": None, "test": {}, "collapsed": None, "error": None}
    try:
        return entry | _state(run)
    except RepulsiveError as error:
        return entry | {"error": str(error)}


def _state(run: RunFolder) -> dict[str, Any]:
    result = run.result
    if result is not None:
        seconds = float(result.get("seconds", 0))
        return {"state": DONE, "seconds": seconds, "test": run.metrics("test"), "collapsed": run.collapsed}
    if run.diverged:
        return {"state": DIVERGED}
    epoch, loss = (run.curve("train", key) for key in ("epoch", "loss"))
    return {
        "state": TRAINING,
        "epoch": epoch[-1][1] if epoch else 0.0,
        "epochs": from_tables(run.recipe, str(run.path)).training.epochs,
        "loss": loss[-1][1] if loss else None,
    }


def _cells(entry: dict[str, Any]) -> tuple[str, str]:
    if entry["state"] == DAMAGED:
        return DAMAGED, str(entry["error"])
    if entry["state"] == DIVERGED:
        return DIVERGED, "see diverged.txt"
    if entry["state"] == TRAINING:
        if entry["loss"] is None:
            return "started", f"0 of {entry['epochs']} epochs"
        loss = f"loss {three_digits(entry['loss'])}"
        return f"epoch {entry['epoch']:.2f} of {entry['epochs']}", loss
    warning = "" if entry["collapsed"] is None else f"collapsed at step {entry['collapsed']:,}"
    return f"done in {entry['seconds']:,.0f} s", ", ".join([*_scores(entry["test"]), *([warning] if warning else [])])


def _scores(metrics: dict[str, float]) -> Iterable[str]:
    return [f"{name} {three_digits(metrics[name])}" for name in _METRICS if name in metrics]
