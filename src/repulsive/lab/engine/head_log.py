"""What a training logs about its heads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from repulsive.repulsion import Handle

_MEASURED = ("ratio", "drive", "repulsion", "distance", "bandwidth", "alpha")


class HeadLog:
    """Means over groups of what a handle last measured, in this process or before the training was resumed.

    Args:
        handle: of the training.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._known: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """By name; where there are several layers, distances also layer by layer. What is nan is left out."""
        reports = [r for r in self._handle.report() if r.step >= 0]
        if not reports:
            return self._known
        means = {name: statistics.fmean(getattr(r, name) for r in reports) for name in _MEASURED}
        layers: dict[str, list[float]] = {}
        for r in reports:
            layers.setdefault(f"distance/{r.where} layer {r.layer}", []).append(r.distance)
        if len(layers) > 1:
            means |= {name: statistics.fmean(found) for name, found in layers.items()}
        return {name: x for name, x in means.items() if x == x}

    def restore(self, values: Mapping[str, Any]) -> None:
        """As a checkpoint has them: the handle forgets what it measured."""
        self._known = {name: float(value) for name, value in values.items()}
