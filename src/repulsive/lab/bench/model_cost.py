"""Cost of a rule in a training step of a transformers model: plain and repelled twins take turns in one process.

`turns.py` explains how turns are timed and compared. A second plain twin is compared with the first in the same way;
its ratio differs from 1 by noise alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.machine import describe, free_bytes, process_peak_bytes
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.rules import available_rules, build_rules
from repulsive.lab.bench.turns import PLAIN, compare_turns, take_turns
from repulsive.lab.bench.twins import Twin, warmed_up
from repulsive.particles.rule import Rule

AGAIN = "plain again"
WAITING = 12  # bytes per parameter of a twin between turns: the weight and two moments of AdamW, float32
GRADIENT = 4  # bytes per parameter of the active twin
GIGA = 1e9


@dataclass(frozen=True)
class CostOptions:
    """Options of the measurement: model, rules, size of a step, and number of rounds.

    Args:
        model: a name in `PRESETS`.
        rules: names in `RULES`; empty for all that work with the model.
        device: "cpu" or "cuda".
        rounds: counted turns of each twin, at least two.
        steps: ordinary steps of a turn, besides the measuring one.
        warm_up: turns of each twin before the first round.
        batch: sequences or images per step; None for the preset's.
        length: tokens of a sequence; None for the preset's.
        layers: depth of the model; None for the preset's.
        compiled: train through `torch.compile`.
        overrides: further settings of the model's configuration, such as a small width for tests.
    """

    model: str
    rules: Sequence[str] = ()
    device: str = "cpu"
    rounds: int = 6
    steps: int = 2
    warm_up: int = 1
    batch: int | None = None
    length: int | None = None
    layers: int | None = None
    compiled: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


def measure_model(options: CostOptions, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what rules cost per training step of a model.

    Returns:
        Plain values for JSON: machine, versions, settings, raw seconds of every turn, and a `Cost` for every twin.

    Raises:
        SelectionError: the model is unknown, or `length` is given for a model of images.
        RuleError: a rule is unknown, or cannot be built.
        RepulsiveError: there is not enough memory for all twins.
    """
    preset = find_preset(options.model)
    rules, left_out = (build_rules(options.rules), {}) if options.rules else available_rules()
    batch, length = preset.size(options.device, options.batch, options.length)
    build = partial(preset.build, layers=options.layers, length=length, overrides=options.overrides)
    outline = build("meta")
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    progress(f"{options.model}: {parameters / 1e6:.0f}M parameters, {batch * length:,} {preset.unit} per step")
    _check_memory(parameters, len(rules) + 2, options.device)
    inputs = preset.inputs(outline.config, batch, length, options.device)

    def make(rule: Rule | None) -> Twin:
        return Twin(build(options.device), inputs, rule, steps=options.steps, compiled=options.compiled)

    try:
        twins, peaks = _build_twins(make, rules, left_out, options, progress)
        turns = take_turns(
            {name: twin.turn for name, twin in twins.items()}, options.rounds, _forecast(options.rounds, progress)
        )
    except torch.OutOfMemoryError:
        advice = "measure fewer rules at a time with --rule, or a smaller step with --batch"
        raise RepulsiveError(f"out of GPU memory with {len(rules) + 2} copies of the model; {advice}") from None
    results = {
        name: asdict(cost)
        | {
            "rule": repr(rules[name]) if name in rules else None,
            "per_second": batch * length / cost.seconds,
            "peak_bytes": peaks[name],
            "last_loss": _finite(twins[name].step()),
        }
        for name, cost in compare_turns(turns).items()
    }
    return {
        **describe(options.device),
        "settings": asdict(options) | {"batch": batch, "length": length},
        "precision": "bf16 autocast" if options.device == "cuda" else "float32",
        "parameters": parameters,
        "unit": preset.unit,
        "process_peak_bytes": process_peak_bytes(),
        "left_out": left_out,
        "results": results,
        "turns": {name: [asdict(turn) for turn in own] for name, own in turns.items()},
    }


def _build_twins(
    make: Callable[[Rule | None], Twin],
    rules: Mapping[str, Rule],
    left_out: dict[str, str],
    options: CostOptions,
    progress: Callable[[str], None],
) -> tuple[dict[str, Twin], dict[str, int | None]]:
    """Build and warm up two plain twins and a twin for each rule; rules not requested by name may be left out."""
    wanted: dict[str, Rule | None] = {PLAIN: None, AGAIN: None, **rules}
    twins: dict[str, Twin] = {}
    peaks: dict[str, int | None] = {}
    for name, rule in wanted.items():
        started = time.perf_counter()
        try:
            twins[name], peaks[name] = warmed_up(partial(make, rule), options.warm_up, torch.device(options.device))
        except RepulsiveError as error:
            if options.rules:
                raise
            left_out[name] = str(error)
        else:
            progress(f"{name}: built and warmed up in {time.perf_counter() - started:.1f} s")
    for name, reason in left_out.items():
        progress(f"{name}: left out, {reason}")
    return twins, peaks


def _finite(loss: Tensor) -> float | None:
    """Convert a loss for JSON: None if training diverged, which does not affect the cost of a step."""
    return float(loss) if bool(loss.isfinite()) else None


def _forecast(rounds: int, progress: Callable[[str], None]) -> Callable[[int], None]:
    """Report the expected time of all rounds after the first one."""
    started = time.perf_counter()

    def after_round(done: int) -> None:
        if done == 1:
            seconds = time.perf_counter() - started
            progress(f"one round takes {seconds:.1f} s, {rounds} rounds about {rounds * seconds:.0f} s")

    return after_round


def _check_memory(parameters: int, twins: int, device: str) -> None:
    """Raise if the twins do not fit in memory; on a CPU, running out of memory would kill the process."""
    needed, free = parameters * (WAITING * twins + GRADIENT), free_bytes(device)
    if free is not None and needed > free:
        raise RepulsiveError(
            f"{twins} copies of the model need {needed / GIGA:.1f} GB, but only {free / GIGA:.1f} GB are free; "
            "measure fewer rules at a time with --rule, or fewer layers with --layers"
        )
