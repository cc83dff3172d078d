"""Run the benchmarks of `repulsive bench`: check options, fill in defaults, measure, print and write the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import ConfigError
from repulsive.lab.bench.model_cost import CostOptions, measure_model
from repulsive.lab.bench.model_table import print_costs
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.report import run, write_json
from repulsive.lab.bench.rules import build_cases
from repulsive.lab.bench.steps import VARIANTS, Options
from repulsive.lab.bench.turns import LEAST_ROUNDS
from repulsive.safety.folders import check_creatable

DEFAULT_SECONDS = 120.0

Print = Callable[[str], None]


def choose_device(device: str) -> str:
    """Return `device`, or for "" the GPU if there is one.

    Raises:
        ConfigError: the device is unknown or missing.
    """
    if device not in ("", "cpu", "cuda"):
        raise ConfigError(f"--device {device!r}: choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def bench_model(
    model: str,
    rules: Sequence[str] = (),
    *,
    device: str,
    rounds: int = 0,
    seconds: float | None = None,
    steps: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    layers: int | None = None,
    compiled: bool = False,
    cuda_graphs: bool = False,
    json_file: Path | None = None,
    progress: Print = print,
    show: bool = True,
    full: bool = False,
) -> dict[str, Any]:
    """Measure the cost of rules in a model of transformers and print a table.

    Args:
        model: name of a preset.
        rules: names of rules and other cases; empty for all that work with the model.
        device: "cpu" or "cuda".
        rounds: measured turns of each rule; 0: as many as fit in `seconds`.
        seconds: stop after the round in which this time has passed, after six rounds at the earliest. None without
            `rounds`: 120 seconds on cuda, six rounds on cpu.
        steps: ordinary training steps per turn; None: 2.
        batch: sequences or images per step; None: that of the preset.
        length: tokens per sequence; None: that of the preset.
        layers: number of layers; None: that of the preset.
        compiled: compile the model with `torch.compile`.
        cuda_graphs: let the compiled model run as CUDA graphs.
        json_file: write all numbers to this file.
        progress: called with one line of progress at a time.
        show: print the table.
        full: print confidence intervals, throughput, memory and the time inside hooks, too.

    Returns:
        All numbers.

    Raises:
        ConfigError: there are too few rounds, or `cuda_graphs` is set without a GPU or without `compiled`.
        SelectionError: the model is unknown.
        RuleError: a rule is unknown.
    """
    from rich.console import Console

    find_preset(model)
    build_cases(rules)
    if rounds < 0 or 0 < rounds < LEAST_ROUNDS:
        raise ConfigError(f"--rounds {rounds}: a confidence interval needs at least {LEAST_ROUNDS} rounds")
    on_gpu = device == "cuda"
    if cuda_graphs and not (compiled and on_gpu):
        raise ConfigError("--cuda-graphs needs --compile and a GPU")
    if json_file is not None:
        _prepare_file(json_file)
    if not rounds and seconds is None:
        rounds, seconds = (0, DEFAULT_SECONDS) if on_gpu else (LEAST_ROUNDS, None)
    options = CostOptions(
        model,
        tuple(rules),
        device,
        rounds=rounds or None,
        steps=steps or 2,
        warm_up=5 if on_gpu else 1,
        hook_turns=5 if on_gpu else 3,
        seconds=seconds,
        batch=batch,
        length=length,
        layers=layers,
        compiled=compiled,
        cuda_graphs=cuda_graphs,
    )
    facts = measure_model(options, progress=progress)
    if show:
        print_costs(facts, Console(), full)
    if json_file is not None:
        write_json(json_file, facts)
        progress(f"written to {json_file}")
    return facts


def bench_transformer(
    *,
    device: str,
    tokens: Sequence[int] = (),
    variants: Sequence[str] = (),
    rounds: int = 0,
    compiled: bool = False,
    growth: bool = True,
    out: Path | None = None,
    json_file: Path | None = None,
    progress: Print = print,
) -> dict[str, Any]:
    """Measure the cost of repulsion in the paper's Transformer-small.

    Args:
        device: "cpu" or "cuda".
        tokens: target tokens per step, one table column each; empty: 4,096 and 16,384 on cuda, 2,048 on cpu.
        variants: rows of the table; empty for all.
        rounds: rounds of interleaved steps; 0: 300 on cuda, 12 on cpu.
        compiled: compile the loss with `torch.compile`.
        growth: also measure how the cost grows with heads, width and layers.
        out: folder for JSON, Markdown and the plot.
        json_file: write all numbers to this file.
        progress: called with one line of progress at a time.

    Returns:
        All numbers.

    Raises:
        ConfigError: an option is out of range, or a variant is unknown.
    """
    unknown = [name for name in variants if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"--variant {unknown[0]!r}: choose from {', '.join(VARIANTS)}")
    sizes = tuple(tokens) or ((4096, 16384) if device == "cuda" else (2048,))
    if min(sizes) < 32:
        raise ConfigError(f"--tokens {min(sizes)}: must be at least 32")
    if rounds < 0:
        raise ConfigError(f"--rounds {rounds}: must be at least 1")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fail before measuring for minutes
    if json_file is not None:
        _prepare_file(json_file)
    options = Options(device, sizes, tuple(variants or VARIANTS), compiled, rounds or (300 if device == "cuda" else 12))
    facts = run(options, growth=growth, out=out, progress=progress)
    if out is not None:
        progress(f"written to {out}")
    if json_file is not None:
        write_json(json_file, facts)
        progress(f"written to {json_file}")
    return facts


def _prepare_file(path: Path) -> None:
    """Make the folder of a file and check that the file can be written, before measuring for minutes.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_creatable(path)
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror}); choose another file") from None
    if path.is_symlink() or (path.exists() and not path.is_file()):  # the file will be replaced
        raise ConfigError(f"--json {path}: expected a file, found a link, folder or device; choose another")
