"""From words on a command line to runs: which recipes, which changes, which seeds, into which folders."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from repulsive.errors import ConfigError
from repulsive.recipes import open_recipe
from repulsive.training.launch import Spec

_LONGEST = 120


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
    specs = []
    for name in recipes:
        recipe = open_recipe(name, changes)
        for number in range(seeds) if seeds else [recipe.seed if seed is None else seed]:
            folder = out / folder_name(name, changes) / f"seed-{number}"
            specs.append(Spec(dataclasses.replace(recipe, seed=number), folder, device))
    folders = [spec.folder for spec in specs]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(f"two runs would share the folder {folder}; give recipes of different names")
    return specs


def folder_name(recipe: str, changes: Sequence[str] = ()) -> str:
    """`yelp/svgd` with `method.alpha=0.3` -> `yelp/svgd+alpha=0.3`."""
    name = Path(recipe).stem if recipe.endswith(".toml") else recipe
    short = []
    for change in changes:
        key, _, value = change.partition("=")
        short.append(re.sub(r"[^\w.=-]+", "_", f"{key.rpartition('.')[2]}={value}"))
    full = "+".join([name, *short])
    if len(full) <= _LONGEST:
        return full
    return f"{name}+{hashlib.sha256(full.encode()).hexdigest()[:12]}"


def check_device(device: str | None) -> None:
    """Raise unless `device` is None, "cpu", or "cuda" with a GPU there."""
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': there is no CUDA device here")
