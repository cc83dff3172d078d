"""Call any model in evaluation mode with any form of inputs, and find the padding in these inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.heads.call_arguments import call_arguments, named_inputs
from repulsive.heads.module_paths import is_compiled, is_encoder_decoder, unwrap
from repulsive.heads.padding import are_tokens, decoder_mask
from repulsive.heads.trace.forward_pass import evaluation_mode, without_compilation

# Called with a batch and "encoder", "decoder" or "cross"; returns which tokens count, bool [B, T], or None for all.
TokenMask = Callable[[Any, str], Tensor | None]


def call(model: nn.Module, inputs: object) -> Any:
    """Call the model with a tensor, a tuple of arguments or a mapping of keyword arguments.

    A mapping may also be the only argument, and dictionaries are copied: see `call_arguments`.
    """
    args, kwargs = call_arguments(model, inputs)
    return model(*args, **kwargs)


def items_in(inputs: object) -> int:
    """Count the items in a batch: the first dimension of its first tensor; 1 if it has no such tensor."""
    return next((len(value) for value in _tensors(inputs) if value.ndim), 1)


def _tensors(inputs: object) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping | list | tuple):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(value)


def _unwrapped(batch: Any) -> Any:
    """Return the mapping inside a tuple or list of one mapping; return any other batch unchanged."""
    single = isinstance(batch, list | tuple) and len(batch) == 1
    return batch[0] if single and isinstance(batch[0], Mapping) else batch


def token_masks(model: nn.Module, *, positional: bool = True) -> tuple[TokenMask, TokenMask]:
    """Return `real_queries` and `real_keys` for the batches of a model.

    Args:
        model: the model.
        positional: whether a list or tuple holds arguments of the model.
    """
    inner, has_source = unwrap(model), is_encoder_decoder(model)

    def named(batch: Any) -> Any:
        batch = _unwrapped(batch)
        if positional and isinstance(batch, list | tuple):
            batch = named_inputs(inner, batch, {})
        if isinstance(batch, Mapping) and (mask := decoder_mask(inner, batch)) is not None:
            return {**batch, "decoder_attention_mask": mask}
        return batch

    def queries(batch: Any, where: str) -> Tensor | None:
        return real_queries(named(batch), where, has_source=has_source)

    def keys(batch: Any, where: str) -> Tensor | None:
        return real_keys(named(batch), where, has_source=has_source)

    return queries, keys


def real_queries(batch: Any, where: str, *, has_source: bool = False) -> Tensor | None:
    """Return a mask of the query tokens that are not padding, bool [B, T]; None if the batch has no mask.

    Args:
        batch: as the model takes it; masks are recognised by the names that transformers and torch use.
        where: "encoder"; or "decoder" or "cross", where queries are the decoder's tokens if the batch has them.
        has_source: whether `attention_mask` refers to the encoder's tokens; see `is_encoder_decoder`.
    """
    batch = _unwrapped(batch)
    if not isinstance(batch, Mapping):
        return None
    has_source = "decoder_input_ids" in batch or (has_source and "encoder_hidden_states" not in batch)
    if has_source and where != "encoder":
        return _mask(batch, "decoder_attention_mask")
    return _mask(batch, "attention_mask", padding="tgt" if where != "encoder" and "tgt" in batch else "src")


def real_keys(batch: Any, where: str, *, has_source: bool = False) -> Tensor | None:
    """Return a mask of the key and value tokens that are not padding; in cross-attention, of the encoder's tokens."""
    batch = _unwrapped(batch)
    if where != "cross" or not isinstance(batch, Mapping):
        return real_queries(batch, where, has_source=has_source)
    if "encoder_hidden_states" in batch:
        return _mask(batch, "encoder_attention_mask")
    return real_queries(batch, "encoder")


def _mask(batch: Mapping[str, Any], name: str, padding: str = "") -> Tensor | None:
    """Read the mask `name`, where 1 is a token, or torch's `key_padding_mask`, where True is padding."""
    mask = batch.get(name)
    if mask is None and padding:
        names = (f"{padding}_key_padding_mask", "key_padding_mask")
        mask = next((batch[each] for each in names if isinstance(batch.get(each), Tensor)), None)
        mask = None if mask is None else mask == 0  # padding is True, or minus infinity
    return are_tokens(mask) if isinstance(mask, Tensor) and mask.ndim == 2 else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and run hooks as in `with_hooks`; restore every module's flag at the end."""
    with evaluation_mode(model), with_hooks(model):
        yield


@contextmanager
def with_hooks(model: nn.Module) -> Iterator[None]:
    """Disable what skips hooks inside this context: torch's fused attention layers, and compiled code."""
    has_compiled = any(is_compiled(module) for module in model.modules())
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it fuses whole layers, and makes nested tensors of padded batches
    try:
        with without_compilation() if has_compiled else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
