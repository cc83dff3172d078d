"""Command lines of studies: shared options, and errors as one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from repulsive.errors import RepulsiveError
from repulsive.lab.engine.stop_signals import Stopped


def common_arguments(
    name: str, about: str | None, stages: Sequence[str], scales: Sequence[str]
) -> argparse.ArgumentParser:
    """Make a parser with the options of all studies in stages.

    Args:
        name: of the study, for the default folders.
        about: the script's docstring.
        stages: without `tables`.
        scales: amounts of training; the first is the default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = [*stages, "tables"]
    parser.add_argument("--stage", nargs="+", default=stages, choices=stages, help="stages to run; all by default")
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared datasets")
    parser.add_argument("--out", type=Path, default=Path("runs") / name, help="folder of runs")
    parser.add_argument("--results", type=Path, default=Path("results") / name, help="folder of tables and figures")
    parser.add_argument("--tuning-seeds", type=int, default=1, help="seeds for tuning, numbered from 100")
    parser.add_argument("--seeds", type=int, default=3, help="seeds for final runs, numbered from 0")
    parser.add_argument("--jobs", type=int, default=0, help="runs in parallel; 0: all cores, 1: in this process")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--limit", type=float, help="seconds; runs that would take longer are not started")
    parser.add_argument("--drop-weights", action="store_true", help="delete the weights of finished runs")
    parser.add_argument("--set", action="append", default=[], help="key=value for every run; repeatable")
    parser.add_argument("--scale", choices=list(scales), default=scales[0], help="tiny: a quick trial of the script")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and train nothing")
    return parser


@contextmanager
def errors_in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with one line on an error of this package or an interrupt; a closed output pipe is not an error."""
    try:
        yield
    except Stopped as stopped:
        parser.exit(stopped.code, f"{stopped}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; rerun the same command to resume from the last checkpoints\n")
    except BrokenPipeError:  # Python would report it once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RepulsiveError as error:
        parser.exit(2, f"{error}\n")
