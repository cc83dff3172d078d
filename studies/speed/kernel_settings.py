"""Launch settings of the fused update to try, and a context in which they apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from repulsive.repulsion.backends import launch_settings

Settings = Mapping[str, int | str]
TABLES = {"gram, solve": launch_settings.GRAM, "combine": launch_settings.COMBINE}
TABLES["combine with noise"] = launch_settings.NOISY
OF_TABLES = ("BLOCK", "num_warps", "num_stages")
OF_COLUMNS = ("BLOCK", "num_warps", "programs", "WIDTH", "UNROLL", "maxnreg")  # see `triton_kernels.columns`
OF_SOLVE = {"CHUNK": "CHUNK", "SOLVE_WARPS": "num_warps"}  # settings of `solve`, and their names in its table


class Candidate(NamedTuple):
    """Settings for one launch of `Launches.alone`; `programs` are those of a multiprocessor."""

    launch: str
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.launch}: {self}"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "default"


def _candidate(
    launch: str, block: int, warps: int, stages: int, programs: int, precision: str = "split", **more: int
) -> Candidate:
    sizes = {"BLOCK": block, "num_warps": warps, "num_stages": stages, "programs": programs}
    return Candidate(launch, {**sizes, "PRECISION": precision, **more})


def _by_column(launch: str, warps: int, width: int, programs: int, unroll: int = 0, **more: int) -> Candidate:
    """Keep `width` columns per thread in registers, in place of products on tensor cores."""
    sizes = {"BLOCK": 32 * warps * width, "num_warps": warps, "programs": programs, "WIDTH": width}
    own = {"UNROLL": unroll} if unroll else {}
    return Candidate(launch, {**sizes, **own, "BY_COLUMN": 1, **more})


_gram, _combine = partial(_candidate, "gram, solve"), partial(_candidate, "combine")
_noisy = partial(_candidate, "combine with noise")
_gram_columns, _combine_columns = partial(_by_column, "gram, solve"), partial(_by_column, "combine")
_noisy_columns = partial(_by_column, "combine with noise")

# By padded number of heads.
CANDIDATES: dict[int, list[Candidate]] = {
    2: [
        *(_gram_columns(4, 4, 8), _gram_columns(4, 4, 4), _combine_columns(4, 4, 8, 2), _combine_columns(4, 2, 16, 2)),
        *(_gram(512, 2, 3, 6), _gram(1024, 4, 3, 6), _gram(1024, 2, 3, 12)),
        *(_combine(1024, 4, 3, 8), _combine(2048, 8, 3, 4), _combine(1024, 2, 3, 8)),
    ],
    16: [
        *(_gram_columns(4, 4, 3), _gram_columns(2, 4, 6), _gram_columns(1, 4, 12), _gram_columns(4, 4, 2)),
        *(_gram_columns(8, 2, 2), _gram_columns(4, 2, 4), _gram_columns(4, 2, 2), _gram_columns(4, 4, 6)),
        *(_gram_columns(4, 4, 3, SOLVE_WARPS=4), _gram_columns(2, 4, 5, maxnreg=200)),
        *(_combine_columns(1, 4, 16, 2), _combine_columns(4, 4, 4, 2), _combine_columns(1, 4, 16, 1)),
        *(_combine_columns(1, 4, 12, 12), _combine_columns(4, 4, 3, 12), _combine_columns(4, 4, 14, 2)),
        *(_combine_columns(4, 4, 3, 2), _combine_columns(4, 2, 6, 2), _combine_columns(2, 4, 6, 3)),
        *(_noisy_columns(1, 4, 12, 1), _noisy_columns(4, 4, 3, 1), _noisy_columns(4, 2, 5, 1)),
        *(_gram(64, 1, 3, 5), _gram(64, 1, 3, 9), _gram(64, 1, 3, 11), _gram(64, 1, 4, 11), _gram(64, 1, 3, 18)),
        *(_gram(32, 1, 4, 9), _gram(128, 2, 3, 5), _gram(64, 2, 3, 9), _gram(64, 1, 3, 9, "tf32x3")),
        *(_gram(64, 1, 3, 11, SOLVE_WARPS=4), _gram(64, 1, 3, 5, SOLVE_WARPS=8)),
        *(_combine(256, 4, 3, 2), _combine(256, 4, 2, 3), _combine(128, 4, 2, 4), _combine(128, 2, 2, 6)),
        *(_combine(64, 2, 3, 7), _combine(64, 4, 3, 6), _combine(64, 4, 2, 6), _combine(128, 4, 1, 5)),
        *(_combine(64, 4, 3, 6, "tf32x3"), _combine(128, 4, 2, 4, "tf32x3"), _combine(64, 4, 2, 4, "ieee")),
        *(_noisy(64, 4, 3, 5), _noisy(64, 4, 2, 5), _noisy(64, 4, 1, 5), _noisy(32, 2, 3, 10), _noisy(32, 4, 3, 7)),
    ],
}


@contextmanager
def applied(settings: Mapping[str, Settings], padded: int) -> Iterator[None]:
    """Change launch settings within a context. Updates that are made in it use them.

    Args:
        settings: settings by launch; those of "" belong to no launch.
        padded: padded number of heads.
    """
    with _unchanged(padded):
        for launch, some in settings.items():
            name, by_column = launch.removesuffix(", solve"), dict(launch_settings.BY_COLUMN.get(padded, {}))
            if "BY_COLUMN" in some:
                by_column[name] = {option: int(value) for option, value in some.items() if option in OF_COLUMNS}
            elif launch in TABLES and some:
                by_column.pop(name, None)
                options = {option: int(value) for option, value in some.items() if option in OF_TABLES}
                TABLES[launch][padded] = TABLES[launch].get(padded, {}) | options
            launch_settings.BY_COLUMN[padded] = by_column
            solve = {OF_SOLVE[option]: int(value) for option, value in some.items() if option in OF_SOLVE}
            launch_settings.SOLVE[padded] = launch_settings.SOLVE[padded] | solve
            if "programs" in some:
                programs = launch_settings.PROGRAMS.get(padded, {})
                launch_settings.PROGRAMS[padded] = programs | {name: int(some["programs"])}
            if "PRECISION" in some:
                launch_settings.PRECISION[padded] = str(some["PRECISION"])
        yield


@contextmanager
def _unchanged(padded: int) -> Iterator[None]:
    """Restore the entries of all tables at the end of a context."""
    tables: list[dict] = [*TABLES.values(), launch_settings.SOLVE, launch_settings.PROGRAMS, launch_settings.PRECISION]
    tables.append(launch_settings.BY_COLUMN)
    entries = [table.get(padded) for table in tables]
    try:
        yield
    finally:
        for table, entry in zip(tables, entries, strict=True):
            if entry is None:
                table.pop(padded, None)
            else:
                table[padded] = entry
