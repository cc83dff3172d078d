"""State of CUDA graph capture."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Check whether the current stream is being captured into a CUDA graph, for example by the user's training loop."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
