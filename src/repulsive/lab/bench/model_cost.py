"""Cost of a rule in a training step of a transformers model: plain and repelled turns of one model alternate.

`turns.py` explains how turns are timed and compared, `training_variants.py` what changes from turn to turn, and
`hook_cost.py` the time inside hooks. "plain again" is compared with the plain turns around it as the rules are; its
ratio differs from 1 by noise alone. A rule with `max_norm` is compared with plain turns that clip, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.clock import one_core
from repulsive.lab.bench.hook_cost import HookCost, measure_hooks
from repulsive.lab.bench.machine import allocated_bytes, describe, free_bytes, process_peak_bytes
from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.rules import available_cases, build_cases
from repulsive.lab.bench.training_variants import SharedModel, TrainingVariant
from repulsive.lab.bench.turns import PLAIN, Cost, compare_turns, run_rounds
from repulsive.lab.bench.warm_up import AGAIN, WarmVariants, warm_up

TRAINED = 16  # bytes per parameter: the weight, its gradient and two moments of AdamW, float32
GIGA = 1e9


@dataclass(frozen=True)
class CostOptions:
    """Options of the measurement: model, rules, size of a step, and number of rounds.

    Args:
        model: a name in `PRESETS`.
        rules: names of rules and other cases; empty for all that work with the model.
        device: "cpu" or "cuda".
        rounds: counted turns of each rule, at least six; None for as many as fit in `seconds`.
        steps: ordinary steps of a turn; rounded up to a multiple of the rule's `act_every`.
        warm_up: turns of each rule before the first round.
        hook_turns: turns of each rule in which the time inside hooks is measured.
        seconds: time for the rounds: stop after the round in which it has passed, after six rounds at the earliest.
        batch: sequences or images per step; None for the preset's.
        length: tokens of a sequence; None for the preset's.
        layers: depth of the model; None for the preset's.
        compiled: train through `torch.compile`.
        cuda_graphs: let the compiled model run as CUDA graphs, so that a slow host does not limit its steps.
        overrides: further settings of the model's configuration, such as a small width for tests.
    """

    model: str
    rules: Sequence[str] = ()
    device: str = "cpu"
    rounds: int | None = 6
    steps: int = 2
    warm_up: int = 1
    hook_turns: int = 3
    seconds: float | None = None
    batch: int | None = None
    length: int | None = None
    layers: int | None = None
    compiled: bool = False
    cuda_graphs: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


def measure_model(options: CostOptions, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure what rules cost per training step of a model.

    Returns:
        Plain values for JSON: machine, versions, settings, raw seconds of every turn, and a `Cost` for plain training
        and each rule.

    Raises:
        SelectionError: the model is unknown, or `length` is given for a model of images.
        RuleError: a rule is unknown, or cannot be built.
        RepulsiveError: there is not enough memory to train the model.
    """
    preset = find_preset(options.model)
    cases, left_out = (build_cases(options.rules), {}) if options.rules else available_cases()
    batch, length = preset.size(options.device, options.batch, options.length)
    build = partial(preset.build, layers=options.layers, length=length, overrides=options.overrides)
    outline = build("meta")
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    progress(f"{options.model}: {parameters / 1e6:.0f}M parameters, {batch * length:,} {preset.unit} per step")
    _check_memory(parameters, options.device)
    inputs = preset.inputs(outline.config, batch, length, options.device)
    try:
        before = allocated_bytes(options.device)
        shared = SharedModel(build(options.device), inputs, compiled=options.compiled, cuda_graphs=options.cuda_graphs)
        failures = None if options.rules else left_out
        warm = warm_up(shared, cases, options.steps, options.warm_up, before, progress, failures)
        for name, reason in left_out.items():
            progress(f"{name}: left out, {reason}")
        variants, baselines = warm.variants, warm.baselines
        limit = math.inf if options.seconds is None else options.seconds
        functions = {name: variant.run_turn for name, variant in variants.items()}
        with one_core() if shared.on_gpu else nullcontext():
            hooks = _measure_hooks(variants, options.hook_turns, progress)
            turns = run_rounds(functions, baselines, options.rounds, seconds=limit, progress=progress)
    except torch.OutOfMemoryError:
        advice = "measure a smaller step with --batch, or fewer layers with --layers"
        raise RepulsiveError(f"out of GPU memory; {advice}") from None
    results = _results(compare_turns(turns, baselines), warm, hooks)
    for name, result in results.items():
        result["rule"] = repr(cases[name].rule) if name in cases else None
        result["per_second"] = batch * length / result["seconds"]
    return {
        **describe(options.device),
        "settings": asdict(options) | {"batch": batch, "length": length},
        "rounds": len(turns[AGAIN]),
        "precision": "bf16 autocast" if options.device == "cuda" else "float32",
        "parameters": parameters,
        "unit": preset.unit,
        "process_peak_bytes": process_peak_bytes(),
        "last_loss": _finite(variants[PLAIN].step()),
        "left_out": left_out,
        "results": results,
        "turns": {name: [asdict(turn) for turn in own] for name, own in turns.items()},
    }


def _results(costs: Mapping[str, Cost], warm: WarmVariants, hooks: Mapping[str, HookCost]) -> dict[str, dict[str, Any]]:
    """Collect the measurements of each variant."""
    baselines = warm.baselines
    return {
        name: asdict(cost)
        | {
            "baseline": baselines.get(name),
            "own_graph": warm.variants[name].has_own_graph,
            "hooks": asdict(hooks[name]) if name in hooks else None,
            "bound": _bound(name, hooks, baselines, costs[PLAIN].seconds),
            "peak_bytes": warm.peaks[name],
        }
        for name, cost in costs.items()
    }


def _measure_hooks(
    variants: Mapping[str, TrainingVariant], turns: int, progress: Callable[[str], None]
) -> dict[str, HookCost]:
    """Measure the time inside hooks of all rules, and of plain clipping."""
    progress(f"time inside hooks: {turns} turns of each rule")
    timed = {name: one for name, one in variants.items() if one.handle is not None or one.max_norm is not None}
    return {name: measure_hooks(one, turns) for name, one in timed.items()}


def _bound(
    name: str, hooks: Mapping[str, HookCost], baselines: Mapping[str, str], plain_seconds: float
) -> float | None:
    """Compute the upper bound of a ratio: host and device time of the hooks, over a plain step.

    A rule that clips has none. Its hooks contain the clipping, which takes ten times as long as the rule.
    """
    if name not in hooks or baselines.get(name) != PLAIN:
        return None
    return 1 + hooks[name].average / plain_seconds


def _finite(loss: Tensor) -> float | None:
    """Convert a loss for JSON: None if training diverged, which does not affect the cost of a step."""
    return float(loss) if bool(loss.isfinite()) else None


def _check_memory(parameters: int, device: str) -> None:
    """Raise if the model does not fit in memory; on a CPU, running out of memory would kill the process."""
    needed, free = parameters * TRAINED, free_bytes(device)
    if free is not None and needed > free:
        raise RepulsiveError(
            f"training the model needs {needed / GIGA:.1f} GB, but only {free / GIGA:.1f} GB are free; "
            "measure fewer layers with --layers"
        )
