"""Find the padding of a batch from the masks passed to a model and its attention layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Names of mask arguments, by the tokens they refer to.
_DECODER = ("decoder_attention_mask", "tgt_key_padding_mask", "decoder_padding_mask")
_ENCODER = ("encoder_attention_mask", "memory_key_padding_mask", "src_key_padding_mask", "encoder_padding_mask")
_ANY = ("attention_mask", "key_padding_mask", "padding_mask", "pixel_attention_mask", "mask", "src_key_padding_mask")
NAMES = frozenset((*_DECODER, *_ENCODER, *_ANY))
_TORCH_NAMES = NAMES - {"mask"}  # in torch's encoder it is a mask [T, T] of queries and keys, not of padding
_INVERTED = ("MptAttention",)  # classes whose boolean masks are True where a query may not attend
_LEAST_CAUSAL = 4  # sequences; smaller batches may well have padding that looks like a causal mask
_HIDDEN = -1000.0  # lower numbers, such as -10,000, hide a key if they are added to logits; position biases are higher
_SIGNATURES: dict[type, tuple[str, ...]] = {}  # cache of `_parameters`


def masks_in(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Find the masks in the arguments of a call, by argument name.

    A mask is a tensor, or any object with a tensor as its attribute `attention_mask`. The padding of a decoder may also
    be known from its labels; see `decoder_mask`.
    """
    named = name_arguments(_parameters(module), args, kwargs)
    names = _TORCH_NAMES if isinstance(module, nn.TransformerEncoder) else NAMES
    given = {name: value for name, value in named.items() if name in names}
    masks = {name: v if isinstance(v, Tensor) else getattr(v, "attention_mask", None) for name, v in given.items()}
    found = {name: mask for name, mask in masks.items() if isinstance(mask, Tensor)}
    if (from_labels := decoder_mask(module, named)) is not None:
        found["decoder_attention_mask"] = from_labels
    inverted = {name for name, mask in found.items() if _is_inverted(module, name, mask)}
    return {name: mask == 0 if name in inverted else mask for name, mask in found.items()}


def _is_inverted(module: nn.Module, name: str, mask: Tensor) -> bool:
    """Check for a mask of queries and keys that is True where a query may not attend.

    A mask [B, T] of padding stays as it is: `_as_valid` inverts it, when its shape is known to be that of the tokens.
    """
    is_of_padding = "padding" in name and mask.ndim > 2
    return not mask.is_floating_point() and (is_of_padding or type(module).__name__ in _INVERTED)


def decoder_mask(module: nn.Module, named: Mapping[str, Any]) -> Tensor | None:
    """Find the decoder's tokens that are not padding from `labels`, bool [B, T]; None if labels do not show them.

    Called with labels alone, an encoder-decoder model of transformers reads the labels shifted by one as the decoder's
    tokens, with padding in place of -100. In other models -100 may also mark tokens without a loss, such as a prompt.

    Args:
        module: the module that is called.
        named: its arguments by name.
    """
    labels = named.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or not _shifts_labels(module):
        return None
    for name in ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"):
        if named.get(name) is not None:
            return None
    is_token = labels != -100
    return torch.cat([torch.ones_like(is_token[:, :1]), is_token[:, :-1]], 1)  # the first token is the start token


def _shifts_labels(module: nn.Module) -> bool:
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False) is not True:
        return False
    is_conditional = type(module).__name__.endswith("ForConditionalGeneration")
    return is_conditional or hasattr(module, "prepare_decoder_input_ids_from_labels")


def name_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map argument names to values; positional arguments without a name are left out.

    torch 2.6 can compile neither `zip` for unequal lengths nor `|` for dicts.
    """
    return {**{names[index]: args[index] for index in range(min(len(names), len(args)))}, **kwargs}


def valid_tokens(
    masks: Mapping[str, Tensor], shape: tuple[int, int], where: str, part: str, of_source: bool = False
) -> Tensor | None:
    """Find the tokens of a projection's input that are not padding, bool [B, T]; None if no mask covers these tokens.

    Args:
        masks: masks by argument name.
        shape: (B, T) of the projection's input.
        where: "encoder", "decoder" or "cross".
        part: "q" or "k"; keys of cross-attention come from the encoder.
        of_source: whether masks without a decoder in their name refer to the encoder's tokens, as in a call of an
            encoder-decoder model.
    """
    is_decoder = where == "decoder" or (where == "cross" and part == "q")
    order: tuple[str, ...] = (*_DECODER, *_ANY) if is_decoder else (*_ENCODER, *_ANY)
    if is_decoder and any(name in masks for name in _DECODER):
        order = _DECODER
    elif is_decoder and (of_source or where == "cross"):
        return None  # the other masks refer to the encoder's tokens
    for name in order:
        if name in masks and (valid := _as_valid(masks[name], name, shape)) is not None:
            return valid
    return None


def _as_valid(mask: Tensor, name: str, shape: tuple[int, int]) -> Tensor | None:
    if mask.ndim == 2 and tuple(mask.shape) == shape:
        if "padding" in name:
            return ~mask if mask.dtype == torch.bool else mask == 0
        return _without_causal(are_tokens(mask))
    if mask.ndim in (3, 4) and mask.shape[0] == shape[0] and mask.shape[-1] == shape[1]:
        return _visible(mask)
    return None


def are_tokens(mask: Tensor) -> Tensor:
    """Read a mask [B, T] of 1 or True for a token and 0 or False for padding, or one that is added to logits.

    The latter has 0 for a token and a large negative number for padding; Longformer's layers also have large positive
    numbers, for tokens with global attention. Computed without branches, which would wait for a GPU.
    """
    if not mask.is_floating_point():
        return mask.bool()
    return torch.where(_is_added(mask), mask >= 0, mask > 0)


def _is_added(mask: Tensor) -> Tensor:
    """Check whether the numbers of a mask are added to logits; otherwise they are 1 and 0. A tensor with one bool."""
    largest = mask.amax()
    return (mask.amin() < 0) | (largest <= 0) | (largest > 2)  # 2 is global attention in Longformer's own mask


def _without_causal(valid: Tensor) -> Tensor:
    """Replace a causal mask of T queries and T keys, which a batch of T sequences could have as padding, by True."""
    if valid.shape[0] != valid.shape[1] or len(valid) < _LEAST_CAUSAL:
        return valid
    causal = torch.ones_like(valid).tril()
    return valid | (valid == causal).all() | (valid != causal).all()


def compact(mask: Tensor) -> Tensor:
    """Copy a mask; one of queries and keys is reduced to the keys that some query may attend to, bool [B, 1, S]."""
    return mask.clone(memory_format=torch.contiguous_format) if mask.ndim == 2 else _visible(mask).unsqueeze(1)


def know_arguments(modules: Iterable[nn.Module]) -> None:
    """Look up the arguments of modules, because compiled code cannot write to a cache inside a checkpoint."""
    for module in modules:
        _parameters(module)


def _visible(mask: Tensor) -> Tensor:
    """Find the keys that some query may attend to, [B, ..., S] -> bool [B, S]."""
    flat = mask.flatten(1, -2)  # [B, N, S]
    if not mask.is_floating_point():
        return flat.bool().any(1)
    return flat.amax(1) > torch.where(_is_added(mask), _HIDDEN, 0.0)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """List the argument names of a module's forward."""
    kind = type(module)
    if kind not in _SIGNATURES:
        _SIGNATURES[kind] = tuple(inspect.signature(kind.forward).parameters)[1:]
    return _SIGNATURES[kind]
