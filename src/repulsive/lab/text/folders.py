"""Prepared folders: files and a manifest with their checksums, written atomically."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repulsive.errors import DataError, RepulsiveError, os_reason, short_message
from repulsive.lab.text.claims import claimed, clean, recover
from repulsive.safety.files import write_synced
from repulsive.safety.folders import replacing

MANIFEST = "manifest.json"
FORMAT = 1
_AGAIN = "prepare it again with --force"


def write_folder(folder: Path, files: dict[str, bytes], manifest: dict[str, Any]) -> None:
    """Write files and a manifest with their SHA-256, atomically.

    Args:
        folder: the folder to write; a prepared folder of this name is replaced.
        files: file name -> content.
        manifest: further entries of the manifest.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    with filling(folder, manifest, tuple(files)) as aside:
        for name, data in files.items():
            write_synced(aside / name, data)


@contextmanager
def filling(folder: Path, manifest: dict[str, Any], order: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a folder to write files into; at the end of the block it gets its manifest and is renamed into place.

    Args:
        folder: the folder to write; a prepared folder of this name is replaced.
        manifest: further entries of the manifest, read at the end of the block.
        order: files that the manifest lists first; the others follow by name.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    with claimed(folder):
        check_replaceable(folder)
        target = Path(os.path.realpath(folder))  # a link stays, and its target is replaced
        try:
            clean(target)
            with replacing(target) as aside:
                yield aside
                written = sorted(path.name for path in aside.iterdir())
                sums = {name: digest(aside / name) for name in dict.fromkeys([*order, *written])}
                listed = json.dumps(manifest | {"format": FORMAT, "files": sums}, indent=1)
                write_synced(aside / MANIFEST, listed.encode())
        except OSError as error:
            raise DataError(f"{target}: cannot be written ({os_reason(error)})") from None


def digest(path: Path) -> str:
    """Compute the SHA-256 of a file without reading it into memory at once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_folder(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Read the files of a folder, by name, and its manifest.

    Raises:
        DataError: there is no such folder, or a file in it is missing or damaged.
    """
    manifest = read_manifest(folder)
    files = {}
    for name, expected in manifest["files"].items():
        path = member(folder, name)
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from None
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise DataError(f"{path}: damaged, its checksum differs from the manifest's; {_AGAIN}")
    return files, manifest


def check_digests(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare every file of a folder with its SHA-256, without keeping a whole file in memory.

    Raises:
        DataError: a file is missing or damaged.
    """
    for name, expected in manifest["files"].items():
        path = member(folder, name)
        try:
            actual = digest(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); {_AGAIN}") from None
        if actual != expected:
            raise DataError(f"{path}: damaged, its checksum differs from the manifest's; {_AGAIN}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: the manifest is missing, damaged, of another format, or names files outside the folder.
    """
    path = folder / MANIFEST
    recover(folder)
    try:
        manifest = json.loads(path.read_bytes())
        format_, _ = manifest["format"], manifest["files"].items()
    except OSError:
        advice = f"run: repulsive prepare DATASET --out {folder}, with a name that `repulsive prepare --help` lists"
        raise DataError(f"{folder}: nothing prepared here; {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: damaged, or not written by `repulsive prepare`; {_AGAIN}") from None
    if format_ != FORMAT:
        raise DataError(f"{folder}: has format {format_!r}, this version reads {FORMAT}; {_AGAIN}")
    for name in manifest["files"]:
        member(folder, name)
    return dict(manifest)


def open_manifest(folder: Path, task: str) -> dict[str, Any]:
    """Read the manifest of a folder, and check that it is of this task and that its files are intact.

    Raises:
        DataError: there is no such folder, it is another dataset, or a file in it is missing or damaged.
    """
    manifest = read_manifest(folder)
    if manifest.get("task") != task:
        raise DataError(f"{folder}: is dataset {manifest.get('task')!r}, not {task!r}; prepare it as that")
    check_digests(folder, manifest)
    return manifest


def member(folder: Path, name: str) -> Path:
    """Return the path of a file that a manifest names. It must lie in the folder: manifests are not trusted.

    Raises:
        DataError: the name is a path, or a link that leads out of the folder.
    """
    path = folder / name
    if name in ("", ".", "..") or "\0" in name or len(name) > 200 or Path(name).name != name:
        raise DataError(f"{folder / MANIFEST}: names {name[:60]!r}, which is not a file of its folder; {_AGAIN}")
    if os.path.islink(path) and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise DataError(f"{path}: a link that leads out of its folder; put the file itself there")
    return path


@contextmanager
def content_errors(folder: Path) -> Iterator[None]:
    """Turn any error about the content of files, such as a missing entry or a wrong shape, into a `DataError`.

    If their checksums are right, the files were written by a program other than `repulsive prepare`.

    Raises:
        DataError: the block raised an error.
    """
    try:
        yield
    except (RepulsiveError, MemoryError):
        raise
    except Exception as error:  # each file format has errors of its own, and safetensors raises plain exceptions
        why = short_message(error)
        raise DataError(f"{folder}: was not made by `repulsive prepare`, or is damaged ({why}); {_AGAIN}") from None


def check_replaceable(folder: Path) -> None:
    """Check that a folder may be replaced: it is missing, empty, or a prepared folder.

    Raises:
        DataError: there is a file of this name, or a folder that holds something else.
    """
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise DataError(f"{folder}: holds something else than a prepared dataset; choose another folder")
    elif folder.exists():
        raise DataError(f"{folder}: expected a folder, found a file; choose another name")
