"""Run a model that somebody else wrote: inputs of any form, evaluation mode, every flag put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def call(model: nn.Module, inputs: object) -> Any:
    """What the model makes of `inputs`: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**{str(name): value for name, value in inputs.items()})
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def items_in(inputs: object) -> int:
    """How many items a batch has: the first dimension of its first tensor; 1 where it has none."""
    given = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    values = given if isinstance(given, list | tuple) else [given]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.ndim), 1)


def real_queries(batch: Any, where: str) -> Tensor | None:
    """Which tokens of a batch are not padding, bool [B, T]; None: nothing is known.

    Args:
        batch: as the model takes it; masks are known by the names that transformers and torch give them.
        where: "encoder", or "decoder" and "cross", whose queries are the decoder's tokens where it has its own.
    """
    if not isinstance(batch, Mapping):
        return None
    if "decoder_input_ids" in batch and where != "encoder":
        return _mask(batch, "decoder_attention_mask")
    return _mask(batch, "attention_mask", padding="tgt" if where != "encoder" and "tgt" in batch else "src")


def real_keys(batch: Any, where: str) -> Tensor | None:
    """The same for keys and values: cross-attention reads the tokens of the encoder."""
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
