"""Answers to the benchmark's test sets, in the files GLUE takes as a submission."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from repulsive.errors import ConfigError
from repulsive.lab.engine.files import write_text
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.tables import finished_in
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.glue.data import MOST, GlueTask
from repulsive.lab.systems.glue.prepare import INDICES
from repulsive.lab.systems.glue.task import GlueTask as Fitted


def predict(run: Path, folder: Path, data: Path | None = None, device: str | None = None) -> list[Path]:
    """Write one file for every test set the run's data have: `MNLI-m.tsv` and `MNLI-mm.tsv`, say.

    Args:
        run: folder of one finished run of GLUE.
        folder: where the files go.
        data: another prepared folder than the run was trained on.
        device: "cpu", "cuda" or None for what is there.

    Raises:
        ConfigError: there are several runs, or one of another task, or the data have no test set.
    """
    found = finished_in(run)
    if len(found) > 1:
        seeds = ", ".join(map(str, found))
        raise ConfigError(f"{run}: holds seeds {seeds}; a submission has the answers of one, such as {run}/seed-0")
    (chosen,) = found.values()
    task, model = load_run(chosen, chosen_device(device), data)
    if not isinstance(task, Fitted):
        raise ConfigError(f"{run}: is a run of {chosen.recipe['task']!r}; submissions are for those of 'glue'")
    parts = {part: name for part, name in task.task.submissions.items() if part in task.parts}
    if not parts:
        wanted = " or ".join(name for part in task.task.submissions for name in task.task.files[part])
        raise ConfigError(f"{task.data.folder}: was prepared without {wanted}; put it beside train and prepare again")
    indices = json.loads(task.data.extra[INDICES])
    written = []
    for part, name in parts.items():
        with torch.inference_mode():
            answers = task.answers(model, part)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, submission(task.task, answers, indices[part]))
        written.append(folder / name)
    return written


def submission(task: GlueTask, answers: Tensor, indices: list[int]) -> str:
    """The text of a file: a header, then a line for every row, with the word of its class or its points.

    Args:
        task: whose answers.
        answers: logits [N, C], or points [N], which are cut to 0 and 5.
        indices: what the test file calls its rows, N of them.
    """
    if task.classes:
        words = [task.classes[number] for number in answers.argmax(-1).tolist()]
    else:
        words = [f"{points:.3f}" for points in answers.double().clamp(0, MOST).tolist()]
    lines = (f"{index}\t{word}\n" for index, word in zip(indices, words, strict=True))
    return "index\tprediction\n" + "".join(lines)
