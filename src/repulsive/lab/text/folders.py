"""A folder of files that is whole or not there: written aside, with checksums in a manifest, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repulsive.errors import DataError, RepulsiveError
from repulsive.lab.text.claims import claimed, clean, recover
from repulsive.safety.files import sync_file, sync_folder, write_synced

MANIFEST = "manifest.json"
FORMAT = 1


def write_folder(folder: Path, files: dict[str, bytes], manifest: dict[str, Any]) -> None:
    """Write files and, last, the manifest, which also gets their SHA-256 as `files`.

    A process killed on the way leaves nothing half made in `folder`.

    Args:
        folder: where to; what `check_replaceable` lets pass is replaced.
        files: contents by name.
        manifest: what else to put into it.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    with filling(folder, manifest, tuple(files)) as aside:
        for name, data in files.items():
            write_synced(aside / name, data)


@contextmanager
def filling(folder: Path, manifest: dict[str, Any], order: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write files into; at the end of the block it gets its manifest and is renamed into place.

    Args:
        folder: where to; what `check_replaceable` lets pass is replaced.
        manifest: as `write_folder` has it; read at the end of the block.
        order: files that the manifest lists first, and in which order; others follow by name.

    Raises:
        DataError: the folder holds something else, or cannot be written.
    """
    with claimed(folder):
        check_replaceable(folder)
        with _filling(Path(os.path.realpath(folder)), manifest, order) as aside:  # a link stays, its target is replaced
            yield aside


@contextmanager
def _filling(folder: Path, manifest: dict[str, Any], order: Sequence[str]) -> Iterator[Path]:
    aside, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        clean(folder)
        aside.mkdir()
        yield aside
        written = sorted(path.name for path in aside.iterdir())
        sums = {name: digest(aside / name) for name in dict.fromkeys([*order, *written])}
        listed = json.dumps(manifest | {"format": FORMAT, "files": sums}, indent=1).encode()
        for name in written:
            sync_file(aside / name)
        write_synced(aside / MANIFEST, listed)
        sync_folder(aside)
        if folder.exists():
            os.rename(folder, old)  # whoever is killed after this leaves no folder: `recover` brings it back
        os.rename(aside, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}: {error.filename})") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(old, ignore_errors=True)


def digest(path: Path) -> str:
    """SHA-256 of a file, read piece by piece."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_folder(folder: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a folder, by name, and its manifest.

    Raises:
        DataError: there is no such folder, or a file in it is missing or damaged.
    """
    manifest = read_manifest(folder)
    files = {}
    for name, digest in manifest["files"].items():
        path = member(folder, name)
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); prepare it again with --force") from None
        if hashlib.sha256(files[name]).hexdigest() != digest:
            raise DataError(f"{path}: damaged, its checksum differs from the manifest's; prepare it again with --force")
    return files, manifest


def check_digests(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare every file of a folder with its SHA-256, without keeping any in memory.

    Raises:
        DataError: a file is missing or damaged.
    """
    for name, expected in manifest["files"].items():
        path = member(folder, name)
        try:
            found = digest(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); prepare it again with --force") from None
        if found != expected:
            raise DataError(f"{path}: damaged, its checksum differs from the manifest's; prepare it again with --force")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        DataError: there is none, it is damaged, of another format, or names files elsewhere.
    """
    path = folder / MANIFEST
    recover(folder)
    try:
        manifest = json.loads(path.read_bytes())
        found, _ = manifest["format"], manifest["files"].items()
    except OSError:
        advice = f"run: repulsive prepare TASK --data DIR --out {folder}"
        raise DataError(f"{folder}: nothing prepared here; {advice}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: damaged, or no manifest of ours; prepare it again with --force") from None
    if found != FORMAT:
        raise DataError(f"{folder}: has format {found!r}, this version reads {FORMAT}; prepare it again with --force")
    for name in manifest["files"]:
        member(folder, name)
    return dict(manifest)


def member(folder: Path, name: str) -> Path:
    """A file that a manifest names, which must lie in its folder: a manifest may come from anybody.

    Raises:
        DataError: the name is a path, or a link that leads elsewhere.
    """
    path = folder / name
    if name in ("", ".", "..") or "\0" in name or len(name) > 200 or Path(name).name != name:
        raise DataError(f"{folder / MANIFEST}: names {name[:60]!r}, which is no file of its folder; prepare it again")
    if os.path.islink(path) and os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise DataError(f"{path}: a link that leads out of its folder; put the file itself there")
    return path


@contextmanager
def understood(folder: Path) -> Iterator[None]:
    """Files whose checksums are right and whose content is not ours, as an error that says so.

    Raises:
        DataError: in place of whatever a reader met: a missing entry, a wrong type or shape, numbers out of range.
    """
    try:
        yield
    except (RepulsiveError, MemoryError):
        raise
    except Exception as error:  # each format has errors of its own, and safetensors' are plain exceptions
        why = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        told = f"was not made by `repulsive prepare`, or is damaged ({why})"
        raise DataError(f"{folder}: {told}; prepare it again with --force") from None


def check_replaceable(folder: Path) -> None:
    """Refuse to replace what is no prepared folder.

    Raises:
        DataError: there is a file of this name, or a folder that holds something else.
    """
    if folder.is_dir():
        if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise DataError(f"{folder}: holds something else than a prepared task; choose another folder")
    elif folder.exists():
        raise DataError(f"{folder}: a file, where a folder is to be; choose another name")
