"""A translation task that also measures the heads at every evaluation on the development set."""

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


class MeasuringTranslationTask(TranslationTask):
    """`TranslationTask` whose "dev" lines in `metrics.jsonl` also have `norm` and, with several heads, `cosine`."""

    _groups: Sequence[HeadGroup] = ()  # of the one model that is trained

    def validate(self, model: nn.Module) -> Evaluation:
        evaluation = super().validate(model)
        self._groups = self._groups or find_heads(model)
        return dataclasses.replace(evaluation, metrics=evaluation.metrics | measure_heads(self._groups))


def make_task(recipe: Recipe) -> Task:
    """Make the task of a recipe; at module level, so that other processes can import it."""
    return MeasuringTranslationTask(cast(Translation, recipe))


def measure_heads(groups: Sequence[HeadGroup]) -> dict[str, float]:
    """Mean norm of a head, and mean cosine between two heads of a projection, over all projections.

    Args:
        groups: of equal shapes.
    """
    heads = torch.stack([group.read().float() for group in groups])  # [groups, M, D]
    norms = heads.norm(dim=-1)  # [groups, M]
    metrics = {"norm": float(norms.mean())}
    count = heads.shape[1]
    if count > 1:
        units = heads / norms.clamp(min=1e-12).unsqueeze(-1)
        total = units.sum(1).square().sum(-1) - units.square().sum((-1, -2))  # [groups]: both orders of every pair
        metrics["cosine"] = float(total.mean()) / (count * (count - 1))
    return metrics
