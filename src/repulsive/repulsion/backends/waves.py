"""Waves of a fused update: ranges of groups that are updated one after the other.

All launches of a wave precede those of the next one, so `combine_kernel` reads weights again shortly after
`gram_kernel`. If weights and gradients of a wave fit the L2 cache, this saves one of two passes over the weights in
memory. But shorter launches leave more multiprocessors idle at their ends. On several streams, the launches of one wave
fill the gaps of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch


class Wave(NamedTuple):
    """Groups that are updated together, and their slices in the table."""

    groups: range
    slices: range


def split_into_waves(slices_per_group: Sequence[int], count: int) -> list[Wave]:
    """Divide groups into waves of about as many groups each; at most one wave per group."""
    groups, starts = len(slices_per_group), [0, *accumulate(slices_per_group)]
    count = min(count, groups)
    bounds = [index * groups // count for index in range(count + 1)]
    return [Wave(range(first, end), range(starts[first], starts[end])) for first, end in pairwise(bounds)]


def count_waves(numbers: int, itemsize: int, cache: int) -> int:
    """Count the waves whose weights and gradients fit two thirds of a cache.

    Args:
        numbers: number of weights of all groups.
        itemsize: bytes of a weight.
        cache: bytes of the cache; `torch.cuda.get_device_properties().L2_cache_size`.
    """
    return max(1, -(-2 * numbers * itemsize * 3 // (2 * cache)))


class WaveLauncher:
    """Launches waves: all on the current stream, or in turn on several streams of their own.

    Args:
        waves: the waves.
        streams: number of streams.
        device: the device.
    """

    def __init__(self, waves: Sequence[Wave], streams: int, device: torch.device) -> None:
        self.waves, self._device = waves, device
        is_parallel = device.type == "cuda" and min(streams, len(waves)) > 1
        self._streams = [torch.cuda.Stream(device) for _ in range(streams)] if is_parallel else []

    def run(self, launch: Callable[[Wave], None]) -> None:
        """Launch every wave after all earlier work on the current stream, and before all later work."""
        if not self._streams:
            for wave in self.waves:
                launch(wave)
            return
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)
        for index, wave in enumerate(self.waves):
            with torch.cuda.stream(self._streams[index % len(self._streams)]):
                launch(wave)
        for stream in self._streams:
            current.wait_stream(stream)
