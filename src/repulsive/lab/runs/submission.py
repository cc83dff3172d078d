"""`repulsive evaluate --predict`: write predictions on the GLUE test sets as submission files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from repulsive.errors import ConfigError
from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.tables import finished_in
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.glue.prepare import INDICES
from repulsive.lab.systems.glue.submission import submission
from repulsive.lab.systems.glue.task import GlueTask


def predict(folder: Path, out: Path, data: Path | None = None, device: str | None = None) -> list[Path]:
    """Write one file for every test set of the run's data, such as `MNLI-m.tsv` and `MNLI-mm.tsv`.

    Args:
        folder: folder of one finished GLUE run.
        out: folder for the files.
        data: a prepared folder to use instead of the run's own.
        device: "cpu", "cuda" or None for the default.

    Raises:
        ConfigError: there are several runs, the run is of another task, or the data have no test set.
    """
    finished = finished_in(folder)
    if len(finished) > 1:
        seeds = ", ".join(map(str, finished))
        raise ConfigError(
            f"{folder}: holds seeds {seeds}; a submission has the answers of one, such as {folder}/seed-0"
        )
    (run,) = finished.values()
    if run.recipe["task"] != "glue":
        raise ConfigError(f"{folder}: is a run of {run.recipe['task']!r}; submissions are for those of 'glue'")
    task, model = load_run(run, chosen_device(device), data)
    assert isinstance(task, GlueTask)
    parts = {part: name for part, name in task.task.submissions.items() if part in task.parts}
    if not parts:
        wanted = " or ".join(name for part in task.task.submissions for name in task.task.files[part])
        raise ConfigError(f"{task.data.folder}: was prepared without {wanted}; put it beside train and prepare again")
    indices = json.loads(task.data.extra[INDICES])
    written = []
    for part, name in parts.items():
        with torch.inference_mode():
            answers = task.answers(model, part)
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / name, submission(task.task, answers, indices[part]))
        written.append(out / name)
    return written
