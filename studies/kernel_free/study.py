"""Plan and train the runs of the study. All arms of a seed have the same initial weights, batches and dropout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from studies.engine import TimeLimit, check, train_missing
from studies.kernel_free.systems import ARMS, NUDGED, System
from torch import nn

from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Task, as_task
from repulsive.lab.runs.plan import plan
from repulsive.lab.systems.registry import make_task

NUDGE = 1e-3  # relative change of the initial weights of the nudged arm


def spec_of(system: System, arm: str, seed: int, data: Path, out: Path, changes: Sequence[str] = ()) -> Spec:
    """Specify the run of an arm with a seed.

    Args:
        system: one of `SYSTEMS`.
        arm: one of `ARMS`.
        seed: the seed.
        data: folder of prepared datasets.
        out: folder of all runs.
        changes: further `key=value` changes.
    """
    every = [*system.all_changes(arm), *changes]
    root = out / "nudged" if arm == NUDGED else out
    (spec,) = plan([system.recipe(arm)], every, seed=seed, out=root, device="cpu")
    recipe: Any = spec.recipe
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, folder=data / system.data))
    return dataclasses.replace(spec, recipe=recipe)


def train(
    systems: Mapping[str, System], seeds: int, data: Path, out: Path, limit: TimeLimit, changes: Sequence[str] = ()
) -> None:
    """Train all runs that have not finished, the nudged ones last.

    Args:
        systems: name -> system.
        seeds: number of seeds of systems that do not set their own.
        data: folder of prepared datasets.
        out: folder of all runs.
        limit: runs that would exceed it are left for a later call.
        changes: further `key=value` changes.
    """
    most = max(system.seeds or seeds for system in systems.values())
    planned = [(seed, system) for seed in range(most) for system in systems.values() if seed < (system.seeds or seeds)]
    for arms, make in ((ARMS[:-1], make_task), ((NUDGED,), make_nudged)):
        specs = [spec_of(system, arm, seed, data, out, changes) for seed, system in planned for arm in arms]
        unique = {spec.folder: spec for spec in specs}  # two systems may share the runs of plain training
        for spec in unique.values():
            check(spec)
        train_missing(list(unique.values()), ", ".join(arms), limit=limit, make=make, here=True)


def make_nudged(recipe: Recipe) -> Task:
    """Make the task of a recipe with slightly different initial weights."""
    return as_task(_Nudged(make_task(recipe), recipe.seed))


class _Nudged:
    """A task whose initial weights are multiplied by 1 + `NUDGE` times normal noise."""

    def __init__(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed

    def model(self) -> nn.Module:
        model = self._task.model()
        draw = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + NUDGE * torch.randn(weight.shape, generator=draw))
        return model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)
