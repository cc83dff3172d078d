"""Atomic checkpoints: safetensors and JSON with checksums, written to a hidden folder and renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import CheckpointError
from repulsive.lab.engine import sharded_checkpoint
from repulsive.lab.engine.nested_state import pack, unpack
from repulsive.safety.files import refuse_link, sync_folder, write_synced
from repulsive.safety.folders import replacing

MANIFEST = "manifest.json"
_FILES = _TENSORS, _STATE = "tensors.safetensors", "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, in folders such as `step-000000123`.

    A process that is killed while it saves leaves earlier checkpoints intact: files are written to a hidden folder,
    synced, listed with their checksums in the manifest, and then the folder is renamed.

    Args:
        folder: folder of all checkpoints of the run.
        keep: number of newest checkpoints to keep.
    """

    folder: Path
    keep: int = 2

    def save(self, step: int, state: dict[str, Any], spare: int = 0) -> Path:
        """Save a checkpoint and remove old ones.

        Args:
            step: number of training steps done.
            state: nested dictionaries and lists of tensors and plain values.
            spare: number of further checkpoints to keep, beyond `keep`.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are intact.
        """
        final = self.path(step)
        try:
            refuse_link(self.folder)
            self.remove_leftovers()
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(final) as folder:
                self._write(folder, step, state)
        except OSError as error:
            raise self.failure(final, str(error.strerror)) from None
        self.remove_others(final, spare)
        return final

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step-{step:09d}"

    def failure(self, final: Path, why: str) -> CheckpointError:
        """Make the error for a checkpoint that cannot be written."""
        before = "the checkpoint before it is intact" if self.paths() else "there is no earlier checkpoint"
        return CheckpointError(
            f"{final}: cannot be written ({why}); {before}. Free some space and run the same command again"
        )

    def remove_others(self, final: Path, spare: int = 0) -> None:
        """Remove old checkpoints, and those of later steps, after a new one is complete."""
        paths = self.paths()
        here = paths.index(final)
        # Checkpoints of later steps are damaged, or the training would have resumed from them. Remove them too.
        for old in (*paths[:here], *paths[here + self.keep + spare :]):
            shutil.rmtree(old, ignore_errors=True)

    def drop(self, step: int) -> None:
        """Remove the checkpoint of a step, if there is one."""
        shutil.rmtree(self.path(step), ignore_errors=True)

    def paths(self) -> list[Path]:
        """List all checkpoints, newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True) if self.folder.is_dir() else []

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Load step and state of the newest intact checkpoint; None if there are no checkpoints.

        Damaged checkpoints are skipped with a warning.

        Raises:
            CheckpointError: all checkpoints are damaged.
        """
        damaged = []
        paths = self.paths()
        for path in paths:
            try:
                return load(path)
            except CheckpointError as error:
                damaged.append(str(error))
                if path != paths[-1]:
                    warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged: {damaged[0]}. Remove that folder to start again"
            )
        return None

    def _write(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        from safetensors.torch import save

        tensors, skeleton = pack(state)
        contents = {_TENSORS: save(tensors), _STATE: json.dumps(skeleton).encode()}
        for name, data in contents.items():
            write_synced(folder / name, data)
        checksums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        manifest = {"format": FORMAT, "step": step, "sha256": checksums}
        write_synced(folder / MANIFEST, json.dumps(manifest).encode())
        sync_folder(folder)

    def remove_leftovers(self) -> None:
        """Remove hidden folders of killed processes."""
        for leftover in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            shutil.rmtree(leftover, ignore_errors=True)


def load(path: Path) -> tuple[int, dict[str, Any]]:
    """Load step and state from a checkpoint folder.

    Raises:
        CheckpointError: a file is missing or damaged, or has another format.
    """
    from safetensors.torch import load as from_bytes

    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] == sharded_checkpoint.FORMAT:
            return _load_sharded(path, manifest)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{path}: has format {manifest['format']!r}; this version reads {FORMAT}")
        expected = {name: manifest["sha256"][name] for name in _FILES}
        contents = {name: _inside(path, name).read_bytes() for name in _FILES}
    except OSError as error:
        raise CheckpointError(f"{path}: {Path(str(error.filename)).name} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {MANIFEST} is damaged ({error})") from None
    for name, data in contents.items():
        if hashlib.sha256(data).hexdigest() != expected[name]:
            raise CheckpointError(f"{path}: {name} is damaged (its checksum differs from the manifest's)")
    try:
        return int(manifest["step"]), _as_table(unpack(from_bytes(contents[_TENSORS]), json.loads(contents[_STATE])))
    except Exception as error:  # contents may be invalid despite valid checksums; safetensors raises plain exceptions
        raise CheckpointError(f"{path}: not the state of a training ({type(error).__name__}: {error})") from None


def _load_sharded(path: Path, manifest: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    sharded_checkpoint.check_files(path, dict(manifest["sha256"]))
    try:
        tensors = sharded_checkpoint.read_tensors(path)
        skeleton = json.loads((path / _STATE).read_bytes())
        return int(manifest["step"]), _as_table(unpack(tensors, skeleton))
    except Exception as error:  # contents may be invalid despite valid checksums
        raise CheckpointError(f"{path}: not the state of a training ({type(error).__name__}: {error})") from None


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Check that the moments of a restored optimizer have the shapes of their parameters, or are scalars.

    Raises:
        ValueError: a moment has another shape.
    """
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.shape != parameter.shape and moment.ndim:
                raise ValueError(f"{name} {list(moment.shape)} of a parameter {list(parameter.shape)}")


def check_weights(weights: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Check that restored weights have the names and shapes of the model's.

    Raises:
        ValueError: a name or a shape differs.
    """
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in model.items()}:
        raise ValueError("the best weights do not fit the model")


def _as_table(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise TypeError(f"expected a dictionary, got {type(state).__name__}")
    return state


def _inside(path: Path, name: str) -> Path:
    """Return the path of a checkpoint file; reject links out of the folder, as checkpoints may be untrusted."""
    file = path / name
    if file.is_symlink() and os.path.dirname(os.path.realpath(file)) != os.path.realpath(path):
        raise CheckpointError(f"{path}: {name} is a link that leads out of its folder; replace it by the file itself")
    return file
