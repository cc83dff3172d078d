"""trackio: its local database (`TRACKIO_DIR`, or the cache of huggingface_hub). View it with `trackio show`."""

from __future__ import annotations

from collections.abc import Mapping

from repulsive.loggers.interface import PROJECT, LoggedRun
from repulsive.loggers.quiet import environment, hub_offline, import_package, no_output

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID", "TRACKIO_WEBHOOK_URL")


class TrackioLogger:
    """Write numbers to trackio's local database, without network and dashboard. Each start of a training is a run.

    Args:
        run: the run to log.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(self, run: LoggedRun) -> None:
        self._trackio = import_package("trackio")
        start = f" from step {run.step + 1}" if run.step >= 0 else ""
        with environment(**dict.fromkeys(_REMOTE)), hub_offline(), no_output():
            self._run = self._trackio.init(
                project=PROJECT,
                name=run.name + start,
                group=run.name,
                config=dict(run.settings),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        with no_output():
            self._run.finish()
        current = self._trackio.context_vars.current_run
        if current.get() is self._run:
            current.set(None)  # trackio would finish it again when the process ends
