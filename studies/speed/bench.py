"""What measurements of speed share: parts under a time limit, findings that are kept as they come, rates."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import wall
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.runs import versions

PEAKS = {"H200": 989e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A100": 312e12}  # dense bf16, by the vendor


class Late(Exception):
    """The time of a part is over."""


class SpeedBench:
    """What is measured, on what, and how far it is. Every part is a method of its name.

    Args:
        given: the command line, parsed: device, out, only, limit and measure at least.
        command: as it was given.
    """

    parts: ClassVar[Sequence[str]] = ()
    settings: ClassVar[Sequence[str]] = ()  # what parts of one file have in common
    in_all: ClassVar[bool] = False  # whether the limit is for all parts together

    def __init__(self, given: argparse.Namespace, command: str) -> None:
        self.given, self.command, self.device = given, command, torch.device(given.device)
        self.machine = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
        self.facts: dict[str, Any] = {
            "machine": self.machine,
            "threads": torch.get_num_threads(),
            "versions": versions() | _transformers(),
            "settings": {name: _plain(getattr(given, name)) for name in self.settings},
        }
        known = read_json(given.out / "speed.json")
        if isinstance(known, dict) and all(known.get(name) == value for name, value in self.facts.items()):
            self.facts = known
        self.deadline = time.perf_counter() + given.limit
        if given.device == "cuda":
            torch.set_float32_matmul_precision("high")  # as the loop has it, for all parts

    def as_markdown(self) -> str:
        """What is known so far, as tables."""
        raise NotImplementedError

    def run(self) -> list[str]:
        """The parts that are asked for, one after the other; those that failed did not keep the others back."""
        failed = []
        for name in self.parts:
            if name not in self.given.only:
                continue
            began = time.perf_counter()
            if not self.in_all:
                self.deadline = began + self.given.limit
            self.facts[name] = {"command": self.command, "date": date.today().isoformat()}
            try:
                getattr(self, name)()
            except Late as late:
                self.say(name, f"stopped: {late}")
            except RepulsiveError:
                raise  # the data or the settings are wrong, for all parts
            except Exception as error:
                traceback.print_exc()
                self.say(name, f"failed: {type(error).__name__}: {error}".splitlines()[0])
                failed.append(name)
            self.note(name, "took", round(time.perf_counter() - began, 1))
            self.clear()
        return failed

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def check(self, what: str) -> None:
        """Raise `Late` if there is no time left."""
        if time.perf_counter() > self.deadline:
            raise Late(f"{self.given.limit:g} s were over at {what}")

    def fits(self, part: str, what: str, seconds: float) -> bool:
        """Whether something that takes so long can still be measured; if not, that is told."""
        left = self.deadline - time.perf_counter()
        if left < seconds:
            self.say(part, f"left out: {what}, which takes about {seconds:.0f} s, and {max(0.0, left):.0f} s are left")
        return left >= seconds

    def say(self, part: str, line: str) -> None:
        print(f"{part}: {line}", flush=True)
        self.facts[part].setdefault("notes", []).append(line)

    def note(self, part: str, name: str, value: Any) -> None:
        """Print a finding and keep it, on disk."""
        self.facts[part][name] = value
        self.given.out.mkdir(parents=True, exist_ok=True)
        (self.given.out / "speed.json").write_text(json.dumps(self.facts, indent=2) + "\n")
        (self.given.out / "speed.md").write_text(self.as_markdown())
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)

    def alternate(self, work: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds of functions that take turns, until the time is over."""
        seconds: dict[str, list[float]] = {label: [] for label in work}
        until = min(time.perf_counter() + len(work) * self.given.measure, self.deadline)
        order = list(work)
        while not seconds[order[0]] or time.perf_counter() < until:
            for label in order:
                seconds[label].append(wall(work[label], self.device))
            order.reverse()
        return seconds

    def rates(self, tokens: int, seconds: float, steps: int, operations: float) -> dict[str, float]:
        """Of a stretch of training."""
        found = {
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds / steps,
            "step_operations": operations / steps,
            "operations_per_second": operations / seconds,
        }
        for name, peak in PEAKS.items():
            if name in self.machine:
                return found | {"share_of_peak": operations / seconds / peak}
        return found


def trained(model: nn.Module) -> int:
    """Numbers that a training changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _transformers() -> dict[str, str]:
    try:
        import transformers
    except ImportError:
        return {}
    return {"transformers": transformers.__version__}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
