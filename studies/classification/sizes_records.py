"""Records of the finished runs of `paper_sizes` and `follow_up`, with their answers."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from studies.classification.lean_runs import ANSWERS, MAPS, Job
from studies.tuning import records

from repulsive.lab.text.prepared import Prepared


class Records(records.Records):
    """Records of finished runs, and the chosen training sizes, in a file that only grows.

    Args:
        out: folder of the file and of the answers.
    """

    def __init__(self, out: Path) -> None:
        self.sizes: dict[str, int] = {}
        super().__init__(out)

    def _take(self, line: dict[str, Any]) -> None:
        if "chosen_size" in line:
            self.sizes[line["dataset"]] = line["chosen_size"]
        else:
            super()._take(line)

    def _keep_files(self, job: Job) -> None:
        """Keep the answers and the attention maps of a run."""
        self.out.mkdir(parents=True, exist_ok=True)
        if (job.folder / ANSWERS).is_file():
            with np.load(job.folder / ANSWERS, allow_pickle=False) as answers, _answers(self.out, job.dataset) as file:
                for name, array in answers.items():
                    with file.open(f"{job.answers_name}/{name}.npy", "w") as entry:
                        np.lib.format.write_array(entry, array)
        if (job.folder / MAPS).is_file():
            folder = self.out / "maps"
            folder.mkdir(exist_ok=True)
            shutil.copyfile(job.folder / MAPS, folder / f"{job.dataset}-{job.arm}-{job.seed}.json")


def _answers(out: Path, dataset: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(out / f"answers-{dataset}.npz", "a", zipfile.ZIP_LZMA)


def store_labels(data: Path, out: Path, dataset: str) -> None:
    """Add the labels of the test set to the answers, once."""
    with _answers(out, dataset) as file:
        if "labels.npy" not in file.namelist():
            labels = Prepared.load(data / dataset).parts["test"].labels
            with file.open("labels.npy", "w") as entry:
                np.lib.format.write_array(entry, labels.to(torch.uint8).numpy())
