"""Train all runs of the demo in worker processes, and read what they write.

runs/<arm>/seed-<n>/progress.jsonl      one line per measurement, while the run trains
runs/<arm>/seed-<n>/model.safetensors   the trained weights
runs/<arm>/seed-<n>/result.json         settings and results; a run that has it is finished
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch

from repulsive.environment.versions import package_versions
from repulsive.errors import RunError
from repulsive.lab.demo.settings import ARMS, PENALTY, Settings
from repulsive.lab.demo.train import Measurement, build, train
from repulsive.lab.engine.files import read_json, write_bytes, write_json, write_text
from repulsive.lab.engine.stop_signals import Stopped, listening
from repulsive.lab.engine.workers import DONE, WorkerPool
from repulsive.lab.systems.lm.model import Decoder
from repulsive.lab.text.prepared import tensors_from_bytes, tensors_to_bytes

TEXT, SUMMARY = "text.txt", "summary.json"
_PROGRESS, _RESULT, _MODEL = "progress.jsonl", "result.json", "model.safetensors"
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Job:
    """One run: a method, a seed, and the folder of the demo.

    Args:
        arm: "plain", "repelled" or "regularizer".
        seed: random seed.
        settings: sizes of the model and of the training.
        out: folder of the demo.
        text_sha: checksum of the text.
    """

    arm: str
    seed: int
    settings: Settings
    out: Path
    text_sha: str

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return _folder(self.out, self.arm, self.seed)

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on. A finished run with the same identity is not trained again."""
        fixed = {"arm": self.arm, "seed": self.seed, "penalty": PENALTY, "text": self.text_sha}
        return {**fixed, "settings": asdict(self.settings), "versions": used_versions()}


@dataclass(frozen=True, eq=False)
class Result:
    """Results of a finished run; see `Trained`.

    Args:
        job: the run.
        history: measurements during training.
        held_out: loss on the held-out text, in nats per byte.
        cosines: cosines between the attention logits of heads, for each layer [M, M].
        seconds: CPU time of the training.
    """

    job: Job
    history: Sequence[Measurement]
    held_out: float
    cosines: Sequence[torch.Tensor]
    seconds: float

    @property
    def mean(self) -> float:
        """Similarity of heads after training: mean over pairs and layers."""
        return self.history[-1].mean

    @property
    def largest(self) -> float:
        """Similarity of the most similar pair of heads after training."""
        return self.history[-1].largest

    def model(self) -> Decoder:
        """Load the trained model."""
        return load_model(self.job.out, self.job.arm, self.job.seed)


class View(Protocol):
    """Shows the progress of the runs."""

    def update(self, job: Job, history: Sequence[Measurement]) -> None:
        """Show the measurements of a run."""

    def ended(self, job: Job, result: Result) -> None:
        """Show that a run is finished."""


def used_versions() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {name: version for name, version in package_versions(["torch"]).items() if name != "cuda"}


def jobs_of(settings: Settings, seeds: Sequence[int], out: Path, text: str) -> list[Job]:
    """Write the text to the folder, and list all runs: every arm with the first seed, then with the second, ..."""
    write_text(out / TEXT, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return [Job(arm, seed, settings, out, digest) for seed in seeds for arm in ARMS]


def train_all(jobs: Sequence[Job], view: View, processes: int = 0) -> list[Result]:
    """Train the runs that are not finished, several at a time, and return the results in the order of the jobs.

    Args:
        jobs: the runs.
        view: shows their progress.
        processes: parallel runs; 0: one per core. Each uses one thread, so that results do not depend on this number.

    Raises:
        Stopped: Ctrl-C or SIGTERM was received; finished runs are kept.
        RunError: a run failed.
    """
    results = {job: result for job in jobs if (result := read_result(job)) is not None}
    for job, result in results.items():
        view.ended(job, result)
    waiting = [job for job in jobs if job not in results]
    running: list[Job] = []
    processes = processes or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with listening() as request, WorkerPool(train_job) as workers:
        while waiting or running:
            if request.number is not None:
                break  # leaving the block ends the workers
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                running.append(job)
                workers.start(job)
            ended = workers.ended(_POLL_SECONDS)
            for job in running:
                view.update(job, read_progress(job))
            for job, outcome in ended:
                running.remove(job)
                result = read_result(job)
                if outcome != DONE or result is None:
                    raise RunError(f"{job.folder}: {outcome}")
                results[job] = result
                view.ended(job, result)
    if request.number is not None:
        left = sum(read_result(job) is None for job in jobs)
        raise Stopped(f"stopped with {left} of {len(jobs)} runs left; run the same command to resume", request.number)
    return [results[job] for job in jobs]


def read_result(job: Job) -> Result | None:
    """Read the result of a run; None if the run is not finished, was another run, or its file is damaged."""
    try:
        table = read_json(job.folder / _RESULT)
        if table["run"] != job.identity() or not (job.folder / _MODEL).is_file():
            return None
        history = [Measurement(**each) for each in table["history"]]
        cosines = [torch.tensor(layer, dtype=torch.float64) for layer in table["cosines"]]
        return Result(job, history, table["held_out"], cosines, table["seconds"])
    except (RunError, TypeError, KeyError, ValueError):
        return None


def load_model(out: Path, arm: str, seed: int) -> Decoder:
    """Load the trained model of a finished run.

    Args:
        out: folder of the demo.
        arm: "plain", "repelled" or "regularizer".
        seed: random seed of the run.

    Raises:
        RunError: the run is not finished, or its files are damaged.
    """
    folder = _folder(out, arm, seed)
    try:
        table = read_json(folder / _RESULT)
        model = build(Settings(**table["run"]["settings"]), seed)
        model.load_state_dict(tensors_from_bytes((folder / _MODEL).read_bytes()))
    except (OSError, TypeError, KeyError, ValueError, RuntimeError) as error:
        raise RunError(f"{folder}: no finished run ({error}); run: repulsive demo") from None
    return model.eval()


def _folder(out: Path, arm: str, seed: int) -> Path:
    return out / "runs" / arm / f"seed-{seed}"


def read_progress(job: Job) -> list[Measurement]:
    """Read the measurements of a run that is training."""
    return list(_lines(job.folder / _PROGRESS))


def _lines(path: Path) -> Iterator[Measurement]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield Measurement(**json.loads(line))
        except ValueError:  # the last line is being written
            return


def train_job(job: Job, log: TextIO) -> None:
    """Train one run in a worker process, and write its files."""
    torch.set_num_threads(1)
    text = (job.out / TEXT).read_text(encoding="utf-8")
    (job.folder / _RESULT).unlink(missing_ok=True)
    write_text(job.folder / _PROGRESS, "")
    with (job.folder / _PROGRESS).open("a", encoding="utf-8") as progress:

        def report(measurement: Measurement) -> None:
            print(json.dumps(asdict(measurement)), file=progress, flush=True)

        trained = train(job.arm, job.seed, job.settings, text, report)
    write_bytes(job.folder / _MODEL, tensors_to_bytes(dict(trained.model.state_dict())))
    result = {
        "run": job.identity(),
        "held_out": trained.held_out,
        "history": [asdict(measurement) for measurement in trained.history],
        "cosines": [layer.tolist() for layer in trained.cosines],
        "seconds": trained.seconds,
    }
    write_json(job.folder / _RESULT, result)
