"""Operators that compiled models call at run time to hand tensors to a sampler.

A compiled model cannot write to Python objects inside activation checkpointing, and its dictionaries are updated only
after the whole graph has run. An operator runs in its place in the graph. Its inputs may be overwritten afterwards, so
a receiver copies what it keeps.

The operators are defined with the low-level interface: a call of `torch.library.custom_op` takes a hundred times as
long, and a compiled model makes two calls per layer in every step that is sampled. Other steps run a graph without
these calls, which is compiled apart.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor


class Receiver(Protocol):
    """What the operators call."""

    def begin_layer(self, layer: int) -> None: ...

    def take_tokens(self, call: int, given: Tensor, result: Tensor, valid: Tensor | None) -> None: ...

    def compact_mask(self, mask: Tensor) -> Tensor: ...

    def keep_mask(self, layer: int, name: str, mask: Tensor) -> None: ...

    def keep_adapter_input(self, adapter: int, given: Tensor) -> None: ...


_numbers = itertools.count()
_receivers: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()


def register(receiver: Receiver) -> int:
    """Return a number by which operators find a receiver. The receiver is not kept alive."""
    number = next(_numbers)
    _receivers[number] = receiver
    return number


def check_hooks_of_compiled_models() -> None:
    """Make torch.compile check for hooks, and discard the graphs that were compiled without this check.

    By default torch.compile does not check for hooks, and may run a graph that it compiled for another model of the
    same class. A repelled model would then run the graph of its plain twin, which samples no tokens.
    """
    import torch._dynamo

    if torch._dynamo.config.skip_nnmodule_hook_guards:
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch.compiler.reset()


def _begin_layer(receiver: int, layer: int, written: Tensor) -> None:
    if (target := _receivers.get(receiver)) is not None:
        target.begin_layer(layer)


def _take_tokens(
    given: Tensor, result: Tensor, valid: Tensor | None, receiver: int, call: int, written: Tensor
) -> None:
    if (target := _receivers.get(receiver)) is not None:
        target.take_tokens(call, given, result, valid)


def _compact_mask(mask: Tensor, receiver: int) -> Tensor:
    target = _receivers.get(receiver)
    return like_compact(mask) if target is None else target.compact_mask(mask)


def like_compact(mask: Tensor) -> Tensor:
    """Make an uninitialised tensor with the shape and type of a compact mask."""
    if mask.ndim == 2:
        return torch.empty_like(mask, memory_format=torch.contiguous_format)
    return mask.new_empty((mask.shape[0], 1, mask.shape[-1]), dtype=torch.bool)


def _keep_mask(mask: Tensor, name: str, receiver: int, layer: int, written: Tensor) -> None:
    if (target := _receivers.get(receiver)) is not None:
        target.keep_mask(layer, name, mask)


def _keep_adapter_input(given: Tensor, receiver: int, adapter: int, written: Tensor) -> None:
    if (target := _receivers.get(receiver)) is not None:
        target.keep_adapter_input(adapter, given)


# A replay of a CUDA graph runs no Python, so torch.compile(mode="reduce-overhead") must leave these calls out of its
# graphs. Older versions of torch do not have the tag.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

# `written` is a dummy tensor that is declared as mutated, so that calls are neither removed nor reordered.
_library = torch.library.Library("repulsive", "FRAGMENT")
for _schema, _function in {
    "begin_layer(int receiver, int layer, Tensor(a!) written) -> ()": _begin_layer,
    "take_tokens(Tensor given, Tensor result, Tensor? valid, int receiver, int call, Tensor(a!) written) -> ()": (
        _take_tokens
    ),
    "keep_mask(Tensor mask, str name, int receiver, int layer, Tensor(a!) written) -> ()": _keep_mask,
    "keep_adapter_input(Tensor given, int receiver, int adapter, Tensor(a!) written) -> ()": _keep_adapter_input,
}.items():
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=_TAGS)
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"repulsive::{_name}", lambda *args: None, lib=_library)

# Without side effects, so that the compiler merges the calls of all layers that receive the same mask.
_library.define("compact_mask(Tensor mask, int receiver) -> Tensor", tags=_TAGS)
_library.impl("compact_mask", _compact_mask, "CompositeExplicitAutograd")
torch.library.register_fake("repulsive::compact_mask", lambda mask, receiver: like_compact(mask), lib=_library)
