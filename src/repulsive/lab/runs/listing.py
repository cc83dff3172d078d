"""Recipes and runs, as lists to read."""

from __future__ import annotations

from pathlib import Path

from repulsive.errors import RepulsiveError
from repulsive.lab.engine.config import read
from repulsive.lab.engine.runs import RECIPE, RunFolder
from repulsive.lab.systems.registry import find, from_tables, names

_SHOWN = ("bleu", "matthews", "spearman", "accuracy", "nats_per_byte", "nll")


def describe_recipes() -> str:
    """Name and label of every built-in recipe."""
    found = [(name, str(read(find(name)).get("label", "")), _comment(find(name))) for name in names()]
    width, wide = max(len(name) for name, *_ in found), max(len(label) for _, label, _ in found)
    lines = [f"  {name:{width}}  {label:{wide}}  {comment}".rstrip() for name, label, comment in found]
    return "\n".join(["recipes (repulsive train NAME):", *lines])


def describe_runs(folder: Path) -> str:
    """One line for every run below a folder: finished, or how far."""
    paths = sorted(path.parent for path in folder.rglob(RECIPE)) if folder.is_dir() else []
    if not paths:
        return f"no runs in {folder}"
    width = max(len(str(path)) for path in paths)
    return "\n".join([f"runs in {folder}:", *(f"  {path!s:{width}}  {_told(RunFolder(path))}" for path in paths)])


def _told(run: RunFolder) -> str:
    """The state of a run; one that is damaged must not hide the others."""
    try:
        return _state(run)
    except RepulsiveError as error:
        return f"cannot be read: {error}"


def _state(run: RunFolder) -> str:
    result = run.result
    if result is not None:
        test = run.metrics("test")
        shown = "  ".join(f"{name} {test[name]:.4f}" for name in _SHOWN if name in test)
        warning = f"  collapsed at step {step:,}" if (step := run.collapsed) is not None else ""
        return f"done in {float(result.get('seconds', 0)):.0f} s  test {shown}{warning}"
    if run.diverged:
        return "diverged; diverged.txt says where"
    lines = [line for line in run.lines() if line["kind"] == "train"]
    epochs = from_tables(run.recipe, str(run.path)).training.epochs
    if not lines:
        return f"begun, {epochs} epochs to go"
    epoch, loss = (run.curve("train", key) for key in ("epoch", "loss"))
    if not epoch or not loss:
        return f"begun, {epochs} epochs in all"
    return f"epoch {epoch[-1][1]:.2f} of {epochs}  loss {loss[-1][1]:.4f}"


def _comment(path: Path) -> str:
    """The second comment line of a recipe; the first is the command that runs it."""
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return lines[1] if len(lines) > 1 else ""
