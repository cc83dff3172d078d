"""An example through all layers of a model, as data: which token looks at which, head by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repulsive.pages.text import visible

ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # as `layers.js` has it
STEPS = len(ALPHABET) ** 2 - 1  # a weight is written as one of these steps from 0 to 1
ALL_TOKENS = "all tokens, mean"


@dataclass(frozen=True, eq=False)
class Maps:
    """What the heads of one layer look at.

    Args:
        layer: its name.
        weights: attention [M, T, S], from 0 to 1.
        rows: name of the text whose T tokens look.
        columns: name of the text whose S tokens are looked at.
    """

    layer: str
    weights: Tensor
    rows: str
    columns: str


@dataclass(frozen=True, eq=False)
class Layered:
    """An example and what the layers of some models make of it.

    Args:
        texts: name -> tokens, such as "source" and "target".
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
                    raise ValueError(f"{maps.layer} of {method!r}: attention {shape}, need [heads, {rows}, {columns}]")
                if not maps.weights.isfinite().all() or (maps.weights < 0).any():
                    raise ValueError(f"{maps.layer} of {method!r}: negative, infinite or missing weights")

    def received(self) -> Layered:
        """The same with what each token receives from all tokens together: smaller by their number."""
        readings = {
            method: [Maps(m.layer, m.weights.mean(1, keepdim=True), ALL_TOKENS, m.columns) for m in layers]
            for method, layers in self.readings.items()
        }
        return Layered({**self.texts, ALL_TOKENS: ["mean"]}, readings)


def layer_names(examples: Sequence[Layered]) -> list[str]:
    """Every layer once, in the order of the methods that have it."""
    return list(dict.fromkeys(m.layer for e in examples for layers in e.readings.values() for m in layers))


def script_data(example: Layered, layers: Sequence[str], methods: Sequence[str]) -> dict[str, Any]:
    """What the script needs of one example; null where a method has no such layer."""
    maps = []
    for method in methods:
        found = {m.layer: m for m in example.readings.get(method, ())}
        maps.append([_encoded(found[name]) if name in found else None for name in layers])
    return {"texts": {name: [visible(token) for token in each] for name, each in example.texts.items()}, "maps": maps}


def packed(weights: Tensor) -> str:
    """Two characters for each weight, row after row.

    Example:
        >>> packed(torch.tensor([0.0, 1.0]))
        'AA__'
    """
    steps = (weights.double().clamp(0, 1) * STEPS).round().long().flatten()  # [N]
    letters = torch.tensor(list(ALPHABET), dtype=torch.uint8)
    pairs = torch.stack([letters[steps // len(ALPHABET)], letters[steps % len(ALPHABET)]], -1)  # [N, 2]
    return bytes(pairs.flatten().tolist()).decode()


def _encoded(maps: Maps) -> dict[str, Any]:
    return {"heads": len(maps.weights), "rows": maps.rows, "columns": maps.columns, "weights": packed(maps.weights)}
