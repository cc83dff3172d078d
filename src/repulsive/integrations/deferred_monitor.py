"""Deferred `HeadMonitor` for callbacks that are created before the model, shared by the callbacks of all trainers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from repulsive import HeadMonitor
from repulsive.errors import UnknownSetting, did_you_mean

SUMMARY = (
    *("similarity", "similarity_largest", "ov_similarity", "ov_largest"),
    *("entropy", "largest_logit", "smallest_write", "tokens"),
)


class DeferredMonitor:
    """Arguments of `HeadMonitor`, stored until training begins, and the monitor while training runs.

    Args:
        settings: keyword arguments of `HeadMonitor`, and `page` and `film`, paths of files to write.

    Raises:
        UnknownSetting: there is no such argument.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        known = [name for name in inspect.signature(HeadMonitor).parameters if name != "model"]
        known += ["page", "film"]
        for name in settings:
            if name not in known:
                raise UnknownSetting(
                    f"HeadMonitor has no argument {name!r}; {did_you_mean(name, known)}choose from {', '.join(known)}"
                )
        self._settings = dict(settings)
        self._film: str | Path | None = self._settings.pop("film", None)
        self._page: str | Path | None = self._settings.pop("page", None)
        self._logged = -1
        self.monitor: HeadMonitor | None = None

    def begin(self, model: nn.Module, step: int, saved: Mapping[str, Any] | None = None) -> HeadMonitor:
        """Create the monitor, and restore its state.

        Args:
            model: the model to monitor.
            step: number of optimizer steps done.
            saved: the result of `HeadMonitor.state_dict` from the checkpoint.
        """
        self.cancel()  # hooks of a previous training that failed
        self._logged = -1
        monitor = self.monitor = HeadMonitor(model, **self._settings)
        if saved:
            monitor.load_state_dict(saved)
        monitor.begin_step(step)
        if self._page is not None:
            monitor.page(self._page)
        if self._settings.get("probe") is not None and not saved and monitor.is_measuring:
            monitor.measure()
        return monitor

    def new_values(self) -> dict[str, float]:
        """Return the values over all layers, and the step, of a measurement that was not returned before, if any."""
        monitor = self.monitor
        if monitor is None or not len(monitor.history) or monitor.history[-1].step <= self._logged:
            return {}
        self._logged = monitor.history[-1].step
        values = monitor.history[-1].values()
        summary = {f"heads/{name}": values[f"heads/{name}"] for name in SUMMARY if f"heads/{name}" in values}
        return {**summary, "heads/step": float(self._logged)}

    def end(self) -> None:
        """Remove the hooks, and write the film."""
        if self.monitor is not None:
            self.monitor.close()
            if self._film is not None and self.monitor.is_measuring and len(self.monitor.history) > 1:
                self.monitor.film(self._film)

    def cancel(self) -> None:
        """Remove the hooks, without warnings: training has failed."""
        if self.monitor is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.monitor.close()
