"""Attention maps of an example in all layers of a model, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

ALL_TOKENS = "all tokens, mean"


@dataclass(frozen=True, eq=False)
class Maps:
    """Attention maps of the heads of one layer.

    Args:
        layer: name of the layer.
        weights: attention [M, T, S], from 0 to 1.
        rows: name of the text with the T query tokens.
        columns: name of the text with the S key tokens.
    """

    layer: str
    weights: Tensor
    rows: str
    columns: str


@dataclass(frozen=True, eq=False)
class Layered:
    """An example and its attention maps in all layers of one or more models.

    Args:
        texts: name -> tokens, for example "source" and "target".
        readings: method -> one entry per layer.
    """

    texts: Mapping[str, Sequence[str]]
    readings: Mapping[str, Sequence[Maps]]

    def __post_init__(self) -> None:
        if not self.readings or not all(self.readings.values()):
            raise ValueError("an example needs at least one method, and each method at least one layer")
        for method, layers in self.readings.items():
            for maps in layers:
                rows, columns = (len(self.texts[name]) for name in (maps.rows, maps.columns))
                shape = list(maps.weights.shape)
                if len(shape) != 3 or not shape[0] or shape[1:] != [rows, columns]:
                    expected = f"[heads, {rows}, {columns}]"
                    raise ValueError(f"{maps.layer} of {method!r}: expected attention {expected}, got {shape}")
                if not maps.weights.isfinite().all() or (maps.weights < 0).any():
                    raise ValueError(f"{maps.layer} of {method!r}: negative, infinite or NaN weights")

    def received(self) -> Layered:
        """Average each map over its query tokens, which leaves one row per map."""
        readings = {
            method: [Maps(m.layer, m.weights.mean(1, keepdim=True), ALL_TOKENS, m.columns) for m in layers]
            for method, layers in self.readings.items()
        }
        return Layered({**self.texts, ALL_TOKENS: ["mean"]}, readings)


def layer_names(examples: Sequence[Layered]) -> list[str]:
    """List every layer once, in the order of the methods."""
    return list(dict.fromkeys(m.layer for e in examples for layers in e.readings.values() for m in layers))
