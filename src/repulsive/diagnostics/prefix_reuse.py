"""Reuse the results of modules that run before an ablated head, so that only later modules run again.

One pass over a batch records the result of every module that contains an attention layer. When a head of layer l is
ablated, all of these modules that had finished before the heads of layer l were computed return their recorded
results, in the order of their calls. Everything else runs as usual: embeddings, masks, layer l itself, and all that
follows. The model computes the same numbers with the same operations, only fewer of them.

This needs no knowledge of the model. It works for stacks of blocks, for encoder-decoder models (the encoder is one
module) and for layers that run several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import call


@dataclass(eq=False)
class RecordedPass:
    """Results of one forward pass.

    Args:
        output: what the model returned.
        results: layer name -> modules that had finished before the heads of this layer were computed, each with its
            results in the order of its calls. Modules inside one of these are left out.
        versions: recorded tensors with their versions, which change if the model writes into a tensor.
    """

    output: Any = None
    results: dict[str, list[tuple[nn.Module, list[Any]]]] = field(default_factory=dict)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)

    def is_unchanged(self) -> bool:
        """Check that no recorded tensor was written into."""
        return all(tensor._version == version for tensor, version in self.versions)


@torch.no_grad()
def record_pass(model: nn.Module, batch: Any, layers: Sequence[AttentionLayer]) -> RecordedPass:
    """Run a model once, and record the results of modules that contain attention layers.

    Args:
        model: a module in evaluation mode.
        batch: inputs of the model.
        layers: the result of `find_attention_layers`.
    """
    recorded = RecordedPass()
    hooked = {id(layer.attention) for layer in layers} | {id(layer.module) for layer in layers}
    modules = [
        module
        for module in model.modules()
        if module is not model and any(id(inner) in hooked for inner in module.modules())
    ]
    modules = [module for module in modules if not module._forward_hooks]  # these would change a result twice
    inner = {module: {each for each in module.modules() if each is not module} for module in modules}
    results: dict[nn.Module, list[Any]] = {}

    def after(module: nn.Module, _args: object, result: Any) -> None:
        results.setdefault(module, []).append(result)

    def heads_ran(layer: AttentionLayer, _heads: Tensor) -> None:
        if layer.name not in recorded.results:  # the first run of a layer that runs several times
            covered: set[nn.Module] = set().union(*(inner[module] for module in results))
            recorded.results[layer.name] = [(each, list(own)) for each, own in results.items() if each not in covered]

    with ExitStack() as stack:
        stack.enter_context(replaced_head_outputs(layers, heads_ran))
        for module in modules:
            stack.callback(module.register_forward_hook(after).remove)
        recorded.output = call(model, batch)
    kept = {id(result): result for own in recorded.results.values() for _, each in own for result in each}
    recorded.versions = [(tensor, tensor._version) for result in kept.values() for tensor in _tensors(result)]
    return recorded


@contextmanager
def reused_prefix(recorded: RecordedPass, layer: AttentionLayer) -> Iterator[None]:
    """Return recorded results instead of running modules that finish before the heads of `layer` are computed.

    Calls of the model in this context must have the recorded batch as inputs.

    Args:
        recorded: the result of `record_pass`.
        layer: the first layer that is changed.
    """
    with ExitStack() as stack:
        for module, results in recorded.results.get(layer.name, ()):
            stack.enter_context(_replayed(module, results))
        yield


@contextmanager
def _replayed(module: nn.Module, results: Sequence[Any]) -> Iterator[None]:
    """Return recorded results in the first calls of a module; later calls run as usual."""
    original, calls = module.forward, iter(results)
    end = object()

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = next(calls, end)
        return original(*args, **kwargs) if result is end else result

    had_own = "forward" in module.__dict__
    module.__dict__["forward"] = forward  # not by setattr, which wrappers pass on to the module inside them
    try:
        yield
    finally:
        if had_own:
            module.__dict__["forward"] = original
        else:
            del module.__dict__["forward"]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
