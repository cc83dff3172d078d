"""Finished runs, opened and checked: which methods, which seeds, and that they speak of the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

from repulsive.errors import RunError
from repulsive.lab.engine import tables
from repulsive.lab.engine.runs import DIVERGED, RunFolder

PARTS = {"test": "test set", "dev": "development set"}


@dataclass(frozen=True, eq=False)
class Method:
    """The runs of one recipe.

    Args:
        label: what the report calls it; no other method has the same.
        folder: of its runs.
        runs: seed -> run that has ended.
        unfinished: seeds that have not.
    """

    label: str
    folder: Path
    runs: dict[int, RunFolder]
    unfinished: tuple[int, ...] = ()

    @property
    def first(self) -> RunFolder:
        """The run with the lowest seed."""
        return self.runs[min(self.runs)]

    def tables(self) -> dict[str, Any]:
        """The recipe."""
        return self.first.recipe

    def curves(self, kind: str, key: str) -> list[list[tuple[float, float]]]:
        """For each seed the (step, value) pairs of a quantity in `metrics.jsonl`; seeds without any are left out."""
        return [points for run in self.runs.values() if (points := run.curve(kind, key))]


def open_methods(folders: Sequence[Path]) -> list[Method]:
    """The methods of some folders, in their order.

    Raises:
        RunError: a folder is none of runs, has none that has ended, is given twice, or was trained on other data.
    """
    found: list[Method] = []
    for folder in folders:
        runs = tables.runs_in(folder)
        if not runs:
            raise RunError(f"{folder}: is no run, nor a folder of runs; `repulsive ls` lists those there are")
        ended = {seed: run for seed, run in runs.items() if run.result is not None}
        if not ended and all(run.diverged for run in runs.values()):
            raise RunError(f"{folder}: every run here diverged; {DIVERGED} in its folder says where")
        if not ended:
            raise RunError(f"{folder}: no run here has ended; the command that trained it goes on where it stopped")
        if any(realpath(folder) == realpath(method.folder) for method in found):
            raise RunError(f"{folder}: is given twice")
        unfinished = tuple(seed for seed in runs if seed not in ended)
        found.append(Method(tables.label_of(folder, ended), folder, ended, unfinished))
    for method in found:
        for run in method.runs.values():
            if _data(run) != _data(found[0].first):
                raise RunError(
                    f"{run.path}: was trained on other data than {found[0].first.path}; a report compares runs of the "
                    "same data"
                )
    return _told_apart(found)


def open_rows(methods: Sequence[Method], part: str) -> list[tables.Row]:
    """The table of some methods on a part of the data, from the answers the runs keep; the first is the baseline.

    Raises:
        RunError: a run was not evaluated on this part.
    """
    rows = tables.rows([method.folder for method in methods], part)
    return [dataclasses.replace(row, label=method.label) for row, method in zip(rows, methods, strict=True)]


def facts(methods: Sequence[Method]) -> list[tuple[str, str]]:
    """Heads, time, device and versions of some runs, for the top of a page."""
    runs = [run for method in methods for run in method.runs.values()]
    seconds = sum(float((run.result or {}).get("seconds", 0)) for run in runs)
    told = (method.tables().get("model", {}).get("heads") for method in methods)
    heads = sorted({m for m in told if isinstance(m, int) and m})
    started = methods[0].first.facts.get("started", {})
    versions = found if isinstance(found := started.get("versions"), dict) else {}
    return [
        ("heads", ", ".join(map(str, heads)) or "as the recipe has them"),
        ("trained in", f"{seconds:,.0f} s, {len(runs)} run{'' if len(runs) == 1 else 's'}"),
        ("device", str(started.get("device", "unknown"))),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in ("repulsive", "torch") if name in versions)),
    ]


def part_name(part: str) -> str:
    """A part of the data in words."""
    return PARTS.get(part, f"test set {part}")


def _data(run: RunFolder) -> dict[str, str]:
    """Checksums of the texts a run was trained on; word vectors may differ."""
    sums: dict[str, str] = run.facts.get("data", {})
    return {name: digest for name, digest in sums.items() if name != "vectors.safetensors"}


def _told_apart(methods: Sequence[Method]) -> list[Method]:
    """Methods of the same label get the name of their folder beside it, and its parent's where that is not enough."""
    labels = [method.label for method in methods]
    named = [_name(method.folder, 1) for method in methods]
    found = []
    for method, name in zip(methods, named, strict=True):
        same = [other for other, label in zip(named, labels, strict=True) if label == method.label]
        depth = 1 if same.count(name) == 1 else len(method.folder.parts)
        apart = f"{method.label} ({_name(method.folder, depth)})"
        found.append(method if len(same) == 1 else dataclasses.replace(method, label=apart))
    return found


def _name(folder: Path, depth: int) -> str:
    return "/".join(folder.parts[-depth:])
