"""Records of the finished runs of `paper_sizes` and `follow_up`, with their answers."""

from __future__ import annotations

import json
import lzma
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.classification.lean_runs import ANSWERS, MAPS, RECORD, Job

from repulsive.lab.text.prepared import Prepared

RUNS = "runs.jsonl"


class Records:
    """Records of finished runs, and the chosen training sizes, in a file that only grows.

    Args:
        out: folder of the file and of the answers.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.runs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.sizes: dict[str, int] = {}
        self.versions: dict[str, str] = {}
        packed, path = out / f"{RUNS}.xz", out / RUNS
        text = lzma.decompress(packed.read_bytes()).decode() if packed.is_file() else ""
        text += path.read_text() if path.is_file() else ""
        for line in text.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "versions" in line:
            self.versions = line["versions"]
        elif "chosen_size" in line:
            self.sizes[line["dataset"]] = line["chosen_size"]
        else:
            self.runs[tuple(line[name] for name in ("dataset", "stage", "arm", "trial", "seed"))] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line to the file."""
        self._take(line)
        with (self.out / RUNS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, job: Job) -> dict[str, Any]:
        """Take the record and the answers of a finished run from its folder, which is deleted."""
        record: dict[str, Any] = json.loads((job.folder / RECORD).read_text())
        if (job.folder / ANSWERS).is_file():
            with np.load(job.folder / ANSWERS, allow_pickle=False) as answers, _answers(self.out, job.dataset) as file:
                for name, array in answers.items():
                    with file.open(f"{job.answers_name}/{name}.npy", "w") as entry:
                        np.lib.format.write_array(entry, array)
        if (job.folder / MAPS).is_file():
            folder = self.out / "maps"
            folder.mkdir(exist_ok=True)
            shutil.copyfile(job.folder / MAPS, folder / f"{job.dataset}-{job.arm}-{job.seed}.json")
        self.add(record)
        shutil.rmtree(job.folder, ignore_errors=True)
        return record

    def fail(self, job: Job, reason: str) -> None:
        """Record that a run failed; it is not tried again."""
        names = ("dataset", "stage", "arm", "trial", "seed")
        self.add(dict(zip(names, job.key, strict=True)) | {"train": job.train, "failed": reason, "seconds": 0.0})

    def of(self, dataset: str, stage: str, arm: str) -> list[dict[str, Any]]:
        """List the records of an arm in a stage."""
        return [run for key, run in self.runs.items() if key[:3] == (dataset, stage, arm)]


def _answers(out: Path, dataset: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(out / f"answers-{dataset}.npz", "a", zipfile.ZIP_LZMA)


def store_labels(data: Path, out: Path, dataset: str) -> None:
    """Add the labels of the test set to the answers, once."""
    with _answers(out, dataset) as file:
        if "labels.npy" not in file.namelist():
            labels = Prepared.load(data / dataset).parts["test"].labels
            with file.open("labels.npy", "w") as entry:
                np.lib.format.write_array(entry, labels.to(torch.uint8).numpy())
