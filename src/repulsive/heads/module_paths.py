"""Dotted names of attention modules: remove wrappers, find the stack and layer, and classify the kind of attention."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from repulsive.errors import NoHeadsFound, SelectionError
from repulsive.heads.layout import HeadGroup

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_NOT_TEXT = ("vision", "visual", "audio", "speech", "acoustic")  # encoders of inputs other than text
_TEXT = ("language", "text")
_CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "src_attn", "context_attn")


def check_model(model: object) -> None:
    """Raise an error unless `model` is an instance of nn.Module whose modules are Python code.

    Raises:
        SelectionError: it is not an instance of nn.Module.
        NoHeadsFound: it is a result of `torch.jit` or `torch.export`.
    """
    inner = unwrap(model) if isinstance(model, nn.Module) else model
    if isinstance(inner, torch.jit.ScriptModule):
        kind, origin = f"{inner.original_name} is a TorchScript model", "scripted or traced (both share their weights)"
    elif any(each.__module__.startswith("torch.export.") for each in type(inner).__mro__):
        kind, origin = f"{type(inner).__name__} is a result of torch.export", "exported"
    elif isinstance(model, nn.Module):
        return
    else:
        got = f"the class {model.__name__}" if isinstance(model, type) else f"an object of type {type(model).__name__}"
        hint = "; put the modules into an nn.ModuleList" if isinstance(model, list | tuple) else ""
        raise SelectionError(f"expected a model, an instance of nn.Module, got {got}{hint}")
    raise NoHeadsFound(
        f"{kind}, in which attention cannot be found; pass the Python model that was {origin}, or load the weights "
        "into such a model"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Remove data-parallel and compile wrappers from a model."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    return model


def is_compile_wrapper(module: nn.Module) -> bool:
    """Check for the result of `torch.compile(module)`."""
    return type(module).__name__ == "OptimizedModule"


def is_compiled(module: nn.Module) -> bool:
    """Check for `torch.compile(module)`, `module.compile()` and `module.forward = torch.compile(module.forward)`."""
    if is_compile_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def is_encoder_decoder(model: nn.Module) -> bool:
    """Check whether a model is, or contains, an encoder-decoder model of transformers, such as T5.

    Called with `labels` alone, such a model makes the decoder's tokens itself, and `attention_mask` refers to those of
    the encoder.
    """
    return any(getattr(getattr(each, "config", None), "is_encoder_decoder", False) is True for each in model.modules())


def clean(name: str) -> str:
    """Remove the components that wrappers add to a dotted name."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def where_of(model: nn.Module, name: str, default: str | None = None) -> str:
    """Classify the attention module `name` as "cross", "encoder" or "decoder".

    The module's path and class decide first, then a word such as "vision" or "audio" in its path, then `default`, then
    its `is_causal` flag. The name of a class does not make it cross-attention if its `forward` has only one input.
    """
    module = model.get_submodule(name)
    parent_name, _, attribute = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    own = clean(name)
    words = ".".join(own.split(".")[-3:]).lower()
    if not _has_one_input(module):
        words += f" {type(module).__name__}".lower()
    if (
        any(mark in words for mark in _CROSS)
        or getattr(module, "is_cross_attention", False) is True
        or (attribute == "multihead_attn" and "DecoderLayer" in type(parent).__name__)
    ):
        return "cross"
    if getattr(module, "is_decoder", False) is True or isinstance(parent, nn.TransformerDecoderLayer):
        return "decoder"
    components = [type(module).__name__.lower(), *reversed(own.lower().split("."))]  # innermost first
    for component in components:
        for side in ("decoder", "encoder"):
            if side in component:
                return side
    tower = next((word for word in components if any(mark in word for mark in (*_NOT_TEXT, *_TEXT))), "")
    if tower and not any(mark in tower for mark in _TEXT):
        return "encoder"
    if default in ("encoder", "decoder", "cross"):
        return default
    return "decoder" if getattr(module, "is_causal", False) is True else "encoder"


def _has_one_input(module: nn.Module) -> bool:
    """Check whether `forward` takes one argument besides masks, so that queries and keys come from the same tokens."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # without self
    others = [each for each in parameters[1:] if "mask" not in each.name]
    return bool(parameters) and not others and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL


def stack_of(name: str) -> str:
    """Return the dotted name of the list of layers that contains a module, or of its parent if no list does."""
    parts = clean(name).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:i])
    return ".".join(parts[:-1])


def number_layers(groups: Sequence[HeadGroup], modules: Sequence[str]) -> list[HeadGroup]:
    """Number attention modules from 0 within each (stack, where), in the order given.

    Args:
        groups: groups in model order; their `layer` is overwritten.
        modules: the attention module's dotted name for each group.
    """
    layers: dict[tuple[str, str, str], int] = {}
    counted: Counter[tuple[str, str]] = Counter()
    numbered = []
    for group, module in zip(groups, modules, strict=True):
        stack = (group.stack, group.where)
        key = (*stack, module)
        if key not in layers:
            layers[key] = counted[stack]
            counted[stack] += 1
        numbered.append(replace(group, layer=layers[key]))
    return numbered


def module_of(group: HeadGroup) -> str:
    """Return the dotted name of a group's attention module: the group's name without its q, k or v suffix."""
    return group.name.removesuffix(f".{group.part}") if group.name != group.part else ""


def dotted(*names: str) -> str:
    """Join names with dots; skip empty ones."""
    return ".".join(name for name in names if name)
