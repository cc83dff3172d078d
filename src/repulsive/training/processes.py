"""The processes of one training: which of them writes, and how all of them learn what one of them knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from repulsive.errors import RepulsiveError, RunError


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
        except ImportError:
            raise RunError("training needs the package accelerate: pip install 'repulsive[train]'") from None

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            # A run before this one, in the same process, may have had another device.
            AcceleratorState._reset_state(reset_partial_state=True)
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        self.accelerator = Accelerator(mixed_precision="no", cpu=on_cpu)  # the loop casts
        self.device: torch.device = self.accelerator.device
        self.index: int = self.accelerator.process_index
        self.count: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process

    @property
    def alone(self) -> bool:
        """Whether there is but one."""
        return self.count == 1

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


def chosen_device(name: str | None) -> torch.device:
    """The device of a name, or a GPU where there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
