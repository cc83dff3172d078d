"""The processes (ranks) of one training: which of them writes, and how they exchange values."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import ConfigError, RepulsiveError, RunError
from repulsive.extras import install_command
from repulsive.safety.parents import watch_parent

TIMEOUT = "REPULSIVE_TIMEOUT"
_TIMEOUT_SECONDS = 600  # how long ranks wait for each other, for example while one of them writes a checkpoint
_GRACE_SECONDS = 60.0  # time that a rank has to save after `torchrun` has died
_LOST_RANK = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "socket", "gloo", "nccl")


class Processes:
    """One process, or the ranks that `torchrun` or `accelerate launch` started.

    All ranks must call the methods in the same order.

    Args:
        device: "cpu", "cuda", or None for a GPU where there is one.
    """

    def __init__(self, device: str | None) -> None:
        try:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError:
            raise RunError(f"training needs the package accelerate: {install_command('train')}") from None

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            # An earlier run in this process may have used another device.
            AcceleratorState._reset_state(reset_partial_state=True)
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        self.timeout = timedelta(seconds=_timeout())
        settings = InitProcessGroupKwargs(timeout=self.timeout)
        self.accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[settings])  # the loop casts
        self.device: torch.device = self.accelerator.device
        self.index: int = self.accelerator.process_index
        self.count: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        if not self.is_single and "TORCHELASTIC_RUN_ID" in os.environ:
            watch_parent(os.getppid(), _save_and_exit)

    @property
    def is_single(self) -> bool:
        """Whether the training has only one process."""
        return self.count == 1

    @property
    def parallel(self) -> dict[str, int]:
        """Return the numbers of threads and processes, on which the rounding of sums depends."""
        return {"threads": torch.get_num_threads(), "processes": self.count}

    def compare(self, before: Any, folder: Path) -> None:
        """Warn if a resumed training cannot give bit-identical results to one that was never stopped.

        Args:
            before: value of `parallel` that the checkpoint stored.
            folder: folder of the run.
        """
        now = self.parallel
        if not self.main or not isinstance(before, dict) or before == now:
            return
        changed = [f"{before.get(name)} {name}, now {now[name]}" for name in now if before.get(name) != now[name]]
        warnings.warn(
            f"{folder}: was trained with {' and '.join(changed)}; the result will not be bit-identical. "
            "OMP_NUM_THREADS sets the number of threads, torchrun the number of processes",
            stacklevel=2,
        )

    def run_on_main(self, action: Callable[[], Any]) -> None:
        """Run `action` in the main process; if it fails, all ranks raise its error, so that no rank waits forever."""
        if self.is_single:
            action()
            return
        errors: list[RepulsiveError | None] = [None]
        if self.main:
            try:
                action()
            except RepulsiveError as error:
                errors = [error]
        torch.distributed.broadcast_object_list(errors, src=0)
        if errors[0] is not None:
            raise errors[0]

    def maximum(self, number: int) -> int:
        """Return the largest number that any rank passes."""
        return number if self.is_single else max(self.gather(number))

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass, in rank order."""
        if self.is_single:
            return [value]
        values = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values


def lost_process(error: BaseException) -> bool:
    """Whether a torch error means that another rank died or did not answer in time."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or isinstance(error, RepulsiveError):
        return False
    return any(word in str(error).lower() for word in _LOST_RANK)


def _timeout() -> float:
    """Read from the environment how many seconds ranks wait for each other.

    Raises:
        ConfigError: the environment variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT, str(_TIMEOUT_SECONDS))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{TIMEOUT}={text!r}: expected a positive number of seconds")
    return value


def _save_and_exit() -> None:
    """End a rank whose `torchrun` has died: save as on SIGTERM, and exit if that takes too long."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)


def chosen_device(name: str | None) -> torch.device:
    """Return the device with this name; for None, a GPU if there is one, otherwise the CPU."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
