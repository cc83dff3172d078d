"""Share one GPU between processes with NVIDIA's multi-process service (MPS)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def shared_gpu(needed: bool = True) -> Iterator[None]:
    """Run MPS within a block, so that processes started there use the GPU at the same time.

    Without MPS, where it is not installed or may not be started, the processes take turns. A service that is
    already running is used as it is.

    Args:
        needed: whether the processes use a GPU at all.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if not needed or not torch.cuda.is_available() or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="repulsive-mps-") as folder:
        settings = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        started = subprocess.run([control, "-d"], env=os.environ | settings, capture_output=True, check=False)
        if started.returncode:
            yield
            return
        os.environ.update(settings)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", env=dict(os.environ), capture_output=True, check=False)
            for name in settings:
                del os.environ[name]
