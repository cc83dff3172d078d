"""Launch settings of the fused update to try, and a context in which they apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from repulsive.repulsion.backends import launch_settings

Settings = Mapping[str, int | str]
TABLES = {"gram, solve": launch_settings.GRAM, "combine": launch_settings.COMBINE}
TABLES["combine with noise"] = launch_settings.NOISY
OF_TABLES = ("BLOCK", "num_warps", "num_stages")
OF_SOLVE = {"CHUNK": "CHUNK", "SOLVE_WARPS": "num_warps"}  # settings of `solve`, and their names in its table
PROGRAMS = "programs"  # of `combine` on a multiprocessor; as many run at once by registers and shared memory


class Candidate(NamedTuple):
    """Settings for one launch of `Launches.alone`."""

    launch: str
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.launch}: {self}"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "default"


def _candidate(launch: str, sizes: tuple[int, int, int], precision: str, **more: int) -> Candidate:
    block, warps, stages = sizes
    return Candidate(launch, {"BLOCK": block, "num_warps": warps, "num_stages": stages, "PRECISION": precision, **more})


def _gram(block: int, warps: int, stages: int, splits: int, precision: str = "split", **more: int) -> Candidate:
    return _candidate("gram, solve", (block, warps, stages), precision, SPLITS=splits, **more)


def _combine(block: int, warps: int, stages: int, programs: int, precision: str = "split") -> Candidate:
    return _candidate("combine", (block, warps, stages), precision, programs=programs)


def _noisy(block: int, warps: int, stages: int, programs: int) -> Candidate:
    return _candidate("combine with noise", (block, warps, stages), "split", programs=programs)


# By padded number of heads. `programs` are those that ran at once when compiled for an H200, by Triton 3.6.
CANDIDATES: dict[int, list[Candidate]] = {
    2: [
        *(_gram(512, 2, 3, 16), _gram(1024, 4, 3, 16), _gram(1024, 2, 3, 32)),
        *(_combine(1024, 4, 3, 8), _combine(2048, 8, 3, 4), _combine(1024, 2, 3, 8)),
    ],
    16: [
        *(_gram(64, 1, 3, 16), _gram(64, 1, 3, 32), _gram(64, 1, 3, 40), _gram(64, 1, 4, 32), _gram(64, 1, 3, 64)),
        *(_gram(32, 1, 4, 32), _gram(128, 2, 3, 16), _gram(64, 2, 3, 32), _gram(64, 1, 3, 32, "tf32x3")),
        *(_gram(64, 1, 3, 32, SOLVE_WARPS=4), _gram(64, 1, 3, 16, SOLVE_WARPS=8, CHUNK=16)),
        *(_combine(256, 4, 3, 2), _combine(256, 4, 2, 3), _combine(128, 4, 2, 4), _combine(128, 2, 2, 6)),
        *(_combine(64, 2, 3, 7), _combine(64, 4, 3, 6), _combine(64, 4, 2, 6), _combine(128, 4, 1, 5)),
        *(_combine(64, 4, 3, 6, "tf32x3"), _combine(128, 4, 2, 4, "tf32x3"), _combine(64, 4, 2, 4, "ieee")),
        *(_noisy(64, 4, 3, 5), _noisy(64, 4, 2, 5), _noisy(64, 4, 1, 5), _noisy(32, 2, 3, 10), _noisy(32, 4, 3, 7)),
    ],
}
# Tried with the best settings of each launch, in a whole update.
WAVES: list[Settings] = [
    {"BACKWARD": True},
    {"WAVES": 2},
    {"WAVES": 2, "STREAMS": 2, "SPLITS": 32},
    {"WAVES": 3, "STREAMS": 3, "SPLITS": 32},
    {"WAVES": 6, "STREAMS": 2, "SPLITS": 64},
    {"WAVES": 6, "STREAMS": 3, "SPLITS": 64},
    {"WAVES": 9, "STREAMS": 3, "SPLITS": 64},
]


@contextmanager
def applied(settings: Mapping[str, Settings], padded: int, slices: int) -> Iterator[None]:
    """Change launch settings within a context. Updates that are made in it use them.

    Args:
        settings: settings by launch; those of "" belong to no launch.
        padded: padded number of heads.
        slices: slices of the update.
    """
    with _unchanged(padded):
        for launch, some in settings.items():
            if launch in TABLES:
                options = {name: int(value) for name, value in some.items() if name in OF_TABLES}
                TABLES[launch][padded] = TABLES[launch].get(padded, {}) | options
            solve = {OF_SOLVE[name]: int(value) for name, value in some.items() if name in OF_SOLVE}
            launch_settings.SOLVE[padded] = launch_settings.SOLVE[padded] | solve
            for name in some.keys() - {*OF_TABLES, *OF_SOLVE, PROGRAMS}:
                setattr(launch_settings, name, some[name])
            if "SPLITS" in some:
                launch_settings.BUSY = 0  # no more than that
        waves = min(launch_settings.WAVES, slices)
        for some in settings.values():
            if PROGRAMS in some:
                at_once = int(some[PROGRAMS]) * _multiprocessors()
                launch_settings.COMBINE_SPLITS = max(1, at_once * waves // slices)
        yield


@contextmanager
def _unchanged(padded: int) -> Iterator[None]:
    numbers = {name: value for name, value in vars(launch_settings).items() if isinstance(value, int | str)}
    entries, solve = {launch: table.get(padded) for launch, table in TABLES.items()}, launch_settings.SOLVE[padded]
    try:
        yield
    finally:
        for name in ("WAVES", "STREAMS", "SPLITS", "COMBINE_SPLITS", "BUSY", "BACKWARD", "PRECISION"):
            setattr(launch_settings, name, numbers[name])
        launch_settings.SOLVE[padded] = solve
        for launch, entry in entries.items():
            if entry is None:
                TABLES[launch].pop(padded, None)
            else:
                TABLES[launch][padded] = entry


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1
