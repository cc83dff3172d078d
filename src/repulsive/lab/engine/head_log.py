"""Head statistics for the training log."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from repulsive.repulsion import Handle

_MEASURED = ("ratio", "drive", "repulsion", "distance", "bandwidth", "alpha")


class HeadLog:
    """Means over all head groups of the last measurements of a handle, in this process or before a resume.

    Args:
        handle: the handle that `repel` returned for the training.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._restored: dict[str, float] = {}

    def values(self) -> dict[str, float]:
        """Return the means by name, without NaN; with several layers, also the mean distance of each layer."""
        reports = [report for report in self._handle.report() if report.step >= 0]
        if not reports:
            return self._restored
        means = {name: statistics.fmean(getattr(report, name) for report in reports) for name in _MEASURED}
        layers: dict[str, list[float]] = {}
        for report in reports:
            layers.setdefault(f"distance/{report.where} layer {report.layer}", []).append(report.distance)
        if len(layers) > 1:
            means |= {name: statistics.fmean(distances) for name, distances in layers.items()}
        return {name: x for name, x in means.items() if x == x}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values from a checkpoint; a handle does not save its measurements."""
        self._restored = {name: float(value) for name, value in values.items()}
