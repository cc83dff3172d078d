"""A logger: one line of JSON for each call, in the run folder."""

import json
from collections.abc import Mapping

from repulsive.loggers.interface import LoggedRun


class Lines:
    def __init__(self, run: LoggedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.file = open(run.folder / "lines.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self.file.write(json.dumps({"name": run.name, "epochs": run.settings.get("training.epochs")}) + "\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def finish(self) -> None:
        self.file.close()
