"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_capturing() -> bool:
    """Check whether the current stream is being captured into a CUDA graph, for example by the user's training loop."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside this block, for a capture: freeing an old graph or event would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
