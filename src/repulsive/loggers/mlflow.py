"""MLflow: a file store in `mlflow/`. View it with `mlflow ui --backend-store-uri RUN/mlflow`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from repulsive.loggers.interface import PROJECT, LoggedRun
from repulsive.loggers.quiet import environment, import_package

_VALUE, _BATCH = 500, 100  # characters of a parameter, and parameters per call, that every MLflow accepts


class MLflowLogger:
    """Write numbers to a local file store of MLflow, without its telemetry. Each start of a training is a run.

    Args:
        run: the run to log.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, run: LoggedRun) -> None:
        # MLflow 3 sends telemetry unless told otherwise before it is imported, and asks before it makes a file store.
        with environment(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", MLFLOW_ALLOW_FILE_STORE="true"):
            mlflow = import_package("mlflow", "mlflow-skinny")
            self._entities = import_package("mlflow.entities", "mlflow-skinny")
            folder = (run.folder / "mlflow").resolve()
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
            known = self._client.get_experiment_by_name(PROJECT)
            experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
            self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
            params = [self._entities.Param(name, str(value)[:_VALUE]) for name, value in run.settings.items()]
            for start in range(0, len(params), _BATCH):
                self._client.log_batch(self._id, params=params[start : start + _BATCH])

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(_file_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._id)


def _file_name(name: str) -> str:
    """Keep the first slash of a name only: in a file store `a/b` cannot be a metric beside `a/b/c`."""
    kind, slash, rest = name.partition("/")
    return kind + slash + rest.replace("/", ".")
