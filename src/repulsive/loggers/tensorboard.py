"""TensorBoard: event files in `tensorboard/`. View them with `tensorboard --logdir RUNS`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from repulsive.loggers.interface import LoggedRun
from repulsive.loggers.quiet import import_package

FOLDER = "tensorboard"


class TensorBoardLogger:
    """Write numbers to TensorBoard's event files; a resumed run hides the steps that it logs again.

    Args:
        run: the run to log.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, run: LoggedRun) -> None:
        import_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=run.step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        with suppress(OSError):  # a full disk was reported before
            self._writer.close()
