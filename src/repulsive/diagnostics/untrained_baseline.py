"""Compare the similarity of heads with untrained twins, to test whether it exceeds chance.

A value is *more alike than chance* (or *more different*) if it is outside the twins' mean plus or minus three standard
deviations, and more than 0.02 from that mean. A standard deviation of three twins is imprecise, and too small in some
layers by chance. Therefore the root mean square of the standard deviations over all layers is used if it is larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from repulsive.diagnostics.circuits import TOKENS, Similarities, Similarity, circuit_similarity
from repulsive.diagnostics.untrained_twin import untrained_twin
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
    """Null distribution of one measure in one layer: its values for untrained twins.

    Args:
        values: the value of each twin.
        pooled: root mean square of the standard deviations of all layers.
    """

    values: tuple[float, ...] = ()
    pooled: float = 0.0

    @property
    def mean(self) -> float:
        """Mean over twins; nan without twins."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over twins; nan for fewer than two twins, and for layers with a single head."""
        return math.nan if len(self.values) < 2 or math.isnan(self.mean) else statistics.stdev(self.values)

    def verdict(self, value: float) -> str:
        """Compare `value` with the twins, as defined at the top of this file."""
        difference = value - self.mean
        if math.isnan(difference) or math.isnan(self.deviation):
            return UNKNOWN
        if abs(difference) <= max(DEVIATIONS * self.deviation, DEVIATIONS * self.pooled, MARGIN):
            return AS_CHANCE
        return MORE_ALIKE if difference > 0 else MORE_DIFFERENT


@dataclass(frozen=True, eq=False)
class Compared:
    """Similarity of the heads of one layer, with its null distribution.

    Args:
        similarity: similarity in the model.
        mean: mean cosine of each twin's heads.
        largest: largest cosine of a pair of each twin's heads.
    """

    similarity: Similarity
    mean: Null = Null()
    largest: Null = Null()

    @property
    def verdict(self) -> str:
        """Verdict on the mean cosine."""
        return self.mean.verdict(self.similarity.mean)

    @property
    def pair_verdict(self) -> str:
        """Verdict on the most similar pair. A low mean can hide duplicates: u, u, -u, -u has the mean -1/3."""
        return self.largest.verdict(self.similarity.largest)


@dataclass(frozen=True, eq=False)
class AgainstChance:
    """Similarity of heads in every layer, with its null distribution.

    Args:
        logits: similarity of attention logits, one entry per layer.
        ov: similarity of OV circuits, one entry per layer.
        notes: reasons why layers were not measured, or why there are no twins.
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
    """Measure the similarity of attention logits and OV circuits, in a model and in untrained twins.

    Twins read at most two of the batches and 512 tokens. They are built one at a time, which needs memory for a second
    model.

    Args:
        model: any module with heads that `find_heads` finds; it does not change.
        batches: as in `circuit_similarity`.
        tokens: number of tokens to sample for the model itself.
        twins: number of twins; with 0 every verdict is "cannot say".
        seed: random seed of the token samples and of the twins' weights.
        groups: the result of `find_heads` for all parts; None calls it.

    Raises:
        HeadLayoutError: no layer has queries and keys that can be recorded.
    """
    own = circuit_similarity(model, batches, tokens=tokens, seed=seed, groups=groups)
    notes = [f"{name or 'the model'}: similarity is not measured: {why}" for name, why in own.left_out.items()]
    step = max(1, len(batches) // TWIN_BATCHES)
    twin_batches = batches[step - 1 :: step][:TWIN_BATCHES]
    measured: list[Similarities] = []
    try:
        for number in range(twins):
            twin = untrained_twin(model, seed + number)
            needs_example = groups is not None and _inferred(groups)
            twin_groups = find_heads(twin, twin_batches[0]) if needs_example else find_heads(twin)
            measured.append(
                circuit_similarity(twin, twin_batches, tokens=min(tokens, TWIN_TOKENS), seed=seed, groups=twin_groups)
            )
    except (NoTwin, HeadLayoutError) as error:
        notes.append(f"similarity is not compared with untrained twins: {error}")
        measured = []
    return AgainstChance(
        _compared(own.logits, [twin.logits for twin in measured]),
        _compared(own.ov, [twin.ov for twin in measured]),
        tuple(notes),
    )


def _inferred(groups: Sequence[HeadGroup]) -> bool:
    """Check whether any group was inferred from example inputs."""
    return any(group.family == "inferred" for group in groups)


def _compared(own: Sequence[Similarity], twins: Sequence[Sequence[Similarity]]) -> list[Compared]:
    by_layer = [[each for twin in twins for each in twin if each.name == layer.name] for layer in own]
    means = _nulls([[each.mean for each in layer] for layer in by_layer])
    largest = _nulls([[each.largest for each in layer] for layer in by_layer])
    return [Compared(*each) for each in zip(own, means, largest, strict=True)]


def _nulls(values: Sequence[Sequence[float]]) -> list[Null]:
    """Compute the null distribution of each layer from the values of the twins."""
    variances = [Null(tuple(layer)).deviation ** 2 for layer in values]
    finite = [variance for variance in variances if not math.isnan(variance)]
    pooled = math.sqrt(statistics.fmean(finite)) if finite else 0.0
    return [Null(tuple(layer), pooled) for layer in values]
