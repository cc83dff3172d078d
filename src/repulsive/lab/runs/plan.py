"""Plan runs from command-line arguments: recipes, changes and seeds, each with its folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.recipe_tables import is_file_name
from repulsive.lab.systems.registry import open_recipe
from repulsive.loggers.open_loggers import check_loggers

_MAX_BYTES = 120  # maximum length of a folder name; file systems allow 255
_AMBIGUOUS = {"layers", "precision", "schedule"}  # keys that occur in more than one table


def plan(
    recipes: Sequence[str],
    changes: Sequence[str] = (),
    *,
    seed: int | None = None,
    seeds: int = 0,
    out: Path = Path("runs"),
    device: str | None = None,
    loggers: Sequence[str] = (),
) -> list[Spec]:
    """Plan one run for every recipe and seed, in the folder `out/NAME/seed-N`.

    Args:
        recipes: TOML files or names of built-in recipes.
        changes: `key=value`, for all recipes; they become part of the folder's name.
        seed: a single seed; None: the recipe's own.
        seeds: number of seeds, from 0; 0: one run.
        out: folder of all runs.
        device: "cpu", "cuda" or None.
        loggers: names of loggers besides TensorBoard.

    Raises:
        ConfigError: a recipe is missing or invalid, the device or a logger is unknown or missing, or two runs would
            share a folder.
    """
    check_device(device)
    check_loggers(loggers)
    if seed is not None and seeds:
        raise ConfigError("give --seed or --seeds, not both")
    if seeds and any(change.partition("=")[0].strip() == "seed" for change in changes):
        raise ConfigError("give --set seed=... or --seeds, not both")
    specs = []
    for name in recipes:
        own = open_recipe(name, changes).seed
        for number in range(seeds) if seeds else [own if seed is None else seed]:
            recipe = open_recipe(name, [*changes, f"seed={number}"])
            specs.append(Spec(recipe, out / folder_name(name, changes) / f"seed-{number}", device, tuple(loggers)))
    folders = [spec.folder for spec in specs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"two runs would share the folder {folder}; give recipes of different names")
    return specs


def folder_name(recipe: str, changes: Sequence[str] = ()) -> str:
    """Name the folder of a run: `yelp/svgd` with `method.alpha=0.3` -> `yelp/svgd+alpha=0.3`.

    A recipe file is named without its folder. Characters that are unsafe in file names become underscores, and long
    names end with a hash. If two recipes get the same name, training the second one raises an error.
    """
    name = Path(recipe).name.removesuffix(".toml") if is_file_name(recipe) else recipe
    short = []
    for change in changes:
        key, _, value = (part.strip() for part in change.partition("="))
        leaf = key.rpartition(".")[2]
        short.append(re.sub(r"[^\w.=-]+", "_", f"{key if leaf in _AMBIGUOUS else leaf}={value}"))
    full = "+".join([name, *short])
    if len(full.encode()) <= _MAX_BYTES:
        return full
    return f"{name}+{hashlib.sha256(full.encode()).hexdigest()[:12]}"


def check_device(device: str | None) -> None:
    """Check that `device` is None, "cpu", or "cuda" on a machine with a GPU.

    Raises:
        ConfigError: the device is unknown, or there is no GPU.
    """
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': no CUDA device was found; use cpu")
