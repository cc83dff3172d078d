"""Run a model that somebody else wrote: inputs of any form, evaluation mode, every flag put back."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def call(model: nn.Module, inputs: object) -> Any:
    """What the model makes of `inputs`: a tensor, a tuple of arguments or a mapping of keyword arguments.

    A model whose `forward` takes one argument, and that is none of the names in the mapping, gets the mapping itself.
    """
    if isinstance(inputs, Mapping):
        if _takes_mapping(model, inputs):
            return model(inputs)
        return model(**{str(name): value for name, value in inputs.items()})
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def items_in(inputs: object) -> int:
    """How many items a batch has: the first dimension of its first tensor; 1 where it has none."""
    return next((len(value) for value in _tensors(inputs) if value.ndim), 1)


def _tensors(inputs: object) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping | list | tuple):
        for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
            yield from _tensors(value)


def _takes_mapping(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    try:
        taken = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    kinds = {one.kind for one in taken.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or all(str(name) in taken for name in inputs):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    return sum(one.default is one.empty and one.kind not in optional for one in taken.values()) == 1


def _named(batch: Any) -> Any:
    """The mapping of a batch that is one, or that is the one argument."""
    alone = isinstance(batch, list | tuple) and len(batch) == 1
    return batch[0] if alone and isinstance(batch[0], Mapping) else batch


def real_queries(batch: Any, where: str) -> Tensor | None:
    """Which tokens of a batch are not padding, bool [B, T]; None: nothing is known.

    Args:
        batch: as the model takes it; masks are known by the names that transformers and torch give them.
        where: "encoder", or "decoder" and "cross", whose queries are the decoder's tokens where it has its own.
    """
    batch = _named(batch)
    if not isinstance(batch, Mapping):
        return None
    if "decoder_input_ids" in batch and where != "encoder":
        return _mask(batch, "decoder_attention_mask")
    return _mask(batch, "attention_mask", padding="tgt" if where != "encoder" and "tgt" in batch else "src")


def real_keys(batch: Any, where: str) -> Tensor | None:
    """The same for keys and values: cross-attention reads the tokens of the encoder."""
    batch = _named(batch)
    if where != "cross" or not isinstance(batch, Mapping):
        return real_queries(batch, where)
    if "encoder_hidden_states" in batch:
        return _mask(batch, "encoder_attention_mask")
    return real_queries(batch, "encoder")


def _mask(batch: Mapping[str, Any], name: str, padding: str = "") -> Tensor | None:
    """1 and True are tokens in `name`; they are padding in torch's `key_padding_mask`."""
    mask = batch.get(name)
    if mask is None and padding:
        names = (f"{padding}_key_padding_mask", "key_padding_mask")
        mask = next((batch[each] for each in names if isinstance(batch.get(each), Tensor)), None)
        mask = None if mask is None else mask == 0  # True, or minus infinity, is padding
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and the slow, visible path of torch's own attention; flags are put back one by one."""
    training = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # it fuses whole layers, and no hook inside one would fire
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, flag in training:
            module.training = flag
