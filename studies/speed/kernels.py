"""Time of each launch of the fused update on the device, and better launch settings.

    python -m studies.speed.kernels --device cuda --seconds 90 --out results/bench/kernels.json

For the attention weights of BERT-base (ViT-B/16 has the same), GPT-2 and a Llama with grouped heads, in float32, it
measures every Triton kernel alone and whole updates as CUDA graphs, with gradients restored and the L2 cache flushed
before each repetition. Bytes are those of weights, gradients and optimizer state; what a launch finds in the cache is
counted, too. Then it tries the launch settings of `kernel_settings.CANDIDATES`, and whole updates with the best of
them. Candidates are compiled in processes of their own, into Triton's cache, before any is measured.

Each result is printed and saved at once. After `--seconds` the rest is left out. Gradients of every candidate are
compared: with a float64 reference, or with those of the default settings if the rule has noise. On a CPU, `--models
toy` runs the same code in Triton's interpreter, with TRITON_INTERPRET=1; its times mean nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from studies.output import save
from studies.speed.kernel_launches import RULES, SHAPES, Clock, Launches, buckets, oracle
from studies.speed.kernel_settings import CANDIDATES, Candidate, Settings, applied
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.lab.bench.machine import describe
from repulsive.particles.named import NOISE_IN_GRADIENT

LARGEST_ERROR = 3e-6  # relative error of gradients, as in the tests
TUNED = {"paper": ("gram, solve", "combine"), "spos-paper": ("gram, solve", "combine with noise")}


class Study:
    """Measurements of all models.

    Args:
        arguments: the parsed command line.
        command: the command line, for the report.
    """

    def __init__(self, arguments: argparse.Namespace, command: str) -> None:
        self._arguments, self._device = arguments, torch.device(arguments.device)
        self._end = time.monotonic() + arguments.seconds
        self.facts: dict[str, Any] = {"command": command, **describe(arguments.device), "cases": {}}
        if self._device.type == "cuda":
            self.facts["cache_bytes"] = torch.cuda.get_device_properties(0).L2_cache_size
        self._failed: dict[tuple[str, str], str] = {}

    def run(self) -> None:
        chosen, device, layers = self._arguments.models, self._device, self._arguments.layers
        cases = {case: groups for name in chosen for case, groups in buckets(name, device, layers).items()}
        tuned = [case for case in cases if case.split(",")[0] in self._arguments.tune]
        self._compile(tuned, {case: Launches(cases[case]).update.padded for case in tuned})
        for case, groups in cases.items():
            self._baseline(case, groups)
        for case in tuned:
            self._tune(case, cases[case])

    def _is_late(self) -> bool:
        return time.monotonic() > self._end

    def _candidates(self, padded: int) -> list[Candidate]:
        """Return the candidates to try for a padded number of heads."""
        return [candidate for candidate in CANDIDATES.get(padded, []) if self._arguments.only in candidate.name]

    def _record(self, case: str, kind: str, name: str, value: Mapping[str, Any]) -> None:
        """Print a measurement and save everything."""
        self.facts["cases"].setdefault(case, {}).setdefault(kind, {})[name] = value
        texts = [
            f"{key} {number:.4g}" if isinstance(number, float) else f"{key} {number}" for key, number in value.items()
        ]
        print(f"{case}: {kind}: {name}: {', '.join(texts)}", flush=True)
        save(self._arguments.out, self.facts)

    def _compile(self, cases: Sequence[str], padded: Mapping[str, int]) -> None:
        """Compile all candidates into Triton's cache; note those that fail."""
        jobs = [(case, candidate) for case in cases for candidate in self._candidates(padded[case])]
        if not self._arguments.workers or not jobs:
            return
        started = time.monotonic()
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(self._arguments.workers, len(jobs)), mp_context=context)
        futures = [pool.submit(compile_candidate, *job, self._arguments.device) for job in jobs]
        done, late = wait(futures, timeout=self._arguments.seconds / 2)
        for future, (case, candidate) in zip(futures, jobs, strict=True):
            error = "not compiled in time" if future in late else str(future.exception() or future.result())
            if error:
                self._failed[case, candidate.name] = error
        pool.shutdown(wait=not late, cancel_futures=True)
        print(f"compiled {len(done)} of {len(jobs)} candidates in {time.monotonic() - started:.0f} s", flush=True)

    def _baseline(self, case: str, groups: list[HeadGroup]) -> None:
        """Measure every launch and every update with the default settings."""
        launches = Launches(groups)
        clock = Clock(launches.parameters, self._arguments.repeats)
        size = launches.numbers * groups[0].slices[0].parameter().element_size()
        self._record(case, "facts", "weights", {"groups": len(groups), "heads": launches.update.heads, "bytes": size})
        self._record(case, "facts", "nothing", {"us": 1e6 * clock.seconds(lambda: None)})
        for name, (function, passes) in launches.alone().items():
            self._record(case, "launches", name, _rate(clock.seconds(function), passes * size))
        clock.restore_all()  # noise after the step changes weights
        for rule in RULES:
            function, passes = launches.whole(rule)
            self._record(case, "updates", rule, _rate(clock.seconds(function), passes * size))
        clock.restore_all()

    def _tune(self, case: str, groups: list[HeadGroup]) -> None:
        """Try the candidates of every launch, then whole updates with the best of them."""
        launches = Launches(groups)
        clock = Clock(launches.parameters, self._arguments.repeats)
        expected = {rule: self._expected(clock, groups, rule) for rule in TUNED}
        names = {launch for some in TUNED.values() for launch in some}
        default = {launch: 1e6 * clock.seconds(launches.alone()[launch][0]) for launch in names}
        best: dict[str, tuple[float, Settings]] = {launch: (us, {}) for launch, us in default.items()}
        for candidate in self._candidates(launches.update.padded):
            launch = candidate.launch
            rule = next(rule for rule, some in TUNED.items() if launch in some)
            error = self._failed.get((case, candidate.name))
            if error is None:
                found = self._try(clock, groups, {launch: candidate.settings}, rule, expected, launch)
            else:
                found = {"failed": error}
            if "us" in found:
                found["gain"] = 1 - found["us"] / default[launch]
                if found["error"] < LARGEST_ERROR and found["us"] < best[launch][0]:
                    best[launch] = (found["us"], candidate.settings)
            self._record(case, "candidates", candidate.name, found)
        for rule, some in TUNED.items():
            self._tune_update(case, groups, rule, {launch: best[launch][1] for launch in some}, clock, expected)

    def _expected(self, clock: Clock, groups: list[HeadGroup], rule: str) -> list[Tensor]:
        """Return the gradients to compare with: in float64, or those of the default settings for a rule with noise."""
        if rule in NOISE_IN_GRADIENT:
            return clock.gradients_after(Launches(groups).whole(rule)[0])
        clock.restore()
        return oracle(groups, rule)

    def _tune_update(
        self,
        case: str,
        groups: list[HeadGroup],
        rule: str,
        chosen: Mapping[str, Settings],
        clock: Clock,
        expected: Mapping[str, list[Tensor]],
    ) -> None:
        """Measure whole updates with the default settings, and with the best of each launch."""
        default = 1e6 * clock.seconds(Launches(groups).whole(rule)[0])
        tries: dict[str, dict[str, Settings]] = {
            f"default, {precision}": {"": {"PRECISION": precision}} for precision in ("tf32x3", "split")
        }
        tries["best"] = dict(chosen)
        best: dict[str, Any] = {"us": default, "settings": "default"}
        for name, settings in tries.items():
            found = self._try(clock, groups, settings, rule, expected)
            if "us" in found:
                found["gain"] = 1 - found["us"] / default
                if found["error"] < LARGEST_ERROR and found["us"] < best["us"]:
                    best = {**found, "settings": {launch: dict(some) for launch, some in settings.items()}}
            self._record(case, rule, name, found)
        self._record(case, "best", rule, best)

    def _try(
        self,
        clock: Clock,
        groups: list[HeadGroup],
        settings: Mapping[str, Settings],
        rule: str,
        expected: Mapping[str, list[Tensor]],
        launch: str | None = None,
    ) -> dict[str, Any]:
        """Measure one launch, or a whole update, with other settings; compare the gradients of the whole update."""
        if self._is_late():
            return {"failed": "no time left"}
        try:
            with applied(settings, Launches(groups).update.padded):
                whole = Launches(groups).whole(rule)[0]
                error = relative_error(clock.gradients_after(whole), expected[rule])
                function = whole if launch is None else Launches(groups).alone()[launch][0]
                return {"us": 1e6 * clock.seconds(function), "error": error}
        except Exception as error:  # too many registers or too much shared memory, a refusal of the compiler, ...
            return {"failed": describe_error(error)}


