"""Compare the similarity of heads with untrained twins, to test whether it exceeds chance.

The range of chance is the twins' mean plus or minus three standard deviations, at least 0.02. A standard deviation of
three twins is imprecise, and too small in some layers by chance. Therefore the root mean square of the standard
deviations over all layers is used if it is larger. A value is *more alike than chance* (or *more different*) if its
confidence interval over sequences lies entirely above (below) that range, and *as chance* if the value is inside the
range. The verdict is *cannot say* if there is no interval (one sequence) or no twin, if the interval reaches into the
range although the value is outside, or if it covers the whole range.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from repulsive.diagnostics.captured_similarity import captured_similarity
from repulsive.diagnostics.circuits import TOKENS, Similarity, circuit_similarity
from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.untrained_twin import untrained_twin
from repulsive.errors import HeadLayoutError, NoTwin
from repulsive.heads import HeadGroup, find_heads

Space = Literal["logits", "ov", "attention", "outputs", "cka"]
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

    def verdict(self, value: float, interval: tuple[float, float] | None = None) -> str:
        """Compare `value` with the twins, as defined at the top of this file; it is exact if no interval is given."""
        low, high = (bound - self.mean for bound in interval or (value, value))
        if math.isnan(low) or math.isnan(high) or math.isnan(self.deviation):
            return UNKNOWN
        width = max(DEVIATIONS * self.deviation, DEVIATIONS * self.pooled, MARGIN)
        if low > width:
            return MORE_ALIKE
        if high < -width:
            return MORE_DIFFERENT
        is_inside, covers_all = abs(value - self.mean) <= width, low < -width and high > width
        return AS_CHANCE if is_inside and not covers_all else UNKNOWN


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
        return self._verdict(self.mean, self.similarity.mean, self.similarity.interval)

    @property
    def pair_verdict(self) -> str:
        """Verdict on the most similar pair. A low mean can hide duplicates: u, u, -u, -u has the mean -1/3."""
        return self._verdict(self.largest, self.similarity.largest, self.similarity.pair_interval)

    def _verdict(self, null: Null, value: float, interval: tuple[float, float] | None) -> str:
        is_resampled = self.similarity.left_out is not None
        return UNKNOWN if is_resampled and interval is None else null.verdict(value, interval)


@dataclass(frozen=True, eq=False)
class AgainstChance:
    """Similarity of heads in every layer, with its null distribution: one list per space, one entry per layer.

    Args:
        logits: similarity of attention logits (QK circuits).
        ov: similarity of OV circuits.
        attention: similarity of attention weights.
        outputs: similarity of contributions after the output projection.
        cka: linear CKA of these contributions.
        notes: reasons why layers were not measured, or why there are no twins.
    """

    logits: list[Compared] = field(default_factory=list)
    ov: list[Compared] = field(default_factory=list)
    attention: list[Compared] = field(default_factory=list)
    outputs: list[Compared] = field(default_factory=list)
    cka: list[Compared] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def against_chance(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    spaces: Sequence[Space] = ("logits", "ov"),
    tokens: int = TOKENS,
    twins: int = TWINS,
    seed: int = 0,
    groups: Sequence[HeadGroup] | None = None,
    out: dict[str, str] | None = None,
) -> AgainstChance:
    """Measure the similarity of heads in a model and in untrained twins.

    Twins read at most two of the batches and 512 tokens. They are built one at a time, which needs memory for a second
    model.

    Args:
        model: any module with heads that `find_heads` finds; it does not change.
        batches: as in `circuit_similarity`. Intervals and verdicts need at least two sequences.
        spaces: any of "logits", "ov", "attention", "outputs" and "cka".
        tokens: number of tokens to sample for the logits and OV circuits of the model itself.
        twins: number of twins; with 0 every verdict is "cannot say".
        seed: random seed of the token samples and of the twins' weights.
        groups: the result of `find_heads` for all parts; None calls it.
        out: as in `find_attention_layers`.

    Raises:
        HeadLayoutError: no layer has queries and keys that can be recorded.
    """
    groups = find_heads(model) if groups is None else groups
    own, left_out = _measure(model, batches, spaces, groups, out, tokens, seed)
    notes = [f"{name or 'the model'}: similarity is not measured: {why}" for name, why in left_out.items()]
    step = max(1, len(batches) // TWIN_BATCHES)
    twin_batches = batches[step - 1 :: step][:TWIN_BATCHES]
    measured: list[dict[Space, list[Similarity]]] = []
    try:
        for number in range(twins):
            twin = untrained_twin(model, seed + number)
            twin_groups = find_heads(twin, twin_batches[0]) if _inferred(groups) else find_heads(twin)
            twin_tokens = min(tokens, TWIN_TOKENS)
            measured.append(_measure(twin, twin_batches, spaces, twin_groups, out, twin_tokens, seed)[0])
    except (NoTwin, HeadLayoutError) as error:
        notes.append(f"similarity is not compared with untrained twins: {error}")
        measured = []
    compared = {space: _compared(own[space], [twin[space] for twin in measured]) for space in spaces}
    return AgainstChance(**compared, notes=tuple(notes))


def _measure(
    model: nn.Module,
    batches: Sequence[Any],
    spaces: Sequence[Space],
    groups: Sequence[HeadGroup],
    out: dict[str, str] | None,
    tokens: int,
    seed: int,
) -> tuple[dict[Space, list[Similarity]], dict[str, str]]:
    """Measure one model in several spaces; also return {layer: why it is left out}."""
    result: dict[Space, list[Similarity]] = {}
    left_out: dict[str, str] = {}
    if "logits" in spaces or "ov" in spaces:
        circuits = circuit_similarity(model, batches, tokens=tokens, seed=seed, groups=groups)
        result |= {"logits": circuits.logits, "ov": circuits.ov}
        left_out = circuits.left_out
    for space in spaces:
        if space == "attention" or space == "outputs" or space == "cka":
            layers = find_attention_layers(model, groups, out=out)
            result[space] = captured_similarity(model, batches, layers, space)
    return result, left_out


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
