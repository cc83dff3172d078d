"""A translation task that also measures the heads at every evaluation on the development set."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive import HeadMonitor
from repulsive.heads import HeadGroup, find_heads
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Task
from repulsive.lab.systems.translation.task import Translation, TranslationTask
from repulsive.lab.text.pieces import BOS
from repulsive.lab.text.prepared import Part
from repulsive.monitoring.measurement import LayerMeasurement, Measurement

PROBE = 16  # sentence pairs on which attention is measured
ATTENTION = ("entropy", "largest_logit", "similarity")
KINDS = ("encoder", "decoder", "cross")


class MeasuringTranslationTask(TranslationTask):
    """`TranslationTask` whose "dev" lines in `metrics.jsonl` also have numbers about the heads.

    `norm` and, with several heads, `cosine` of the weights (`measure_heads`); `entropy`, `largest_logit` and
    `similarity` of the attention, and `token_cosine` of the encoder (`measure_attention`).
    """

    _groups: Sequence[HeadGroup] = ()  # of the one model that is trained
    _monitor: HeadMonitor | None = None

    def validate(self, model: nn.Module) -> Evaluation:
        evaluation = super().validate(model)
        self._groups = self._groups or find_heads(model)
        if self._monitor is None:
            self._monitor = HeadMonitor(model, every=1, probe=probe_of(self.parts["dev"]), items=PROBE)
        measured = measure_heads(self._groups) | measure_attention(self._monitor.measure())
        return dataclasses.replace(evaluation, metrics=evaluation.metrics | measured)


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


def probe_of(part: Part, count: int = PROBE) -> tuple[Tensor, Tensor]:
    """Choose sentence pairs without padding: sources of the most frequent length, and beginnings of their targets.

    Args:
        part: sentence pairs.
        count: maximum number of pairs.

    Returns:
        Source tokens [B, S], and target tokens shifted right [B, T].
    """
    source, target = (side.lengths.cpu() for side in part.sentences)
    alike = (source == source.mode().values).nonzero().flatten()
    chosen = alike[target[alike] >= target[alike].median()][:count]
    tokens, after = (side.padded(chosen.to(part.labels.device), None)[0].long() for side in part.sentences)
    return tokens, F.pad(after[:, : int(target[chosen].min()) - 1], (1, 0), value=BOS)


def measure_attention(measurement: Measurement) -> dict[str, float]:
    """Entropy of attention in nats, largest logit of a head, and cosine between the logits of two heads.

    Means over heads and layers: of all layers, as `entropy`, and of each kind of attention, as `entropy/cross`. Further
    `token_cosine`, the mean cosine between the encoder's outputs for two tokens of a sentence. If it is near 1,
    cross-attention cannot tell tokens apart: all have the same key and the same value.

    Args:
        measurement: of the head monitor.
    """
    metrics: dict[str, float] = {}
    for kind in ("", *KINDS):
        layers = [layer for layer in measurement.layers if kind in ("", _kind_of(layer))]
        for name in ATTENTION:
            values = [x for layer in layers for x in _values(layer, name)]
            if values:
                metrics[f"{name}/{kind}" if kind else name] = statistics.fmean(values)
    *_, metrics["token_cosine"] = (layer.tokens for layer in measurement.layers if _kind_of(layer) == "encoder")
    return metrics


def _kind_of(layer: LayerMeasurement) -> str:
    return "cross" if "cross_attention" in layer.name else layer.name.split(".")[0]


def _values(layer: LayerMeasurement, name: str) -> Sequence[float]:
    if name == "similarity":
        return [cosine for _, _, cosine in layer.pairs]
    values: Sequence[float] = getattr(layer, name)
    return values
