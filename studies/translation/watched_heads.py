"""Translation whose heads are measured at every look at the development set: how long they are, how alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from repulsive.heads import HeadGroup, find_heads
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Task
from repulsive.lab.systems.translation.task import Translation, TranslationTask


class WatchedTranslation(TranslationTask):
    """As `TranslationTask`; lines "dev" of `metrics.jsonl` also have `norm` and, of two heads or more, `cosine`."""

    _groups: Sequence[HeadGroup] = ()  # of the one model that is trained

    def validate(self, model: nn.Module) -> Evaluation:
        found = super().validate(model)
        self._groups = self._groups or find_heads(model)
        return dataclasses.replace(found, metrics=found.metrics | measure(self._groups))


def make_task(recipe: Recipe) -> Task:
    """The task of a recipe, its data read; a function of a module, so that other processes find it."""
    return WatchedTranslation(cast(Translation, recipe))


def measure(groups: Sequence[HeadGroup]) -> dict[str, float]:
    """Mean norm of a head of a projection, and mean cosine of two of the same one, over all projections.

    Args:
        groups: of one size.
    """
    heads = torch.stack([group.read().float() for group in groups])  # [groups, M, D]
    norms = heads.norm(dim=-1)  # [groups, M]
    found = {"norm": float(norms.mean())}
    count = heads.shape[1]
    if count > 1:
        units = heads / norms.clamp(min=1e-12).unsqueeze(-1)
        total = units.sum(1).square().sum(-1) - units.square().sum((-1, -2))  # [groups]: both orders of every pair
        found["cosine"] = float(total.mean()) / (count * (count - 1))
    return found
