"""Records of finished runs: one line of a JSON lines file for each."""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

RUNS = "runs.jsonl"
RECORD = "record.json"  # in the folder of a run
KEY = ("dataset", "stage", "arm", "trial", "seed")


class Job(Protocol):
    """A run that a worker trains; see `KEY` for the parts of its key."""

    @property
    def folder(self) -> Path:
        """Folder of its log and record."""
        ...

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Identify the run among all runs of the study."""
        ...


class Records:
    """Records of finished runs in a file that only grows; its beginning may be compressed, in `runs.jsonl.xz`.

    Args:
        out: folder of the file; it is made with the first record.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.runs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.versions: dict[str, str] = {}
        packed, path = out / f"{RUNS}.xz", out / RUNS
        text = lzma.decompress(packed.read_bytes()).decode() if packed.is_file() else ""
        text += path.read_text() if path.is_file() else ""
        for line in text.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "versions" in line:
            self.versions = line["versions"]
        else:
            self.runs[tuple(line[name] for name in KEY)] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line to the file."""
        self._take(line)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / RUNS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, job: Any) -> dict[str, Any]:
        """Take the record of a finished run from its folder, which is deleted."""
        record: dict[str, Any] = json.loads((job.folder / RECORD).read_text())
        self._keep_files(job)
        self.add(record)
        shutil.rmtree(job.folder, ignore_errors=True)
        return record

    def _keep_files(self, job: Any) -> None:
        """Copy other files of a finished run; there are none by default."""

    def fail(self, job: Job, reason: str) -> None:
        """Record that a run failed; it is not tried again."""
        self.add(dict(zip(KEY, job.key, strict=True)) | {"failed": reason, "seconds": 0.0})

    def of(self, dataset: str, stage: str, arm: str) -> list[dict[str, Any]]:
        """List the records of an arm in a stage."""
        return [run for key, run in self.runs.items() if key[:3] == (dataset, stage, arm)]


def without_data(changes: Sequence[str]) -> list[str]:
    """Return `key=value` changes without those that name data, whose folder differs between machines."""
    return [change for change in changes if not change.startswith("data.")]
