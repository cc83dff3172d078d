"""Compare the similarity of heads with untrained twins and with permuted heads, to test whether it exceeds chance.

Untrained twins answer: did training make the heads of this layer alike? Permuted heads (`permuted_heads.py`) answer:
are heads of one layer more alike than heads of different layers of the same model? Both use the same rule.

The range of chance is the mean of the null distribution plus or minus three standard deviations, at least 0.02. A
standard deviation of three twins is imprecise, and too small in some layers by chance. Therefore the root mean square
of the standard deviations over all layers is used if it is larger. A value is *more alike than chance* (or *more
different*) if its confidence interval over sequences lies entirely above (below) that range, and *as chance* if the
value is inside the range. The verdict is *cannot say* if there is no interval (one sequence) or no null distribution,
if the interval reaches into the range although the value is outside, or if it covers the whole range. Permuted heads
are compared with the layer's own value on the same tokens; its interval is as wide as that on all tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from repulsive.diagnostics.captured_similarity import CapturedSpace, captured_similarity
from repulsive.diagnostics.circuits import TOKENS, Similarity, circuit_similarity
from repulsive.diagnostics.hooks.attention_layers import find_attention_layers, hookable_layers
from repulsive.diagnostics.hooks.measured_layers import find_measured_heads
from repulsive.diagnostics.permuted_heads import DRAWS
from repulsive.diagnostics.untrained_twin import untrained_twin
from repulsive.errors import HeadLayoutError, NoTwin
from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import module_of

Space = Literal["logits", "ov", "attention", "outputs", "cka"]
SPACES: tuple[Space, ...] = ("logits", "ov", "attention", "outputs", "cka")
CAPTURED: tuple[CapturedSpace, ...] = ("attention", "outputs", "cka")
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
    """Null distribution of one measure in one layer: its values for untrained twins, or for draws of permuted heads.

    Args:
        values: the value of each twin or draw.
        pooled: root mean square of the standard deviations of all layers.
    """

    values: tuple[float, ...] = ()
    pooled: float = 0.0

    @property
    def mean(self) -> float:
        """Mean of the values; nan if there are none."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation; nan for fewer than two values, and for layers with a single head."""
        return math.nan if len(self.values) < 2 or math.isnan(self.mean) else statistics.stdev(self.values)

    def verdict(self, value: float, interval: tuple[float, float] | None = None) -> str:
        """Compare `value` with the null distribution, as defined at the top; without an interval it is exact."""
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

    @property
    def permuted(self) -> Null:
        """Mean cosine of draws of heads from different layers; empty if there is no comparable layer."""
        return Null() if self.similarity.permuted is None else Null(self.similarity.permuted.means)

    @property
    def permuted_largest(self) -> Null:
        """Largest cosine of these draws; empty if there are fewer comparable layers than heads."""
        return Null() if self.similarity.permuted is None else Null(self.similarity.permuted.largests)

    @property
    def permuted_verdict(self) -> str:
        """Verdict on the mean cosine against permuted heads."""
        own, permuted = self.similarity, self.similarity.permuted
        return UNKNOWN if permuted is None else self._moved(self.permuted, own.mean, permuted.mean, own.interval)

    @property
    def permuted_pair_verdict(self) -> str:
        """Verdict on the most similar pair against permuted heads."""
        own, permuted = self.similarity, self.similarity.permuted
        if permuted is None:
            return UNKNOWN
        return self._moved(self.permuted_largest, own.largest, permuted.largest, own.pair_interval)

    def _moved(self, null: Null, value: float, new: float, interval: tuple[float, float] | None) -> str:
        """Verdict on the value `new` of fewer tokens, with the interval of the value on all tokens."""
        moved = None if interval is None else (interval[0] - value + new, interval[1] - value + new)
        return self._verdict(null, new, moved)

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
    draws: int = DRAWS,
    seed: int = 0,
    groups: Sequence[HeadGroup] | None = None,
    out: dict[str, str] | None = None,
    strict: bool = True,
) -> AgainstChance:
    """Measure the similarity of heads in a model, in untrained twins, and between layers of the model.

    Twins read at most two of the batches and 512 tokens. They are built one at a time, which needs memory for a second
    model.

    Args:
        model: any module with heads that `find_heads` finds; it does not change.
        batches: as in `circuit_similarity`. Intervals and verdicts need at least two sequences.
        spaces: any of "logits", "ov", "attention", "outputs" and "cka".
        tokens: number of tokens to sample for the logits and OV circuits of the model itself.
        twins: number of twins; with 0 every verdict against twins is "cannot say".
        draws: number of draws of permuted heads; with 0 every verdict against them is "cannot say".
        seed: random seed of the token samples, of the twins' weights and of the draws.
        groups: the result of `find_heads` for all parts; None finds them, and proves guesses on the first batch.
        out: as in `find_attention_layers`.
        strict: raise an error if a space cannot be measured; False writes a note instead, and leaves out layers that
            cannot be hooked.

    Raises:
        HeadLayoutError: `strict`, and no layer has queries and keys that can be recorded, or a layer cannot be hooked.
    """
    groups = find_measured_heads(model, batches[0]) if groups is None else groups
    settings = _Settings(spaces, out, strict)
    own, notes = _measure(model, batches, groups, settings, tokens, seed, draws)
    step = max(1, len(batches) // TWIN_BATCHES)
    twin_batches = batches[step - 1 :: step][:TWIN_BATCHES]
    measured: list[dict[Space, list[Similarity]]] = []
    try:
        for number in range(twins):
            twin = untrained_twin(model, seed + number)
            twin_groups = find_measured_heads(twin, twin_batches[0])
            measured.append(_measure(twin, twin_batches, twin_groups, settings, min(tokens, TWIN_TOKENS), seed)[0])
    except (NoTwin, HeadLayoutError) as error:
        notes.append(f"similarity is not compared with untrained twins: {error}")
        measured = []
    compared = {space: _compared(own[space], [twin[space] for twin in measured]) for space in spaces}
    return AgainstChance(**compared, notes=tuple(notes))


@dataclass(frozen=True)
class _Settings:
    """What to measure in a model and in its twins."""

    spaces: Sequence[Space]
    out: dict[str, str] | None
    strict: bool


def _measure(
    model: nn.Module,
    batches: Sequence[Any],
    groups: Sequence[HeadGroup],
    settings: _Settings,
    tokens: int,
    seed: int,
    draws: int = 0,
) -> tuple[dict[Space, list[Similarity]], list[str]]:
    """Measure one model in several spaces; also return notes on what was not measured."""
    result: dict[Space, list[Similarity]] = {space: [] for space in settings.spaces}
    notes: list[str] = []
    if "logits" in settings.spaces or "ov" in settings.spaces:
        try:
            circuits = circuit_similarity(
                model, batches, tokens=tokens, seed=seed, groups=groups, draws=draws, out=settings.out
            )
            result |= {"logits": circuits.logits, "ov": circuits.ov}
            left_out = circuits.left_out.items()
            notes = [f"{name or 'the model'}: similarity is not measured: {why}" for name, why in left_out]
        except HeadLayoutError as error:
            if settings.strict:
                raise
            notes.append(str(error))
    captured = [space for space in CAPTURED if space in settings.spaces]
    if not captured:
        return result, notes
    if settings.strict:
        layers = find_attention_layers(model, groups, out=settings.out)
    else:
        layers, _ = hookable_layers(model, groups, out=settings.out)
    if layers:
        serves = {module_of(group): group.serves for group in groups if group.part == "q"}
        measured = captured_similarity(
            model, batches, layers, captured, serves=serves, strict=settings.strict, draws=draws, seed=seed
        )
        for space in captured:
            result[space] = measured[space]
    return result, notes


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
