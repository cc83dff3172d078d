"""Checkpoints that are whole or not there: safetensors and JSON, written aside, with checksums, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import CheckpointError
from repulsive.lab.engine.trees import pack, unpack
from repulsive.safety.files import refuse_link, sync_folder, write_synced

MANIFEST = "manifest.json"
_FILES = _TENSORS, _STATE = "tensors.safetensors", "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run, `step-000123` each.

    A process killed at any moment leaves the earlier ones as they were: files are written into a hidden folder, synced,
    listed with their checksums in the manifest, and the folder is renamed.

    Args:
        folder: where they are.
        keep: how many of the newest stay.
    """

    folder: Path
    keep: int = 2

    def save(self, step: int, state: dict[str, Any], spare: int = 0) -> Path:
        """Write `state`, a tree of tensors and plain values.

        Args:
            step: how far the training is.
            state: what to write.
            spare: how many stay beyond `keep`.

        Raises:
            CheckpointError: the disk is full or not writable; earlier checkpoints are untouched.
        """
        final = self.folder / f"step-{step:09d}"
        aside = self.folder / f".step-{step:09d}-{os.getpid()}"
        try:
            refuse_link(self.folder)
            self._clean()
            aside.mkdir(parents=True)
            self._write(aside, step, state)
            if final.exists():
                shutil.rmtree(final)
            os.rename(aside, final)
            sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            before = "the checkpoint before it is whole" if self.found() else "there was none before it"
            raise CheckpointError(
                f"{final}: cannot be written ({error.strerror}); {before}. Make room and run the same command again"
            ) from None
        found = self.found()
        here = found.index(final)
        # Later ones are damaged, or the training would have gone on from them: they must not crowd out good ones.
        for old in (*found[:here], *found[here + self.keep + spare :]):
            shutil.rmtree(old, ignore_errors=True)
        return final

    def drop(self, step: int) -> None:
        """Remove the checkpoint of a step, where there are others, or where it is not needed any more."""
        shutil.rmtree(self.folder / f"step-{step:09d}", ignore_errors=True)

    def found(self) -> list[Path]:
        """All checkpoints, newest first."""
        return sorted(self.folder.glob("step-*"), reverse=True) if self.folder.is_dir() else []

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is whole; a damaged one is passed over with a warning.

        Raises:
            CheckpointError: there are checkpoints and none is whole.
        """
        damaged = []
        for path in self.found():
            try:
                return load(path)
            except CheckpointError as error:
                damaged.append(str(error))
                warnings.warn(f"{error}; looking for the one before it", stacklevel=2)
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole: {damaged[0]}. Remove that folder to train from the start"
            )
        return None

    def _write(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        from safetensors.torch import save

        tensors, skeleton = pack(state)
        contents = {_TENSORS: save(tensors), _STATE: json.dumps(skeleton).encode()}
        for name, data in contents.items():
            write_synced(folder / name, data)
        listed = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        manifest = {"format": FORMAT, "step": step, "sha256": listed}
        write_synced(folder / MANIFEST, json.dumps(manifest).encode())
        sync_folder(folder)

    def _clean(self) -> None:
        """Remove what killed processes left behind."""
        for leftover in self._leftovers():
            shutil.rmtree(leftover, ignore_errors=True)

    def _leftovers(self) -> Iterator[Path]:
        return self.folder.glob(".step-*") if self.folder.is_dir() else iter(())


def load(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and state of one checkpoint folder.

    Raises:
        CheckpointError: a file is missing, damaged or of another format.
    """
    from safetensors.torch import load as from_bytes

    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
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
        return int(manifest["step"]), _tree(unpack(from_bytes(contents[_TENSORS]), json.loads(contents[_STATE])))
    except Exception as error:  # right checksums around what no training wrote; safetensors raises plain exceptions
        raise CheckpointError(f"{path}: holds no state of a training ({type(error).__name__}: {error})") from None


def _tree(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise TypeError(f"{type(state).__name__}, where a table is needed")
    return state


def _inside(path: Path, name: str) -> Path:
    """A file of a checkpoint; no link may lead out of it, for a checkpoint may come from anybody."""
    file = path / name
    if file.is_symlink() and os.path.dirname(os.path.realpath(file)) != os.path.realpath(path):
        raise CheckpointError(f"{path}: {name} is a link that leads out of its folder; put the file itself there")
    return file
