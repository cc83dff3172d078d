"""Base class of the speed benchmarks: run parts under a time limit, and save every measurement at once."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import wall_time
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.runs import versions

PEAKS = {
    "H200": 989e12,
    "H100 80GB HBM3": 989e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
}  # dense bf16 operations per second, from the data sheets


class TimeUp(Exception):
    """The time limit of a part is reached."""


class SpeedBench:
    """A benchmark in parts. Every part is a method with its name.

    Args:
        arguments: the parsed command line, with at least device, out, only, limit and measure.
        command: the command line, for the report.
    """

    parts: ClassVar[Sequence[str]] = ()
    settings: ClassVar[Sequence[str]] = ()  # options that all parts of one file share
    shared_limit: ClassVar[bool] = False  # whether the limit holds for all parts together

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self.arguments, self.command, self.device = arguments, command, torch.device(arguments.device)
        self.machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
        self.facts: dict[str, Any] = {
            "machine": self.machine,
            "threads": torch.get_num_threads(),
            "versions": versions() | _transformers_version(),
            "settings": {name: _as_json(getattr(arguments, name)) for name in self.settings},
        }
        stored = read_json(arguments.out / "speed.json")
        if isinstance(stored, dict) and all(stored.get(name) == value for name, value in self.facts.items()):
            self.facts = stored
        self.deadline = time.perf_counter() + arguments.limit
        if arguments.device == "cuda":
            torch.set_float32_matmul_precision("high")  # as in the training loop

    @classmethod
    def run_from_command_line(cls, module: str, arguments: argparse.Namespace, words: Sequence[str] | None) -> None:
        """Run the benchmark, and end with a message if data or settings are wrong, or a part failed.

        Args:
            module: name of the module that was run.
            arguments: the parsed command line.
            words: the command line; None: that of the process.
        """
        words = sys.argv[1:] if words is None else words
        try:
            failed = cls(arguments, shlex.join(["python", "-m", module, *words])).run()
        except RepulsiveError as error:
            raise SystemExit(f"{module}: {error}") from None
        if failed:
            raise SystemExit(f"{module}: {', '.join(failed)} failed, see above")

    def as_markdown(self) -> str:
        """Format the measurements so far."""
        raise NotImplementedError

    def run(self) -> list[str]:
        """Run the requested parts; return the names of those that failed."""
        failed = []
        for name in self.parts:
            if name not in self.arguments.only:
                continue
            started = time.perf_counter()
            if not self.shared_limit:
                self.deadline = started + self.arguments.limit
            self.facts[name] = {"command": self.command, "date": date.today().isoformat()}
            try:
                getattr(self, name)()
            except TimeUp as error:
                self.add_note(name, f"stopped: {error}")
            except RepulsiveError:
                raise  # wrong data or settings affect all parts
            except Exception as error:
                traceback.print_exc()
                self.add_note(name, f"failed: {type(error).__name__}: {error}".splitlines()[0])
                failed.append(name)
            self.record(name, "took", round(time.perf_counter() - started, 1))
            self.clear()
        return failed

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def check_time(self, what: str) -> None:
        """Raise `TimeUp` if there is no time left."""
        if time.perf_counter() > self.deadline:
            raise TimeUp(f"the limit of {self.arguments.limit:g} s was reached at {what}")

    def fits(self, part: str, what: str, seconds: float) -> bool:
        """Whether there is time for a measurement of some seconds; if not, add a note."""
        left = self.deadline - time.perf_counter()
        if left < seconds:
            self.add_note(
                part, f"left out: {what}; it takes about {seconds:.0f} s, and {max(0.0, left):.0f} s are left"
            )
        return left >= seconds

    def add_note(self, part: str, line: str) -> None:
        """Print a note and keep it for the report."""
        print(f"{part}: {line}", flush=True)
        self.facts[part].setdefault("notes", []).append(line)

    def record(self, part: str, name: str, value: Any) -> None:
        """Print a measurement and save it."""
        self.facts[part][name] = value
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        (self.arguments.out / "speed.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        (self.arguments.out / "speed.md").write_text(self.as_markdown())
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)

    def alternate(self, work: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Time functions in turns, until the measuring time or the limit is over; return the seconds of each call."""
        seconds: dict[str, list[float]] = {label: [] for label in work}
        until = min(time.perf_counter() + len(work) * self.arguments.measure, self.deadline)
        order = list(work)
        while not seconds[order[0]] or time.perf_counter() < until:
            for label in order:
                seconds[label].append(wall_time(work[label], self.device))
            order.reverse()
        return seconds

    def rates(self, tokens: int, seconds: float, steps: int, operations: float) -> dict[str, float]:
        """Rates of a stretch of training."""
        numbers = {
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / steps,
            "step_operations": operations / steps,
            "operations_per_second": operations / seconds,
        }
        for name, peak in PEAKS.items():
            if name in self.machine:
                return numbers | {"share_of_peak": operations / seconds / peak}
        return numbers


def count_parameters(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _transformers_version() -> dict[str, str]:
    try:
        import transformers
    except ImportError:
        return {}
    return {"transformers": transformers.__version__}


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
