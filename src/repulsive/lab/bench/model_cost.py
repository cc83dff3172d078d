"""Cost of a rule in a training step of a transformers model: plain and repelled twins take turns in one process.

`turns.py` explains how turns are timed and compared, `hook_cost.py` the time inside hooks. A second plain twin is
compared with the first as the rules are; its ratio differs from 1 by noise alone. A rule with `max_norm` is compared
with a plain twin that clips, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.hook_cost import HookCost, measure_hooks
from repulsive.lab.bench.machine import describe, free_bytes, process_peak_bytes
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.rules import MAX_NORM, Case, available_cases, build_cases
from repulsive.lab.bench.turns import PLAIN, compare_turns, take_turns
from repulsive.lab.bench.twins import Twin, warmed_up

AGAIN = "plain again"
CLIPPED = "plain, clipped"
WAITING = 12  # bytes per parameter of a twin between turns: the weight and two moments of AdamW, float32
GRADIENT = 4  # bytes per parameter of the active twin
GIGA = 1e9


@dataclass(frozen=True)
class CostOptions:
    """Options of the measurement: model, rules, size of a step, and number of rounds.

    Args:
        model: a name in `PRESETS`.
        rules: names of rules and other cases; empty for all that work with the model.
        device: "cpu" or "cuda".
        rounds: counted turns of each twin, at least six.
        steps: ordinary steps of a turn.
        warm_up: turns of each twin before the first round.
        hook_turns: turns of each twin in which the time inside hooks is measured.
        seconds: stop after the round in which this time has passed, after six rounds at the earliest.
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
    hook_turns: int = 3
    seconds: float | None = None
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
    cases, left_out = (build_cases(options.rules), {}) if options.rules else available_cases()
    batch, length = preset.size(options.device, options.batch, options.length)
    build = partial(preset.build, layers=options.layers, length=length, overrides=options.overrides)
    outline = build("meta")
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    progress(f"{options.model}: {parameters / 1e6:.0f}M parameters, {batch * length:,} {preset.unit} per step")
    copies = len(cases) + 2 + any(case.max_norm is not None for case in cases.values())
    _check_memory(parameters, copies, options.device)
    inputs = preset.inputs(outline.config, batch, length, options.device)

    def make(case: Case | None, max_norm: float | None) -> Twin:
        model = build(options.device)
        return Twin(model, inputs, case, steps=options.steps, compiled=options.compiled, max_norm=max_norm)

    try:
        twins, peaks = _build_twins(make, cases, left_out, options, progress)
        baselines = {name: _baseline(cases.get(name)) for name in twins if name not in (PLAIN, CLIPPED)}
        started = time.perf_counter()
        hooks = _measure_hooks(twins, options.hook_turns, progress)
        limit = math.inf if options.seconds is None else options.seconds - (time.perf_counter() - started)
        functions = {name: twin.turn for name, twin in twins.items()}
        turns = take_turns(functions, baselines, options.rounds, seconds=limit, progress=progress)
    except torch.OutOfMemoryError:
        advice = "measure fewer rules at a time with --rule, or a smaller step with --batch"
        raise RepulsiveError(f"out of GPU memory with {copies} copies of the model; {advice}") from None
    costs = compare_turns(turns, baselines)
    results = {
        name: asdict(cost)
        | {
            "rule": repr(cases[name].rule) if name in cases else None,
            "baseline": baselines.get(name),
            "hooks": asdict(hooks[name]) if name in hooks else None,
            "bound": _bound(name, hooks, baselines, costs[baselines.get(name, name)].seconds),
            "per_second": batch * length / cost.seconds,
            "peak_bytes": peaks[name],
            "last_loss": _finite(twins[name].step()),
        }
        for name, cost in costs.items()
    }
    return {
        **describe(options.device),
        "settings": asdict(options) | {"batch": batch, "length": length},
        "rounds": len(turns[AGAIN]),
        "precision": "bf16 autocast" if options.device == "cuda" else "float32",
        "parameters": parameters,
        "unit": preset.unit,
        "process_peak_bytes": process_peak_bytes(),
        "left_out": left_out,
        "results": results,
        "turns": {name: [asdict(turn) for turn in own] for name, own in turns.items()},
    }


def _build_twins(
    make: Callable[[Case | None, float | None], Twin],
    cases: Mapping[str, Case],
    left_out: dict[str, str],
    options: CostOptions,
    progress: Callable[[str], None],
) -> tuple[dict[str, Twin], dict[str, int | None]]:
    """Build and warm up the plain twins and a twin for each case; cases not requested by name may be left out."""
    wanted: dict[str, tuple[Case | None, float | None]] = {PLAIN: (None, None), AGAIN: (None, None)}
    if any(case.max_norm is not None for case in cases.values()):
        wanted[CLIPPED] = (None, MAX_NORM)
    wanted |= {name: (case, None) for name, case in cases.items()}
    twins: dict[str, Twin] = {}
    peaks: dict[str, int | None] = {}
    for name, what in wanted.items():
        started = time.perf_counter()
        try:
            twins[name], peaks[name] = warmed_up(partial(make, *what), options.warm_up, torch.device(options.device))
        except RepulsiveError as error:
            if options.rules:
                raise
            left_out[name] = str(error)
        else:
            progress(f"{name}: built and warmed up in {time.perf_counter() - started:.1f} s")
    for name, reason in left_out.items():
        progress(f"{name}: left out, {reason}")
    return twins, peaks


def _baseline(case: Case | None) -> str:
    return PLAIN if case is None or case.max_norm is None else CLIPPED


def _measure_hooks(twins: Mapping[str, Twin], turns: int, progress: Callable[[str], None]) -> dict[str, HookCost]:
    """Measure the time inside hooks of all twins that have hooks or clip."""
    progress(f"time inside hooks: {turns} turns of each model")
    timed = {name: twin for name, twin in twins.items() if twin.handle is not None or twin.max_norm is not None}
    return {name: measure_hooks(twin, turns) for name, twin in timed.items()}


def _bound(
    name: str, hooks: Mapping[str, HookCost], baselines: Mapping[str, str], plain_seconds: float
) -> float | None:
    """Compute the upper bound of a ratio: host and device time of the hooks, without that of plain clipping."""
    if name not in baselines or name not in hooks:
        return None
    clipping = hooks[baselines[name]].average if baselines[name] in hooks else 0.0
    return 1 + (hooks[name].average - clipping) / plain_seconds


def _finite(loss: Tensor) -> float | None:
    """Convert a loss for JSON: None if training diverged, which does not affect the cost of a step."""
    return float(loss) if bool(loss.isfinite()) else None


def _check_memory(parameters: int, twins: int, device: str) -> None:
    """Raise if the twins do not fit in memory; on a CPU, running out of memory would kill the process."""
    needed, free = parameters * (WAITING * twins + GRADIENT), free_bytes(device)
    if free is not None and needed > free:
        raise RepulsiveError(
            f"{twins} copies of the model need {needed / GIGA:.1f} GB, but only {free / GIGA:.1f} GB are free; "
            "measure fewer rules at a time with --rule, or fewer layers with --layers"
        )
