"""Numbers that the head monitor measures in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from repulsive.errors import StateError

DIGITS = 6  # significant digits in a saved state


@dataclass(frozen=True)
class LayerMeasurement:
    """Numbers about the heads of one attention layer. Quantities that could not be measured are nan or empty.

    Args:
        name: dotted name of the attention module.
        label: short name, such as "layer 3".
        entropy: entropy of the attention of each head in nats, mean over queries, [M].
        largest_logit: largest attention logit of each head, after scaling and over pairs that are not masked, [M].
        written: root mean square norm of what each head adds through the output projection, divided by the root mean
            square of that norm over the heads of the layer, [M].
        cosine: cosine between the attention logits of two heads, [M][M].
        tokens: mean cosine between two tokens of an item, after the block that contains the layer.
        ov_similarity: mean cosine between the OV circuits of two heads.
        ov_largest: largest cosine between the OV circuits of two heads.
    """

    name: str
    label: str
    entropy: tuple[float, ...] = ()
    largest_logit: tuple[float, ...] = ()
    written: tuple[float, ...] = ()
    cosine: tuple[tuple[float, ...], ...] = ()
    tokens: float = math.nan
    ov_similarity: float = math.nan
    ov_largest: float = math.nan

    @property
    def pairs(self) -> list[tuple[int, int, float]]:
        """All pairs of heads i < j with the cosine of their logits."""
        rows = enumerate(self.cosine)
        return [(i, j, row[j]) for i, row in rows for j in range(i + 1, len(row))]

    def values(self) -> dict[str, float]:
        """Return one number per quantity, without those that were not measured."""
        cosines = [cosine for _, _, cosine in self.pairs]
        numbers = {
            "similarity": fmean(cosines) if cosines else math.nan,
            "similarity_largest": max(cosines, default=math.nan),
            "ov_similarity": self.ov_similarity,
            "ov_largest": self.ov_largest,
            "entropy": fmean(self.entropy) if self.entropy else math.nan,
            "largest_logit": max(self.largest_logit, default=math.nan),
            "smallest_write": min(self.written, default=math.nan),
            "tokens": self.tokens,
        }
        return {name: value for name, value in numbers.items() if not math.isnan(value)}

    def as_json(self) -> dict[str, Any]:
        """Return the measurement as lists and numbers, with six digits; nan is None."""
        return {
            "name": self.name,
            "label": self.label,
            **{part: _rounded(getattr(self, part)) for part in _ARRAYS},
            "cosine": [_rounded(row) for row in self.cosine],
            **{name: _rounded([getattr(self, name)])[0] for name in _NUMBERS},
        }


_ARRAYS = ("entropy", "largest_logit", "written")
_NUMBERS = ("tokens", "ov_similarity", "ov_largest")
_OVER_LAYERS = {
    "similarity_largest": max,
    "ov_largest": max,
    "largest_logit": max,
    "smallest_write": min,
}  # others: mean


@dataclass(frozen=True)
class Measurement:
    """All layers in one forward pass.

    Args:
        step: number of optimizer steps before the pass.
        layers: one entry per attention layer that ran, in model order.
    """

    step: int
    layers: tuple[LayerMeasurement, ...]

    def values(self) -> dict[str, float]:
        """Return the numbers to log: `heads/<quantity>` over all layers and `heads/<layer>/<quantity>`.

        Over layers, `similarity_largest`, `ov_largest` and `largest_logit` are maxima, `smallest_write` is the minimum,
        and others are means.
        """
        columns: dict[str, list[float]] = {}
        by_layer = {}
        for layer in self.layers:
            for name, value in layer.values().items():
                columns.setdefault(name, []).append(value)
                by_layer[f"heads/{layer.label}/{name}"] = value
        over_layers = {
            f"heads/{name}": float(_OVER_LAYERS.get(name, fmean)(column)) for name, column in columns.items()
        }
        return over_layers | by_layer

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "layers": [layer.as_json() for layer in self.layers]}


def from_json(table: Mapping[str, Any]) -> Measurement:
    """Rebuild a measurement from `Measurement.as_json`.

    Raises:
        StateError: the table is not one that `as_json` wrote.
    """
    try:
        layers = tuple(
            LayerMeasurement(
                str(each["name"]),
                str(each["label"]),
                _numbers(each["entropy"]),
                _numbers(each["largest_logit"]),
                _numbers(each["written"]),
                tuple(map(_numbers, each["cosine"])),
                *_numbers([each.get(name) for name in _NUMBERS]),
            )
            for each in table["layers"]
        )
        return Measurement(int(table["step"]), layers)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the state of the head monitor is damaged ({type(error).__name__}: {error})") from None


def _rounded(values: Sequence[float]) -> list[float | str | None]:
    return [_portable(float(f"{value:.{DIGITS}g}")) for value in values]


def _portable(value: float) -> float | str | None:
    """Replace numbers that JSON does not have: nan by None, infinity by a text."""
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else float(value) for value in values)
