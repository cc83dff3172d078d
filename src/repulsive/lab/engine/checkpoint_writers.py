"""Save the checkpoints of a training: whole, by the first rank, or sharded, by all ranks in the background."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

import torch

from repulsive.errors import CheckpointError, short_message
from repulsive.lab.engine import sharded_checkpoint
from repulsive.lab.engine.checkpoint import Checkpoints
from repulsive.lab.engine.nested_state import pack
from repulsive.lab.engine.processes import Processes
from repulsive.safety.files import refuse_link, sync_folder, write_synced

State = Callable[[], dict[str, Any]]  # makes the state to save


class WholeWriter:
    """The first rank writes one file with all tensors, and the others wait.

    Args:
        checkpoints: the checkpoints of the run.
        processes: the ranks of the training.
    """

    def __init__(self, checkpoints: Checkpoints, processes: Processes) -> None:
        self._checkpoints, self._processes = checkpoints, processes

    def save(self, step: int, state: State, spare: int = 0) -> None:
        """Save a checkpoint; see `Checkpoints.save`. All ranks call it."""
        self._processes.run_on_main(lambda: self._checkpoints.save(step, state(), spare))

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. All ranks call it."""

    def close(self) -> None:
        """Wait for this rank's part of the last checkpoint, and ignore errors."""


class ShardedWriter(WholeWriter):
    """Every rank writes a share of the tensors in the background, while training continues.

    The state is copied to the memory of the host first. Files are written to a hidden folder; when all ranks have
    finished, the first rank adds the manifest and renames the folder. Until then the previous checkpoints stay. Errors
    are raised by the next `save` or `wait`.

    Raises:
        ConfigError: this torch has no safetensors storage for distributed checkpoints.
    """

    def __init__(self, checkpoints: Checkpoints, processes: Processes) -> None:
        super().__init__(checkpoints, processes)
        sharded_checkpoint.check_available()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        # A group of its own: the thread that saves and the training must not mix their messages.
        self._group = torch.distributed.new_group(backend="gloo", timeout=processes.timeout) if distributed else None
        self._pending: Future[Any] | None = None

    def save(self, step: int, state: State, spare: int = 0) -> None:
        """Copy the state and start to save it, once the previous checkpoint is complete. All ranks call it.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
        """
        self.wait()
        tensors, skeleton = pack(state())
        final = self._checkpoints.path(step)
        folder = final.with_name(f".{final.name}.new")
        self._processes.run_on_main(lambda: self._make(folder, final))
        written = sharded_checkpoint.start_saving(tensors, folder, self._group)
        if not self._processes.main:
            self._pending = written
            return
        complete: Future[None] = Future()

        def finish(_: Future[Any]) -> None:
            try:
                written.result()
                sharded_checkpoint.seal(folder, step, skeleton, write_synced)
                sync_folder(folder)
                _rename(folder, final)
                self._checkpoints.remove_others(final, spare)
            except BaseException as error:  # raised by `wait`, not in this thread; DCP raises BaseException
                complete.set_exception(self._checkpoints.failure(final, _reason(error)))
            else:
                complete.set_result(None)

        self._pending = complete
        written.add_done_callback(finish)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. All ranks call it.

        Raises:
            CheckpointError: it cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            wait([pending])
            self._processes.run_on_main(pending.result)

    def close(self) -> None:
        """Wait for this rank's part of the last checkpoint, and ignore errors."""
        if self._pending is not None:
            wait([self._pending])

    def _make(self, folder: Path, final: Path) -> None:
        try:
            refuse_link(self._checkpoints.folder)
            self._checkpoints.remove_leftovers()
            folder.mkdir(parents=True)
        except OSError as error:
            raise self._checkpoints.failure(final, _reason(error)) from None


def make_writer(kind: Literal["whole", "sharded"], checkpoints: Checkpoints, processes: Processes) -> WholeWriter:
    """Make the writer that a recipe asks for (`training.checkpoint`)."""
    return (ShardedWriter if kind == "sharded" else WholeWriter)(checkpoints, processes)


def _rename(folder: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.old")
    if final.exists():  # damaged, or the training would have resumed from it
        os.rename(final, old)
    os.rename(folder, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _reason(error: BaseException) -> str:
    """Describe an error of DCP, which wraps those of all ranks."""
    if isinstance(error, CheckpointError):
        return str(error)
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return short_message(error)
