"""From words on a command line to runs: which recipes, which changes, which seeds, into which folders."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine.launch import Spec
from repulsive.lab.systems.registry import open_recipe

_LONGEST = 120  # bytes; file systems take 255
_AMBIGUOUS = {"layers", "precision", "schedule"}  # keys of more than one table


def plan(
    recipes: Sequence[str],
    changes: Sequence[str] = (),
    *,
    seed: int | None = None,
    seeds: int = 0,
    out: Path = Path("runs"),
    device: str | None = None,
) -> list[Spec]:
    """One spec for every recipe and seed, in `out/NAME/seed-N`.

    Args:
        recipes: files or built-in names.
        changes: `key=value`, for all of them; they become part of the folder's name.
        seed: a single seed; None: the recipe's own.
        seeds: seeds 0, 1, ... instead; 0: one run.
        out: folder of all runs.
        device: "cpu", "cuda" or None.

    Raises:
        ConfigError: a recipe is not there or does not fit, the device is unknown or missing, or two runs would share
            a folder.
    """
    check_device(device)
    if seed is not None and seeds:
        raise ConfigError("give --seed or --seeds, not both")
    if seeds and any(change.partition("=")[0].strip() == "seed" for change in changes):
        raise ConfigError("--set seed=...: --seeds trains seeds 0, 1, ...; give one of the two")
    specs = []
    for name in recipes:
        own = open_recipe(name, changes).seed
        for number in range(seeds) if seeds else [own if seed is None else seed]:
            recipe = open_recipe(name, [*changes, f"seed={number}"])
            specs.append(Spec(recipe, out / folder_name(name, changes) / f"seed-{number}", device))
    folders = [spec.folder for spec in specs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"two runs would share the folder {folder}; give recipes of different names")
    return specs


def folder_name(recipe: str, changes: Sequence[str] = ()) -> str:
    """`yelp/svgd` with `method.alpha=0.3` -> `yelp/svgd+alpha=0.3`; a file counts by its name alone.

    Whatever the values, the name stays below the folder of runs and within what file systems take; two that differ
    only in characters that no name can have may come out alike, and then the run's folder says so.
    """
    path = Path(recipe)
    name = path.name.removesuffix(".toml") if path.suffix == ".toml" or path.is_file() else recipe
    short = []
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        leaf = key.rpartition(".")[2]
        short.append(re.sub(r"[^\w.=-]+", "_", f"{key if leaf in _AMBIGUOUS else leaf}={value}"))
    full = "+".join([name, *short])
    if len(full.encode()) <= _LONGEST:
        return full
    return f"{name}+{hashlib.sha256(full.encode()).hexdigest()[:12]}"


def check_device(device: str | None) -> None:
    """Raise unless `device` is None, "cpu", or "cuda" with a GPU there."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': there is no CUDA device here")
