"""Measure time and memory of the repulsive update of all layers, without a training step around it."""

from __future__ import annotations

from typing import Any

import torch

from repulsive import find_heads
from repulsive.lab.bench import steps
from repulsive.lab.bench.clock import copy_rate, host_time, median_time, replayed
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs


def measure_update(device: str) -> dict[str, Any]:
    """Measure one update of all attention projections of the Transformer-small."""
    place = torch.device(device)
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.small(steps.VOCABULARY)).to(place)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    groups = find_heads(model)
    first = [group for group in groups if group.layer == 0]
    numbers = sum(group.num_heads * group.dim for group in groups)
    rate = copy_rate(place)
    update, of_first = Update(groups, 0), Update(first, 0)
    whole = lambda: update.run(StepInputs(steps.RULE, 1))  # noqa: E731
    facts: dict[str, Any] = {
        "groups": len(groups),
        "numbers": numbers,
        "copy_bytes_per_second": rate,
        "floor_seconds": 4 * 4 * numbers / rate,
        "update_seconds": median_time(whole, place),
        "update_host_seconds": host_time(whole, place, 20),
        "first_layer_seconds": median_time(lambda: of_first.run(StepInputs(steps.RULE, 1)), place),
        "measured_seconds": median_time(lambda: update.run(StepInputs(steps.RULE, 1, measure=True)), place, 5, 1),
        "one_at_a_time_seconds": median_time(lambda: steps.one_at_a_time(groups), place, 5, 1),
    }
    if device == "cuda":
        facts["update_device_seconds"] = replayed([whole])
        fresh = Update(groups, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in range(3):
            fresh.run(StepInputs(steps.RULE, step, measure=step == 0))
        facts["extra_bytes"] = torch.cuda.max_memory_allocated() - before
        facts["particle_bytes"] = 4 * numbers
    return facts
