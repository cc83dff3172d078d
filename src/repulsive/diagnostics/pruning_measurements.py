"""Measure size, speed and quality of a model before and after pruning."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.causal_models import is_causal, perplexity
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import OutputChange

RUNS = 5  # timed forward passes, after one that is not timed

# A model, and what makes the context in which it runs, such as an ablation.
Runnable = tuple[nn.Module, Callable[[], AbstractContextManager[None]]]


@dataclass(frozen=True)
class Measured:
    """Size, speed and quality of one model, measured on the text.

    Args:
        parameters: number of parameters.
        cache_bytes: bytes of cached keys and values per token and sequence; 0 for models without a cache.
        perplexity: perplexity per token of a causal language model; None for other models.
        change: change of the output against the whole model: KL divergence in nats, or relative change of states.
        milliseconds: median time of a forward pass over the first batch; nan before `with_times`.
        fastest: shortest of these times.
        slowest: longest of these times.
    """

    parameters: int
    cache_bytes: int
    perplexity: float | None
    change: float
    milliseconds: float = math.nan
    fastest: float = math.nan
    slowest: float = math.nan


@torch.no_grad()
def measure(model: nn.Module, batches: Sequence[dict[str, Any]], change: OutputChange, heads: Heads) -> Measured:
    """Measure size and quality of a model on batches of text.

    Args:
        model: the model.
        batches: tokenised text.
        change: compares the output with that of the whole model.
        heads: attention layers of the whole model.
    """
    with evaluating(model):
        quality = perplexity(model, batches) if is_causal(model) else None
        moved = float(change(model).mean())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Measured(parameters, cache_bytes(model, heads), quality, moved)


@torch.no_grad()
def with_times(
    measured: Mapping[str, Measured], models: Mapping[str, Runnable], batch: dict[str, Any]
) -> dict[str, Measured]:
    """Add the times of forward passes. The models take turns, so that other work on the machine slows all of them.

    Args:
        measured: measurements by name.
        models: the model of each name.
        batch: tokenised text.
    """
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(RUNS + 1):
        for name, (model, context) in models.items():
            with evaluating(model), context():
                start = time.perf_counter()
                call(model, batch)
                times[name].append(1e3 * (time.perf_counter() - start))
    result = {}
    for name, each in measured.items():
        own = times[name][1:]  # the first round warms up
        result[name] = replace(each, milliseconds=statistics.median(own), fastest=min(own), slowest=max(own))
    return result


def cache_bytes(model: Any, heads: Heads) -> int:
    """Bytes of keys and values of one token in all layers of a causal model."""
    if not is_causal(model):
        return 0
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = next(model.parameters()).element_size()
    return 2 * kv_heads * heads.layers[0].head_dim * len(heads.layers) * size
