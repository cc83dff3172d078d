"""Format of sharded checkpoints: safetensors shards written by torch's distributed checkpoint (DCP), and JSON.

Every rank writes some of the tensors, so the time to save falls with the number of ranks. DCP splits tensors over ranks
and joins them again, for any number of ranks. Its Hugging Face storage writes safetensors; everything else is JSON, so
no pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import CheckpointError, ConfigError

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
_SUFFIX = ".safetensors"
_BLOCK = 1 << 20  # bytes that are read at a time for a checksum


def check_available() -> None:
    """Check that this torch can write sharded checkpoints.

    Raises:
        ConfigError: it cannot.
    """
    try:
        from torch.distributed.checkpoint import hf_storage
    except ImportError:
        missing = True
    else:
        missing = not hasattr(hf_storage, "HuggingFaceStorageWriter")
    if missing:
        raise ConfigError(
            "training.checkpoint='sharded' needs the safetensors storage of torch.distributed.checkpoint, which "
            f"torch {torch.__version__} does not have; upgrade torch, or use training.checkpoint='whole'"
        )


def start_saving(tensors: dict[str, Tensor], folder: Path, group: Any) -> Future[Any]:
    """Write tensors to a folder in the background. All ranks call it with the same names and shapes.

    Args:
        tensors: name -> tensor, equal on all ranks; nobody may change them until the future is done.
        folder: an empty folder.
        group: process group with a CPU backend that nothing else uses, because a thread communicates on it; None for
            one process.

    Returns:
        A future. On rank 0 it is done when all ranks have written.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    if group is None:  # a filter, because the warning is raised in a thread that outlives this call
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    started: Any = dcp.async_save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    future: Future[Any] = getattr(started, "upload_completion", started)  # torch returns one or the other
    return future


def seal(folder: Path, step: int, skeleton: Any, write: Any) -> None:
    """Write the JSON files of a checkpoint whose shards are complete; the manifest has the checksums of all files.

    Args:
        folder: folder of the shards.
        step: number of training steps done.
        skeleton: the state without its tensors.
        write: function (path, bytes) that writes a file and syncs it to disk.
    """
    write(folder / STATE, json.dumps(skeleton).encode())
    checksums = {path.name: digest(path) for path in sorted(folder.iterdir())}
    write(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "sha256": checksums}).encode())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors, joined from their shards.

    Raises:
        ValueError: the shards do not add up to whole tensors.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    entries: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    for name, entry in entries.items():  # the sizes are read from the files, which may be damaged
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise ValueError(f"the shards of {name} do not add up")
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
            except CheckpointException as error:  # a BaseException, which callers would not expect
                raise ValueError(" ".join(str(error).split())[:160]) from None
    return tensors


def check_files(folder: Path, checksums: dict[str, str]) -> None:
    """Check that a folder has exactly the files of its manifest, and that none has changed.

    Raises:
        CheckpointError: a file is missing, added, damaged or a link.
        OSError: a file cannot be read.
    """
    shards = {path.name for path in folder.iterdir() if path.name.endswith(_SUFFIX)}
    if shards != {name for name in checksums if name.endswith(_SUFFIX)} or STATE not in checksums:
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged (it lists other files than are there)")
    for name, expected in checksums.items():
        path = folder / name
        if Path(name).name != name or path.is_symlink():
            raise CheckpointError(f"{folder}: {name} is a link or a path; put the file itself there")
        if digest(path) != expected:
            raise CheckpointError(f"{folder}: {name} is damaged (its checksum differs from the manifest's)")


def digest(path: Path) -> str:
    """Compute the SHA-256 of a file, and sync it to disk."""
    sum_of_bytes = hashlib.sha256()
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            sum_of_bytes.update(block)
    return sum_of_bytes.hexdigest()
