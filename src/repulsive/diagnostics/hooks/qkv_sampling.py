"""Sample queries, keys and values of attention layers while a model runs.

Queries, keys and values are recorded after the projections, biases, norms and clipping, and before rotary position
embeddings.
`sample_qkv` runs the model in evaluation mode; `recorded_qkv` records a pass that the caller runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.hooks.calling import TokenMask, call, evaluating, token_masks
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.diagnostics.hooks.qkv_layers import QKVLayer
from repulsive.diagnostics.hooks.qkv_recorder import QKVRecorder, TokenSampler
from repulsive.diagnostics.hooks.qkv_samples import QKVSamples, check_recorded


@torch.no_grad()
def sample_qkv(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Sequence[QKVLayer],
    *,
    tokens: int = 2048,
    seed: int = 0,
    queries: TokenMask | None = None,
    keys: TokenMask | None = None,
) -> list[QKVSamples]:
    """Run a model on all batches and keep the queries, keys and values of some tokens.

    If a layer runs several times in a pass, tokens of all runs are pooled. Every layer keeps the same tokens.

    Args:
        model: any module with heads; its weights, flags and results do not change.
        batches: inputs of the model, each a tensor, a tuple of arguments or a mapping of keyword arguments.
        layers: the result of `find_qkv_layers`.
        tokens: maximum number of tokens for each of q, k and v, with an equal share from each batch.
        seed: random seed of the sample.
        queries: called with a batch and "encoder", "decoder" or "cross"; returns which query tokens count, bool [B, T],
            or None for all. By default padding is left out.
        keys: like `queries`, for the tokens of keys and values.
    """
    results = [QKVSamples(layer) for layer in layers]
    own_queries, own_keys = token_masks(model)
    masks = queries or own_queries, keys or own_keys
    given = ("q" if queries else "") + ("kv" if keys else "")
    for number, batch in enumerate(batches):
        share = {"tokens": tokens, "batches_left": len(batches) - number, "seed": seed + number}
        with evaluating(model), recorded_qkv(results, batch, masks, given=given, **share):
            call(model, batch)
    check_recorded(results)
    return results


@contextmanager
def recorded_qkv(
    results: Sequence[QKVSamples],
    batch: Any,
    masks: tuple[TokenMask, TokenMask],
    *,
    tokens: int,
    batches_left: int = 1,
    seed: int = 0,
    items: int | None = None,
    given: str = "",
) -> Iterator[None]:
    """Add tokens of the forward pass that runs inside this context to the results, without changing the pass.

    Args:
        results: one entry per layer; entries with a problem are skipped.
        batch: inputs of the pass, as far as `masks` read them; they do so when a layer runs.
        masks: `queries` and `keys` of `sample_qkv`; see `token_masks`.
        tokens: maximum number of tokens for each of q, k and v, over all batches.
        batches_left: number of passes that share the tokens that are still missing.
        seed: random seed of the sample.
        items: maximum number of sequences of a batch to sample from, from the first on; None: all.
        given: parts for which `masks` alone decide; for others a batch without a mask has those that its attention
            layers are called with.
    """
    sampler = TokenSampler(tokens, batches_left, seed)
    recorders = []
    first_sequence = max((int(block.max()) + 1 for each in results for block in each.all_sequences()), default=0)
    of_layers = LayerMasks()
    with ExitStack() as stack:
        stack.enter_context(of_layers.recorded(each.layer for each in results if not each.problem))
        for each in results:
            if not each.problem:
                recorder = QKVRecorder(each, sampler, batch, masks, of_layers, given, first_sequence, items)
                recorder.hook(stack)
                recorders.append(recorder)
        yield
    for recorder in recorders:
        recorder.end()
