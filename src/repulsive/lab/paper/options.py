"""Options of `repulsive reproduce`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.lab.engine.recipe_tables import apply_changes, flatten

Log = Callable[[str], None]  # receives progress messages, one line each


@dataclass(frozen=True)
class Options:
    """Options of a reproduction: which rows and datasets, at what size, and where files are written.

    Args:
        data: folder of prepared datasets.
        out: folder for tables and figures.
        runs: folder of all runs.
        seeds: number of runs for each row.
        device: "cpu" or "cuda"; None uses CUDA if available.
        jobs: number of runs in parallel; 0 uses all cores, 1 trains in this process.
        changes: `key=value` for every run; part of the names of their folders.
        methods: rows to train besides the first row of each table; empty for all rows.
        datasets: datasets to use; empty for the paper's datasets.
        judgements: files of the judges, and the key.
        toy: use generated data and toy-sized models.
        times: measure step times.
        results: folder of committed results, which a checkout has.
    """

    data: Path = Path("prepared")
    out: Path = Path("reproduced")
    runs: Path = Path("runs")
    seeds: int = 6
    device: str | None = None
    jobs: int = 0
    changes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    judgements: tuple[Path, ...] = ()
    toy: bool = False
    times: bool = True
    results: Path = Path("results")

    def changed(self, key: str) -> Any:
        """Return the value that `changes` give to a setting, such as "data.share"; None if they leave it alone."""
        return flatten(apply_changes({}, self.changes)).get(key)
