"""Similarity of heads against chance: the same measure on untrained twins, and a verdict in words.

A value is *more alike than chance* (or *more different*) where it is outside the twins' mean plus or minus three
standard deviations, and more than 0.02 from that mean. Three twins give a rough standard deviation, which is small by
luck in some layers: where it is below the root mean square over all layers, that is taken instead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from repulsive.diagnostics.circuits import TOKENS, Similarities, Similarity, circuit_similarity
from repulsive.diagnostics.twins import untrained_twin
from repulsive.errors import HeadLayoutError, NoTwin
from repulsive.heads import HeadGroup, find_heads

TWINS = 3
TWIN_TOKENS = 512
TWIN_BATCHES = 2
DEVIATIONS, MARGIN = 3.0, 0.02
MORE_ALIKE, AS_CHANCE, MORE_DIFFERENT, UNKNOWN = (
    "more alike than chance",
    "as chance",
    "more different than chance",
    "cannot say",
)


@dataclass(frozen=True)
class Null:
    """Values of one measure for the untrained twins of one layer.

    Args:
        values: one per twin.
        pooled: root mean square of the standard deviations of all layers.
    """

    values: tuple[float, ...] = ()
    pooled: float = 0.0

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over twins; nan for fewer than two, and for layers of one head."""
        return math.nan if len(self.values) < 2 or math.isnan(self.mean) else statistics.stdev(self.values)

    def verdict(self, value: float) -> str:
        """How `value` compares with the twins: see the top of this file."""
        apart = value - self.mean
        if math.isnan(apart) or math.isnan(self.deviation):
            return UNKNOWN
        if abs(apart) <= max(DEVIATIONS * self.deviation, DEVIATIONS * self.pooled, MARGIN):
            return AS_CHANCE
        return MORE_ALIKE if apart > 0 else MORE_DIFFERENT


@dataclass(frozen=True, eq=False)
class Compared:
    """Similarity of the heads of one layer beside that of untrained twins.

    Args:
        similarity: of the model.
        mean: mean cosine of each twin's heads.
        largest: largest cosine of a pair of each twin's heads.
    """

    similarity: Similarity
    mean: Null = Null()
    largest: Null = Null()

    @property
    def verdict(self) -> str:
        """On the mean cosine."""
        return self.mean.verdict(self.similarity.mean)

    @property
    def pair_verdict(self) -> str:
        """On the most similar pair. Duplicates can hide behind a low mean: u, u, -u, -u has the mean -1/3."""
        return self.largest.verdict(self.similarity.largest)


@dataclass(frozen=True, eq=False)
class AgainstChance:
    """Similarity of heads in every layer, with its null.

    Args:
        logits: attention logits, layer by layer.
        ov: OV circuits, layer by layer.
        notes: layers that are not measured, and why; why there is no null.
    """

    logits: list[Compared] = field(default_factory=list)
    ov: list[Compared] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def against_chance(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    tokens: int = TOKENS,
    twins: int = TWINS,
    seed: int = 0,
    groups: Sequence[HeadGroup] | None = None,
) -> AgainstChance:
    """Measure similarity of attention logits and OV circuits, for a model and for untrained twins of it.

    Twins read at most two of the batches and 512 tokens. One exists at a time: memory for a second model is needed.

    Args:
        model: any module with heads that `find_heads` finds; it stays as it is.
        batches: as in `circuit_similarity`.
        tokens: how many to sample for the model itself.
        twins: how many; 0: no null, and every verdict is "cannot say".
        seed: chooses tokens and the weights of twins.
        groups: what `find_heads` returned for all parts; None: found here.

    Raises:
        HeadLayoutError: no layer has queries and keys that can be read.
    """
    own = circuit_similarity(model, batches, tokens=tokens, seed=seed, groups=groups)
    notes = [f"{name or 'the model'}: similarity is not measured: {why}" for name, why in own.left_out.items()]
    step = max(1, len(batches) // TWIN_BATCHES)
    read = batches[step - 1 :: step][:TWIN_BATCHES]
    measured: list[Similarities] = []
    try:
        for number in range(twins):
            twin = untrained_twin(model, seed + number)
            theirs = find_heads(twin) if groups is None or _by_table(groups) else find_heads(twin, read[0])
            measured.append(circuit_similarity(twin, read, tokens=min(tokens, TWIN_TOKENS), seed=seed, groups=theirs))
    except (NoTwin, HeadLayoutError) as error:
        notes.append(f"similarity has no null: {error}")
        measured = []
    return AgainstChance(
        _compared(own.logits, [twin.logits for twin in measured]),
        _compared(own.ov, [twin.ov for twin in measured]),
        tuple(notes),
    )


def _by_table(groups: Sequence[HeadGroup]) -> bool:
    """Were all groups found without example inputs?"""
    return all(group.family != "inferred" for group in groups)


def _compared(own: Sequence[Similarity], twins: Sequence[Sequence[Similarity]]) -> list[Compared]:
    theirs = [[each for twin in twins for each in twin if each.name == layer.name] for layer in own]
    means = _nulls([[each.mean for each in layer] for layer in theirs])
    largest = _nulls([[each.largest for each in layer] for layer in theirs])
    return [Compared(*each) for each in zip(own, means, largest, strict=True)]


def _nulls(values: Sequence[Sequence[float]]) -> list[Null]:
    """One per layer."""
    variances = [Null(tuple(layer)).deviation ** 2 for layer in values]
    known = [variance for variance in variances if not math.isnan(variance)]
    pooled = math.sqrt(statistics.fmean(known)) if known else 0.0
    return [Null(tuple(layer), pooled) for layer in values]
