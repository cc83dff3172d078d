"""Problems of heads in training: thresholds, and one warning for each in plain English.

Defaults of the thresholds, and the largest values in healthy models, are explained on the page "Monitor heads".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from repulsive.errors import SelectionError, StateError, check_whole
from repulsive.monitoring.measurement import LayerMeasurement, Measurement


class HeadWarning(UserWarning):
    """A problem of the heads of a model, found by `HeadMonitor`."""


@dataclass(frozen=True)
class Thresholds:
    """Values above or below which the monitor warns.

    Args:
        duplicate: cosine of attention logits above which two heads count as duplicates.
        dead: a head is dead if its write is below this share of the layer's root mean square.
        logit: largest attention logit above which attention counts as saturated.
        tokens: mean cosine of tokens above which they count as equal.
        confirm: number of measurements in a row that must show a problem before the monitor warns.

    Raises:
        SelectionError: a threshold is out of range.
    """

    duplicate: float = 0.95
    dead: float = 0.05
    logit: float = 100.0
    tokens: float = 0.99
    confirm: int = 2

    def __post_init__(self) -> None:
        check_whole("confirm", self.confirm)
        for one in fields(self):
            if not isinstance(value := getattr(self, one.name), float | int):
                raise SelectionError(f"{one.name}={value!r}: must be a number")
        for name in ("duplicate", "dead", "tokens"):
            if not 0 < getattr(self, name) <= 1:
                raise SelectionError(f"{name}={getattr(self, name)}: must be above 0 and at most 1")
        if not self.logit > 0:
            raise SelectionError(f"logit={self.logit}: must be above 0")


@dataclass(frozen=True)
class Problem:
    """A problem that the monitor warned about.

    Args:
        kind: "duplicate", "dead", "saturated", "tokens" or "diverged".
        layer: dotted name of the attention module.
        heads: the heads concerned; empty if it is the whole layer.
        since: step of the first measurement that showed it.
        step: step of the warning.
        message: the warning.
    """

    kind: str
    layer: str
    heads: tuple[int, ...]
    since: int
    step: int
    message: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "heads": list(self.heads)}


Key = tuple[str, str, tuple[int, ...]]  # kind, layer, heads


class Detector:
    """Find problems that several measurements in a row show, and report each once.

    Args:
        thresholds: when a value is a problem.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.problems: list[Problem] = []
        self._open: dict[Key, tuple[int, int]] = {}  # first step and number of measurements in a row
        self._reported: set[Key] = set()

    def observe(self, measurement: Measurement) -> list[Problem]:
        """Process a measurement and return the problems to warn about now."""
        new: list[Problem] = []
        before, self._open = self._open, {}
        for layer in measurement.layers:
            confirmed = []
            for kind, heads, value in find_problems(layer, self.thresholds):
                key = (kind, layer.name, heads)
                since, count = before.get(key, (measurement.step, 0))
                self._open[key] = (since, count + 1)
                if count + 1 >= self.thresholds.confirm and key not in self._reported:
                    self._reported.add(key)
                    confirmed.append((kind, heads, value, since))
            new += _merge(layer, confirmed, measurement.step)
        self.problems += new
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists and numbers, for JSON."""
        return {
            "problems": [problem.as_json() for problem in self.problems],
            "open": [[kind, layer, list(heads), *value] for (kind, layer, heads), value in self._open.items()],
            "reported": [[kind, layer, list(heads)] for kind, layer, heads in sorted(self._reported)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            StateError: the state is not one that `state_dict` wrote.
        """
        try:
            problems = [Problem(**{**each, "heads": tuple(each["heads"])}) for each in state["problems"]]
            reported = {(kind, layer, tuple(heads)) for kind, layer, heads in state["reported"]}
            opened = {(kind, layer, tuple(heads)): (since, n) for kind, layer, heads, since, n in state["open"]}
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state of the head monitor is damaged ({type(error).__name__}: {error})") from None
        self.problems, self._reported, self._open = problems, reported, opened


def find_problems(layer: LayerMeasurement, limits: Thresholds) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Iterate over the problems of a layer in one measurement: kind, heads, value."""
    if any(not math.isfinite(x) for x in (*layer.largest_logit, *layer.written)):
        yield "diverged", (), math.nan
        return
    for first, second, cosine in layer.pairs:
        if cosine > limits.duplicate:
            yield "duplicate", (first, second), cosine
    for head, written in enumerate(layer.written):
        if written < limits.dead:
            yield "dead", (head,), written
    if layer.largest_logit and (largest := max(layer.largest_logit)) > limits.logit:
        yield "saturated", (), largest
    if layer.tokens > limits.tokens:
        yield "tokens", (), layer.tokens


def _merge(
    layer: LayerMeasurement, confirmed: Sequence[tuple[str, tuple[int, ...], float, int]], step: int
) -> Iterator[Problem]:
    """Join duplicate pairs that share a head, and the dead heads of a layer, into one problem each."""
    for kind in dict.fromkeys(kind for kind, *_ in confirmed):
        same = [(heads, value, since) for each, heads, value, since in confirmed if each == kind]
        sets = [set(heads) for heads, *_ in same]
        groups = _components(sets) if kind == "duplicate" else [set().union(*sets)]
        for group in groups:
            own = [(value, since) for heads, value, since in same if set(heads) <= group]
            since = min(since for _, since in own)
            heads = tuple(sorted(group))
            value = (max if kind == "dead" else min)(value for value, _ in own)
            yield Problem(kind, layer.name, heads, since, step, _message(kind, layer, heads, value, since))


def _components(sets: Iterable[set[int]]) -> list[set[int]]:
    """Unite sets that share elements."""
    groups: list[set[int]] = []
    for each in sets:
        touching = [group for group in groups if group & each]
        groups = [group for group in groups if not group & each] + [each.union(*touching)]
    return groups


def _message(kind: str, layer: LayerMeasurement, heads: tuple[int, ...], value: float, since: int) -> str:
    label, several = layer.label, len(heads) > 1
    if kind == "duplicate":
        at_least = "at least " if len(heads) > 2 else ""
        return (
            f"{label}: {_list(heads)} have had nearly equal attention logits since step {since} (cosine {at_least}"
            f"{value:.2f}); keep them apart with repel(model, optimizer), or remove all but one with `repulsive prune`"
        )
    if kind == "dead":
        verb = "have added almost nothing to their" if several else "has added almost nothing to its"
        at_most = "at most " if several else ""
        return (
            f"{label}: {_list(heads)} {verb} layer's output since step {since} ({at_most}{100 * value:.2g} % of the "
            "layer's typical norm); remove with `repulsive prune`, or lower weight decay or the learning rate"
        )
    if kind == "saturated":
        head = layer.largest_logit.index(max(layer.largest_logit))
        return (
            f"{label}: largest attention logit {value:.0f} (head {head}), too large since step {since}; attention has "
            "saturated, consider QK-norm or a lower learning rate"
        )
    if kind == "tokens":
        return (
            f"{label}: all tokens of a sequence have been nearly equal after this layer since step {since} (mean "
            f"cosine {value:.4f}), so later layers cannot distinguish them; consider a lower learning rate, a longer "
            "warm-up or, if weights repel each other, space='sphere'"
        )
    return (
        f"{label}: attention contains NaN or infinity since step {since}; load an earlier checkpoint and lower the "
        "learning rate"
    )


def _list(heads: Sequence[int]) -> str:
    """Format heads: "head 1", "heads 1 and 4", "heads 1, 2 and 4"."""
    *first, last = map(str, heads)
    return f"heads {', '.join(first)} and {last}" if first else f"head {last}"
