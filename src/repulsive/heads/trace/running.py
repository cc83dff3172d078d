"""Run a model once for the trace, and leave it as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from repulsive.heads.place import clean
from repulsive.heads.trace.attention_calls import flex_recorded
from repulsive.heads.trace.functions import functions_looked_through, saved_tensors_kept
from repulsive.heads.trace.intercept import Intercept

_ENOUGH = 2  # samples: the layout of heads is the same in all of them


def run(model: nn.Module, example: object, watch: Intercept) -> None:
    """One forward pass in evaluation mode, seen by `watch`."""
    args, kwargs = _arguments(example)
    contexts = (_evaluating(model), _named(model, watch), _eager(), saved_tensors_kept())
    inner = (functions_looked_through(watch), flex_recorded(watch.record), watch)
    with ExitStack() as stack:
        for context in (*contexts, *inner):
            stack.enter_context(context)
        model(*args, **kwargs)


def shortened(example: object) -> object | None:
    """The first samples of an example, where all of its tensors have the same larger first dimension; else None."""
    leaves, spec = pytree.tree_flatten(dict(example) if isinstance(example, Mapping) else example)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) <= _ENOUGH or any(type(leaf) is not Tensor for leaf in tensors):
        return None
    cut = [leaf[:_ENOUGH] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    result: object = pytree.tree_unflatten(cut, spec)
    return result


def _arguments(example: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    return (tuple(example), {}) if isinstance(example, list | tuple) else ((example,), {})


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with _forked(model):
            yield
    finally:
        for module, flag in training:
            module.training = flag


@contextmanager
def _forked(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
        yield


@contextmanager
def _named(model: nn.Module, watch: Intercept) -> Iterator[None]:
    """Keep `watch.modules` the list of modules being run."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            title = clean(name)

            def enter(_module: nn.Module, _args: object, title: str = title) -> None:
                watch.modules.append(title)

            def leave(_module: nn.Module, _args: object, _out: object) -> None:
                watch.modules.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
            register = getattr(module, "register_propagate_forward_hook", None)
            if register is not None:
                hooks.callback(register(lambda _m, _i, out: watch.graph_output(out)).remove)
        yield


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled modules and functions run as written; without torch._dynamo nothing can be compiled."""
    if "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
