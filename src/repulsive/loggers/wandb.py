"""Weights & Biases, offline: files in `wandb/`. Upload them yourself with `wandb sync RUN/wandb/offline-run-*`."""

from __future__ import annotations

from collections.abc import Mapping

from repulsive.loggers.interface import PROJECT, LoggedRun
from repulsive.loggers.quiet import environment, import_package


class WandbLogger:
    """Write numbers to an offline run of W&B, without a login and without network.

    Code, Git state, command line, machine information and console output are not recorded. Each start of a training
    is a run of its own; all starts share the group with the name of the run.

    Args:
        run: the run to log.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, run: LoggedRun) -> None:
        with environment(WANDB_ERROR_REPORTING="false", WANDB_MODE="offline"):
            wandb = import_package("wandb")
            run.folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=PROJECT,
                name=run.name,
                group=run.name,
                dir=str(run.folder),
                config=dict(run.settings),
                mode="offline",
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    host="",
                    console="off",
                    save_code=False,
                    disable_code=True,
                    disable_git=True,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                ),
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()
