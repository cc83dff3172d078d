"""Build the variants of a measurement, warm them up, and measure the memory of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from repulsive.errors import RepulsiveError
from repulsive.lab.bench.machine import allocated_bytes
from repulsive.lab.bench.rules import MAX_NORM, Case
from repulsive.lab.bench.training_variants import SharedModel, TrainingVariant
from repulsive.lab.bench.turns import PLAIN

AGAIN = "plain again"
CLIPPED = "plain, clipped"


@dataclass
class WarmVariants:
    """Training variants that are warmed up, by name.

    Args:
        variants: the variants.
        baselines: name of a variant -> name of the plain one that it is compared with.
        peaks: peak GPU memory in bytes of a training; None on a CPU. The memory of other rules is excluded.
    """

    variants: dict[str, TrainingVariant] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)


def warm_up(
    shared: SharedModel,
    cases: Mapping[str, Case],
    steps: int,
    turns: int,
    before: int,
    progress: Callable[[str], None],
    left_out: dict[str, str] | None = None,
) -> WarmVariants:
    """Build all variants, and run turns that are not counted, which compile, launch and lay out the update.

    Args:
        shared: the model and its optimizer.
        cases: the rules.
        steps: ordinary steps of a turn.
        turns: number of turns of each variant.
        before: bytes of GPU memory that were in use before the model was built.
        progress: called with a line of text for every variant.
        left_out: rules that do not work with the model are added to it, with the reason; None raises their errors.

    Raises:
        RepulsiveError: a rule does not work with the model, and `left_out` is None.
    """
    plain: dict[str, float | None] = {PLAIN: None, AGAIN: None}
    if any(case.max_norm is not None for case in cases.values()):
        plain[CLIPPED] = MAX_NORM
    warm = WarmVariants()
    trained = 0  # bytes in use between plain steps
    for name in (*plain, *cases):
        case, started, in_use = cases.get(name), time.perf_counter(), allocated_bytes(shared.device.type)
        try:
            variant = TrainingVariant(shared, case, steps=steps, max_norm=plain.get(name))
            for _ in range(turns - 1):
                variant.run_turn()
            peak = _peak_of_turn(variant)
        except RepulsiveError as error:
            if left_out is None:
                raise
            left_out[name] = str(error)
            shared.optimizer.zero_grad()  # an error inside a step leaves gradients
            continue
        if name == PLAIN:
            trained = in_use = allocated_bytes(shared.device.type)
        others = in_use - trained  # memory of earlier rules
        warm.variants[name] = variant
        warm.peaks[name] = None if peak is None else peak - before - others
        if name not in (PLAIN, CLIPPED):
            warm.baselines[name] = PLAIN if case is None or case.max_norm is None else CLIPPED
        progress(f"{name}: warmed up in {time.perf_counter() - started:.1f} s")
    return warm


def _peak_of_turn(variant: TrainingVariant) -> int | None:
    """Run a turn, and return the peak of GPU memory in use in bytes; None on a CPU."""
    if not variant.shared.on_gpu:
        variant.run_turn()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    variant.run_turn()
    return torch.cuda.max_memory_allocated()
