"""The processes of one training: which of them writes, and how all of them learn what one of them knows."""

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
from repulsive.safety.parents import watch_parent

TIMEOUT = "REPULSIVE_TIMEOUT"
_SECONDS = 600  # that one process may take longer than another, to write a checkpoint, say
_GRACE = 60.0  # seconds to save in after `torchrun` is gone
_LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "socket", "gloo", "nccl")


class Processes:
    """One process, or some that Accelerate found `torchrun` or `accelerate launch` to have started.

    Every method is called by all of them, at the same place.

    Args:
        device: "cpu", "cuda", or None for a GPU where there is one.
    """

    def __init__(self, device: str | None) -> None:
        try:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError:
            raise RunError("training needs the package accelerate: pip install 'repulsive[train]'") from None

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            # A run before this one, in the same process, may have had another device.
            AcceleratorState._reset_state(reset_partial_state=True)
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        patience = InitProcessGroupKwargs(timeout=timedelta(seconds=_patience()))
        self.accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[patience])  # the loop casts
        self.device: torch.device = self.accelerator.device
        self.index: int = self.accelerator.process_index
        self.count: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        if not self.alone and "TORCHELASTIC_RUN_ID" in os.environ:
            watch_parent(os.getppid(), _stop_and_end)

    @property
    def alone(self) -> bool:
        """Whether there is but one."""
        return self.count == 1

    @property
    def parallel(self) -> dict[str, int]:
        """What the last bits of a sum depend on beside its numbers."""
        return {"threads": torch.get_num_threads(), "processes": self.count}

    def compare(self, before: Any, folder: Path) -> None:
        """Warn where a resumed training cannot have the bits of one that was never stopped.

        Args:
            before: `parallel`, as a checkpoint has it.
            folder: of the run.
        """
        now = self.parallel
        if not self.main or not isinstance(before, dict) or before == now:
            return
        changed = [f"{before.get(name)} {name}, now {now[name]}" for name in now if before.get(name) != now[name]]
        warnings.warn(
            f"{folder}: was trained with {' and '.join(changed)}; the result will not be the same to the last bit. "
            "OMP_NUM_THREADS sets the number of threads, torchrun that of processes",
            stacklevel=2,
        )

    def together(self, action: Callable[[], Any]) -> None:
        """The main process does something; if it cannot, all of them fail with its error, and nobody waits for it."""
        if self.alone:
            action()
            return
        told: list[RepulsiveError | None] = [None]
        if self.main:
            try:
                action()
            except RepulsiveError as error:
                told = [error]
        torch.distributed.broadcast_object_list(told, src=0)
        if told[0] is not None:
            raise told[0]

    def most(self, number: int) -> int:
        """The largest number that any of them has."""
        return number if self.alone else max(self.gather(number))

    def gather(self, value: Any) -> list[Any]:
        """What each of them has, in their order."""
        if self.alone:
            return [value]
        everyone = [None] * self.count
        torch.distributed.all_gather_object(everyone, value)
        return everyone


def lost_process(error: BaseException) -> bool:
    """Whether an error of torch says that another process of this training does not answer."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or isinstance(error, RepulsiveError):
        return False
    return any(word in str(error).lower() for word in _LOST)


def _patience() -> float:
    """Seconds that processes wait for each other.

    Raises:
        ConfigError: the environment variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT, str(_SECONDS))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{TIMEOUT}={text!r}: expected a positive number of seconds")
    return value


def _stop_and_end() -> None:
    """What a process does when the `torchrun` that started it is gone: save, as if asked to, or end."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


def chosen_device(name: str | None) -> torch.device:
    """The device of a name, or a GPU where there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
