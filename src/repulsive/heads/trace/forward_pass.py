"""Run one forward pass for the trace and restore the model afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from repulsive.heads.call_arguments import call_arguments
from repulsive.heads.module_paths import clean
from repulsive.heads.trace.attention_calls import flex_recorded
from repulsive.heads.trace.autograd_functions import autograd_functions_traced, saved_tensors_kept
from repulsive.heads.trace.recorder import Recorder

_FEW = 2  # samples to trace; the head layout is the same in every sample


def run(model: nn.Module, example: object, recorder: Recorder) -> None:
    """Run one forward pass in evaluation mode under `recorder`."""
    args, kwargs = call_arguments(model, example)
    outer = (without_side_effects(model), _module_names(model, recorder), without_compilation(), saved_tensors_kept())
    inner = (autograd_functions_traced(recorder), flex_recorded(recorder.record), recorder)
    with ExitStack() as stack:
        for context in (*outer, *inner):
            stack.enter_context(context)
        try:
            result = model(*args, **kwargs)
        except Exception as error:
            error.add_note(f"repulsive: raised by {type(model).__name__} while it ran on example_inputs")
            raise
    recorder.finish(result)


def first_samples(example: object) -> object | None:
    """Take the first samples of an example; None if its tensors differ in batch size or already have few samples."""
    leaves, spec = pytree.tree_flatten(dict(example) if isinstance(example, Mapping) else example)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) <= _FEW or any(type(leaf) is not Tensor for leaf in tensors):
        return None
    shortened = [leaf[:_FEW] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    result: object = pytree.tree_unflatten(shortened, spec)
    return result


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; restore that of every module at the end.

    Modes are set by `train`, outer modules first: classes override it to clear caches (LeViT) or to merge adapters.
    """
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in training:
            if module.training != flag:
                module.train(flag)
        for module, flag in training:  # `train` of an outer module may have changed an inner one
            module.training = flag


@contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode; restore every module's flag and the random state at the end."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with evaluation_mode(model), torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
        yield


@contextmanager
def _module_names(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keep the list of running modules in `recorder.modules` up to date."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            title = clean(name)

            def enter(_module: nn.Module, _args: object, title: str = title) -> None:
                recorder.modules.append(title)

            def leave(_module: nn.Module, _args: object, _out: object) -> None:
                recorder.modules.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
            register = getattr(module, "register_propagate_forward_hook", None)
            if register is not None:
                hooks.callback(register(lambda _m, _i, out: recorder.graph_output(out)).remove)
        yield


@contextmanager
def without_compilation() -> Iterator[None]:
    """Run compiled modules and functions uncompiled. If torch._dynamo was never imported, nothing is compiled."""
    if "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
