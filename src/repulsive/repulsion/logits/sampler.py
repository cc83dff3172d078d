"""Hooks that sample tokens from the training forward pass, on which the logits are evaluated.

The hooks keep a few hundred tokens, with their projected values, from the last training pass before a step that needs
a new force. They keep nothing in evaluation, and a checkpoint contains no tokens: the sampled positions depend only on
the seed and the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from repulsive.errors import RuleError
from repulsive.heads.after_projection import projects_positions
from repulsive.heads.module_paths import unwrap
from repulsive.heads.padding import compact, know_arguments, masks_in, name_arguments
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.module_hook import Hook
from repulsive.repulsion.logits.operators import check_hooks_of_compiled_models, like_compact, register
from repulsive.repulsion.logits.parameter_tokens import ParameterTokens
from repulsive.repulsion.logits.pass_masks import PassMasks
from repulsive.repulsion.logits.projections import CircuitLayer, Projection
from repulsive.repulsion.logits.samples import Sample, Samples, grid_of

_Member = tuple[int, str, Projection]  # layer number, part ("q", "k" or "v")


class Sampler:
    """Sample the input tokens of every projection, in training passes that `want` selects.

    Args:
        model: the model; padding is read from the masks it is called with.
        layers: attention layers to sample.
        tokens: number of tokens to keep from a forward pass.
        seed: seed of the sampled positions.
    """

    def __init__(self, model: nn.Module, layers: Sequence[CircuitLayer], tokens: int, seed: int) -> None:
        self.layers = list(layers)
        self.taken = Samples(layers, tokens, seed)
        self.wanted = True
        self._model = model
        self.masks = PassMasks(model, layers)
        self._model_hooks: list[RemovableHandle] = []
        self._layer_hooks: list[RemovableHandle] = []
        self.is_compiled = False  # whether a compiled model has called the hooks
        self._has_run = False  # whether an uncompiled model has called the hooks in training
        self._is_eager = False  # whether the model itself runs uncompiled in training; its layers may be compiled
        self.number = register(self)
        device = self.layers[0].sides[0][1][0].slice.parameter().device
        self.written = torch.zeros((), device=device)  # dummy tensor that the custom operators declare as mutated
        self._projections: dict[nn.Module, list[int]] = defaultdict(list)  # indices of the calls of each module
        self._calls: list[list[_Member]] = []
        self._find_calls()
        self._products = ParameterTokens()
        self._adapters = self._find_adapters()
        # Parts that the current call of a layer has not projected yet, for layers that also project positions.
        self._open: dict[int, set[str]] = {
            number: set(layer.watched) for number, layer in enumerate(layers) if projects_positions(layer.attention)
        }

    # -- hooks --------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register a permanent hook on the model, and hooks on its layers while a sample is wanted."""
        if self._model_hooks:
            return
        check_hooks_of_compiled_models()
        roots = dict.fromkeys((self._model, unwrap(self._model)))
        know_arguments([*roots, *(layer.attention for layer in self.layers)])
        for root in roots:
            hook = Hook(self, "_on_model", root is self._model)
            self._model_hooks.append(root.register_forward_pre_hook(hook, with_kwargs=True))
        self.want(self.wanted)

    def remove(self) -> None:
        """Remove all hooks and discard all tokens."""
        self._remove_layer_hooks()
        for hook in self._model_hooks:
            hook.remove()
        self._model_hooks = []
        self._has_run = False
        self.clear()

    def want(self, wanted: bool) -> None:
        """Set whether the next training pass is sampled.

        Hooks cost time in every pass, so they are registered only while needed. A compiled model keeps the hooks that
        it was compiled with, so they stay until the first training pass shows whether the model is compiled.
        """
        self.wanted = wanted
        if self._model_hooks and (wanted or not self._has_run):
            self._add_layer_hooks()
        elif not self.is_compiled:
            self._remove_layer_hooks()

    def _add_layer_hooks(self) -> None:
        if self._layer_hooks:
            return
        for number, layer in enumerate(self.layers):
            attention = layer.attention
            if attention not in self._projections or self._has_parameters(number):
                hook = Hook(self, "_on_attention", number)
                self._layer_hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
            if self._has_parameters(number):
                begin, end = Hook(self, "_begin_products", number), Hook(self, "_end_products")
                self._layer_hooks.append(attention.register_forward_pre_hook(begin))
                self._layer_hooks.append(attention.register_forward_hook(end, prepend=True, always_call=True))
        for module in self._projections:
            self._layer_hooks.append(module.register_forward_hook(Hook(self, "_on_projection"), with_kwargs=True))
        for number, adapter in enumerate(self._adapters):
            self._layer_hooks.append(adapter.register_forward_pre_hook(Hook(self, "_on_adapter", number)))

    def _find_calls(self) -> None:
        """List the parts of layers that one call of a module projects from the same tokens, such as q and k."""
        calls: dict[tuple[object, ...], list[_Member]] = defaultdict(list)
        for number, layer in enumerate(self.layers):
            for part, projection in layer.watched.items():
                if projection.weight is not None:
                    continue  # its products are intercepted
                apart = part if projection.is_torch else _role(part) if layer.where == "cross" else ""
                calls[projection.output, apart].append((number, part, projection))
        self._calls = list(calls.values())
        for index, members in enumerate(self._calls):
            self._projections[members[0][2].output].append(index)

    def _find_adapters(self) -> list[nn.Module]:
        """List the modules of LoRA adapters, whose inputs are recorded."""
        modules = [
            target.slice.module
            for members in self._calls
            for _, _, projection in members
            for target in projection.targets
            if target.slice.module is not projection.output and not target.is_bias
        ]
        return list(dict.fromkeys(modules))

    def _remove_layer_hooks(self) -> None:
        for hook in self._layer_hooks:
            hook.remove()
        self._layer_hooks = []

    @property
    def samples(self) -> dict[tuple[int, str], Sample]:
        """The latest samples, by layer number and part ("q", "k" or "v")."""
        return self.taken.latest

    def clear(self) -> None:
        """Discard all tokens and masks."""
        self.taken.clear()
        self.masks.clear()

    def _on_model(self, is_outer: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self._products.abandon()
            if module is unwrap(self._model) and module.training and torch.is_grad_enabled():
                self._is_eager = True
            if is_capturing():
                self._add_layer_hooks()  # a CUDA graph replays what was recorded, so record the sampling
        if self._is_sampled(module):
            masks = masks_in(module, args, kwargs)
            self.masks.begin_pass(masks if masks or is_outer else None)  # a wrapper may hide names of the inner model

    def _on_attention(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_sampled(module):
            return
        if number in self._open:
            if torch.compiler.is_compiling():
                torch.ops.repulsive.begin_layer(self.number, number, self.written)
            else:
                self.begin_layer(number)
        masks = masks_in(module, args, kwargs)
        if torch.compiler.is_compiling():
            for name, mask in masks.items():
                small = torch.ops.repulsive.compact_mask(mask.detach(), self.number)
                torch.ops.repulsive.keep_mask(small, name, self.number, number, self.written)
        else:
            self.masks.of_layers[number] = masks

    def _on_adapter(self, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_sampled(module) or not args:
            return
        if torch.compiler.is_compiling():
            torch.ops.repulsive.keep_adapter_input(args[0].detach(), self.number, number, self.written)
        else:
            self.taken.adapter_inputs[module] = args[0].detach()

    def _has_parameters(self, number: int) -> bool:
        return any(projection.weight is not None for projection in self.layers[number].watched.values())

    def _begin_products(self, number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            torch.ops.repulsive.begin_layer(self.number, number, self.written)  # raises an error if it runs
        elif self._is_sampled(module):
            self._products.begin(module, self.layers[number].watched, partial(self._on_product, number))

    def _end_products(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._has_run |= module.training and torch.is_grad_enabled()
            self._products.end(module)

    def _on_product(self, number: int, part: str, projection: Projection, tokens: Tensor, heads: Tensor) -> None:
        shape = grid_of(tokens, projection)
        valid = self.masks.real_tokens(self.masks.of_layers.get(number, {}), shape, number, _role(part))
        self._take([(number, part, projection)], tokens, heads, valid, shape)

    def _on_projection(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
            self._has_run = True
        if not self._is_sampled(module):
            return
        for call in self._projections[module]:
            members = self._calls[call]
            number, part, projection = members[0]
            given = self._tokens(projection, part, args, kwargs)
            if not isinstance(given, Tensor):
                raise RuleError(
                    f"{projection.group.name}: expected a tensor as its input, got {type(given).__name__}; exclude the "
                    "layer with match=..., or choose space='sphere'"
                )
            is_torch = projection.is_torch
            result = given if is_torch else output
            if not isinstance(result, Tensor):
                raise RuleError(
                    f"{projection.group.name}: expected a tensor as the result of {type(module).__name__}, got "
                    f"{type(result).__name__}; exclude the layer with match=..., or choose space='sphere'"
                )
            shape = grid_of(given, projection)
            if torch.compiler.is_compiling():
                masks = masks_in(module, args, kwargs) if is_torch else {}  # `take_tokens` reads those of the layer
                valid = self.masks.real_tokens(masks, shape, number, _role(part))
                if valid is not None:  # a new tensor, because samples know masks by their addresses
                    valid = torch.ops.repulsive.compact_mask(valid, self.number)
                torch.ops.repulsive.take_tokens(given.detach(), result.detach(), valid, self.number, call, self.written)
            else:
                masks = masks_in(module, args, kwargs) if is_torch else self.masks.of_layers.get(number, {})
                valid = self.masks.real_tokens(masks, shape, number, _role(part))
                self._take(members, given.detach(), result.detach(), valid, shape)

    # -- calls of operators in compiled models --------------------------------------------------------------------

    def begin_layer(self, layer: int) -> None:
        """Start a call of a layer that also projects positions.

        Raises:
            RuleError: the weights of the layer are in einsum notation, whose products compiled code does not show.
        """
        if self._has_parameters(layer):
            name = self.layers[layer].name
            raise RuleError(
                f"{name}: space='logits' does not support torch.compile with weights in einsum notation; train without "
                "torch.compile, or choose space='sphere'"
            )
        self._open[layer] = set(self.layers[layer].watched)

    def take_tokens(self, call: int, given: Tensor, result: Tensor, valid: Tensor | None) -> None:
        """Sample the tokens of one call of a module, if a sample is wanted."""
        self.is_compiled = True
        if not (self.wanted or is_capturing()):
            return
        number, part, projection = self._calls[call][0]
        shape = grid_of(given, projection)
        if valid is None and (masks := self.masks.of_layers.get(number)):
            valid = self.masks.valid_tokens(masks, shape, number, _role(part))
        self._take(self._calls[call], given, result, valid, shape)

    def compact_mask(self, mask: Tensor) -> Tensor:
        """Reduce a mask to padding if a sample is wanted; else return any tensor of that shape, at no cost."""
        return compact(mask) if self.wanted or is_capturing() else like_compact(mask)

    def keep_mask(self, layer: int, name: str, mask: Tensor) -> None:
        """Keep a compact mask of an attention layer for `take_tokens`."""
        if self.wanted or is_capturing():
            self.masks.keep_copy(layer, name, mask)

    def keep_adapter_input(self, adapter: int, given: Tensor) -> None:
        """Keep a copy of the input of a LoRA adapter for `take_tokens`."""
        if self.wanted or is_capturing():
            self.taken.adapter_inputs[self._adapters[adapter]] = given.clone()

    def _take(
        self, members: Sequence[_Member], given: Tensor, result: Tensor, valid: Tensor | None, shape: tuple[int, int]
    ) -> None:
        for number, part, _ in members:
            if self._is_first(number, part):
                self.taken.take(number, part, given, result, valid, shape)

    def _is_first(self, number: int, part: str) -> bool:
        """Check whether a projection sees tokens: its first call in a call of a layer that also projects positions."""
        parts = self._open.get(number)
        if parts is None:
            return True
        is_first = part in parts
        parts.discard(part)
        return is_first

    def _tokens(self, projection: Projection, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if projection.is_torch:
            named = name_arguments(("query", "key", "value"), args, kwargs)
            return named[{"q": "query", "k": "key", "v": "value"}[part]]
        return args[0] if args else next(iter(kwargs.values()), None)

    def _is_sampled(self, module: nn.Module) -> bool:
        """Check whether to sample: in training, if a sample is wanted.

        The compiler reads `wanted`, too, and compiles the model twice: with and without calls of operators. A call
        takes time even if the operator does nothing, so steps without sampling would be slower. Layers that are
        compiled one by one check `wanted` at run time instead: each has a graph of its own already, and torch makes at
        most eight graphs of a function.

        Tensors inside a transform of `torch.func`, such as `grad` or `vmap`, have no values that could be kept.
        """
        is_training = module.training and torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            return is_training and (self._is_eager or self.wanted)  # what is read here makes torch compile again
        is_wanted = self.wanted or is_capturing()
        return is_training and is_wanted and not torch._C._are_functorch_transforms_active()


def _role(part: str) -> str:
    return "q" if part == "q" else "k"  # values come from the same tokens as keys
