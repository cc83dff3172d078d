"""The interface for preparing a dataset, which turns raw files into a folder that training reads.

A system declares each dataset it can prepare as a `Dataset`, in `lab/systems/SYSTEM/datasets.py`. Its plan function, in
`lab/systems/SYSTEM/prepare.py`, finds the input files, checks the options and returns a `Plan`:

    def plan_lm(data: Path, out: Path, *, suffix: str = "txt") -> Plan[Text]: ...

Nothing here imports torch, so that the command line can list datasets and their options at once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from repulsive.errors import DataError
from repulsive.lab.text.claims import claimed, recover
from repulsive.lab.text.folders import check_replaceable, content_errors, read_manifest
from repulsive.lab.text.progress import Progress, silent

VARIABLE = "REPULSIVE_DATA"  # environment variable: the folder of raw datasets
T = TypeVar("T")


@dataclass(frozen=True)
class Plan(Generic[T]):
    """A preparation that is ready to run: the options are checked and the files are found, but not read.

    Args:
        dataset: name of the dataset, stored as "task" in the manifest.
        out: the folder to make.
        settings: everything that determines the result, as the manifest stores it.
        sums: SHA-256 of every input file, by name.
        write: function that makes the folder, given this plan, the number of processes (None: one per processor) and a
            progress callback.
        load: function that reads the folder.
        summarize: function that describes the prepared data in a few lines.
    """

    dataset: str
    out: Path
    settings: Mapping[str, Any]
    sums: Mapping[str, str]
    write: Callable[[Plan[T], int | None, Progress], T]
    load: Callable[[Path], T]
    summarize: Callable[[T], str]

    def manifest(self) -> dict[str, Any]:
        """Return the entries that every manifest starts with: settings and checksums of the input files."""
        return {"settings": dict(self.settings), "sources": dict(self.sums)}

    def existing(self) -> T | None:
        """Load the folder if it was prepared from the same files with the same settings; None if it does not exist.

        Raises:
            DataError: the folder was prepared differently, is damaged, or holds something else.
        """
        return self.load(self.out) if self._is_prepared() else None

    def make(self, jobs: int | None = None, progress: Progress | None = None) -> T:
        """Prepare the dataset; a prepared folder of the same name is replaced.

        Args:
            jobs: number of processes; None: one per processor. With more than one, guard the calling script with
                `if __name__ == "__main__":`.
            progress: called with the current stage, the items done and the total.

        Raises:
            DataError: a file is damaged, the folder cannot be written, or another process is preparing it.
        """
        with claimed(self.out):
            check_replaceable(self.out)
            return self.write(self, jobs, progress or silent)

    def _is_prepared(self) -> bool:
        recover(self.out)
        check_replaceable(self.out)
        if not self.out.is_dir() or not any(self.out.iterdir()):
            return False
        manifest = read_manifest(self.out)
        with content_errors(self.out):
            old = {"task": manifest.get("task"), **manifest.get("settings", {})}
            old_sums = dict(manifest.get("sources", {}))
        new = {"task": self.dataset, **self.settings}
        changed = [f"{key} {old.get(key)!r}, not {new.get(key)!r}" for key in new | old if old.get(key) != new.get(key)]
        if not changed:
            names = {**self.sums, **old_sums}
            changed = [f"another {name}" for name in names if old_sums.get(name) != self.sums.get(name)]
        if changed:
            differences = "; ".join(changed[:3])
            advice = "Choose another --out, or replace it with --force"
            raise DataError(f"{self.out}: was prepared with {differences}. {advice}")
        return True


@dataclass(frozen=True)
class Option:
    """One option of a dataset: a keyword argument of its plan function, and a flag on the command line.

    Args:
        name: name of the keyword argument.
        type: type that the command line parses: int, float, str, bool, Path, tuple[int, int] or list[str].
        help: one sentence.
        default: value that the plan function uses if the option is not given, for the help text; None: see `help`.
        flag: flag on the command line; "" for the name, with - for _.
        parse: function that converts the parsed value; it raises ValueError for an invalid one.
        hidden: accepted, but left out of the help because it does not affect this dataset.
    """

    name: str
    type: Any
    help: str
    default: Any = None
    flag: str = ""
    parse: Callable[[Any], Any] | None = None
    hidden: bool = False


@dataclass(frozen=True)
class Dataset:
    """A dataset that `repulsive prepare` can make.

    Args:
        name: name of the dataset on the command line.
        summary: one line on what it is and which files it reads.
        plan: location of the plan function, "module:function"; imported only when the dataset is prepared.
        options: options of the plan function.
        reads: "folder": `data` is a folder of files with fixed names. "corpus": a text file or a folder of them.
            "download": the folder to download to. "nothing": the dataset is generated.
        folder_option: the option whose value names a subfolder of the default output folder; "" if there is none.
        is_parallel: preparing it uses several processes.
    """

    name: str
    summary: str
    plan: str
    options: tuple[Option, ...] = ()
    reads: Literal["folder", "corpus", "download", "nothing"] = "folder"
    folder_option: str = ""
    is_parallel: bool = False

    def make_plan(self, data: str | Path | None, out: str | Path, **options: Any) -> Plan[Any]:
        """Check the options and find the files.

        Args:
            data: the input folder or file; None to download or generate the dataset.
            out: the folder to make.
            options: option name -> value.

        Raises:
            DataError: the dataset has no such option, a value is invalid, or a file is missing.
        """
        names = [option.name for option in self.options]
        for name in options:
            if name not in names:
                raise self.unknown_option(name, names)
        place = self._check_data(None if data is None else Path(data))
        module, _, function = self.plan.partition(":")
        plan_function: Callable[..., Plan[Any]] = getattr(importlib.import_module(module), function)
        return plan_function(place, Path(out), **options)

    def unknown_option(self, name: str, names: list[str]) -> DataError:
        """Make the error for an option that the dataset does not have; its message suggests a similar option."""
        close = get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}? It" if close else "it"
        return DataError(f"dataset {self.name!r} has no option {name!r}; {hint} has {', '.join(names)}")

    def default_data(self) -> Path | None:
        """Return the default folder of the input files, used without `--data`: below the folder in `VARIABLE`."""
        root = os.environ.get(VARIABLE)
        if not root or self.reads == "nothing":
            return None
        folder = Path(root) / self.name
        return folder if folder.is_dir() else Path(root) if self.reads == "folder" else None

    def _check_data(self, data: Path | None) -> Path | None:
        if self.reads == "nothing" and data is not None:
            raise DataError(f"dataset {self.name!r} is generated and reads no data; leave out --data {data}")
        if data is None and self.reads in ("folder", "corpus"):
            needed = "a folder with its files" if self.reads == "folder" else "texts to train on"
            raise DataError(f"dataset {self.name!r} needs {needed}: give --data, or set {VARIABLE}")
        if self.reads == "folder" and data is not None and not data.exists():
            raise DataError(f"{data}: no such folder; it should hold the files of dataset {self.name!r}")
        return data
