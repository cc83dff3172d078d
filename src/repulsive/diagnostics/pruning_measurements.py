"""Measure size, speed and quality of a model before and after pruning."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.causal_models import is_causal, perplexity
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import OutputChange

RUNS = 5  # timed forward passes, after one that is not timed


@dataclass(frozen=True)
class Measured:
    """Size, speed and quality of one model, measured on the text.

    Args:
        parameters: number of parameters.
        cache_bytes: bytes of cached keys and values per token and sequence; 0 for models without a cache.
        milliseconds: median time of a forward pass over the first batch.
        fastest: shortest of these times.
        slowest: longest of these times.
        perplexity: perplexity per token of a causal language model; None for other models.
        change: change of the output against the whole model: KL divergence in nats, or relative change of states.
    """

    parameters: int
    cache_bytes: int
    milliseconds: float
    fastest: float
    slowest: float
    perplexity: float | None
    change: float


@torch.no_grad()
def measure(model: nn.Module, batches: Sequence[dict[str, Any]], change: OutputChange, heads: Heads) -> Measured:
    """Measure a model on batches of text.

    Args:
        model: the model.
        batches: tokenised text; the first batch is timed.
        change: compares the output with that of the whole model.
        heads: attention layers of the whole model.
    """
    with evaluating(model):
        quality = perplexity(model, batches) if is_causal(model) else None
        moved = float(change(model).mean())
    times = forward_milliseconds(model, batches[0])
    return Measured(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cache_bytes=cache_bytes(model, heads),
        milliseconds=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        perplexity=quality,
        change=moved,
    )


@torch.no_grad()
def forward_milliseconds(model: nn.Module, batch: dict[str, Any]) -> list[float]:
    """Time forward passes over one batch, after one that is not timed."""
    times = []
    with evaluating(model):
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            call(model, batch)
            times.append(1e3 * (time.perf_counter() - start))
    return times[1:]


def cache_bytes(model: Any, heads: Heads) -> int:
    """Bytes of keys and values of one token in all layers of a causal model."""
    if not is_causal(model):
        return 0
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = next(model.parameters()).element_size()
    return 2 * kv_heads * heads.layers[0].head_dim * len(heads.layers) * size