def compile_candidate(case: str, candidate: Candidate, device: str) -> str:
    """Compile a candidate by launching it on one layer, in a process of its own; return its error, or nothing."""
    name = case.split(",")[0]
    try:
        groups = buckets(name, torch.device(device), layers=1)[case]
        with applied({candidate.launch: candidate.settings}, Launches(groups).update.padded):
            launches = Launches(groups)
            launches.alone()[candidate.launch][0]()
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception as error:
        return describe_error(error)
    return ""


def describe_error(error: Exception) -> str:
    """Return the type and the beginning of the message of an error."""
    return f"{type(error).__name__}: {error}"[:200]


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of gradients."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return max(errors)


def _rate(seconds: float, size: float) -> dict[str, float]:
    return {"us": 1e6 * seconds, "bytes": size, "tb_per_s": size / seconds / 1e12}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name in SHAPES if name != "toy"]
    parser.add_argument("--models", nargs="+", default=models, choices=list(SHAPES), help="models to measure")
    parser.add_argument("--tune", nargs="*", default=["gpt2", "bert-base"], choices=list(SHAPES), help="models to tune")
    parser.add_argument(
        "--only", default="", help="try only candidates with this text in their name, such as BY_COLUMN"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=90, help="time for everything; half of it for compiling")
    parser.add_argument("--repeats", type=int, default=30, help="repetitions of each measurement")
    parser.add_argument("--layers", type=int, help="number of layers, for a quick trial")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that compile; 0 for none"
    )
    parser.add_argument("--out", type=Path, default=Path("results/bench/kernels.json"), help="JSON file")
    arguments = parser.parse_args(words)
    words = sys.argv[1:] if words is None else words
    Study(arguments, shlex.join(["python", "-m", "studies.speed.kernels", *words])).run()


if __name__ == "__main__":
    main()
