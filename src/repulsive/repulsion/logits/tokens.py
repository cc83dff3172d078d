"""Tokens to evaluate logits on: a sample of what the projections of each layer see in training.

Hooks on the projections keep a few hundred tokens, their projections and their sequence, of the last training pass
before a step that needs a new force. Nothing is kept in evaluation, and nothing is saved with a checkpoint: which
positions are taken follows from the seed and the step alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from repulsive.errors import RuleError
from repulsive.heads.place import unwrap
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.padding import masks_in, valid_tokens
from repulsive.repulsion.logits.projections import CircuitLayer, Projection
from repulsive.repulsion.logits.samples import Sample, Samples, grid_of

PARTS = ("q", "k", "v")

_numbers = itertools.count()
_samplers: weakref.WeakValueDictionary[int, Sampler] = weakref.WeakValueDictionary()


class Sampler:
    """Keeps the newest sample of every projection while it is `wanted`.

    Args:
        model: whose masks tell padding.
        layers: attention layers to sample.
        tokens: how many tokens of a pass to keep.
        seed: of the positions.
    """

    def __init__(self, model: nn.Module, layers: Sequence[CircuitLayer], tokens: int, seed: int) -> None:
        self.layers = list(layers)
        self.taken = Samples(layers, tokens, seed)
        self.wanted = True
        self._model = model
        self._masks: dict[str, Tensor] = {}  # of the model's last call, by argument
        self._local: dict[int, dict[str, Tensor]] = {}  # of each attention layer's
        self._roots: list[RemovableHandle] = []
        self._hooks: list[RemovableHandle] = []
        self.is_compiled = False  # a compiled model was seen to call the hooks
        self.number = next(_numbers)
        _samplers[self.number] = self
        device = self.layers[0].sides[0][1][0].slice.parameter().device
        self.written = torch.zeros((), device=device)  # what the compiled operation claims to change
        self._of: dict[nn.Module, list[tuple[int, str, Projection]]] = defaultdict(list)
        for number, layer in enumerate(self.layers):
            for part, projection in layer.watched.items():
                self._of[projection.output].append((number, part, projection))

    # -- hooks --------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start to watch the model: one hook on it always, those on its layers while a sample is wanted."""
        if self._roots:
            return
        for root in dict.fromkeys((self._model, unwrap(self._model))):
            hook = Hook(self, "_sees_model", root is self._model)
            self._roots.append(root.register_forward_pre_hook(hook, with_kwargs=True))
        self.want(self.wanted)

    def remove(self) -> None:
        """Take all hooks away, and forget all tokens."""
        self._unwatch()
        for hook in self._roots:
            hook.remove()
        self._roots = []
        self.clear()

    def want(self, wanted: bool) -> None:
        """Say whether the next training pass is to be sampled.

        Hooks cost time in every pass, so they are there only while they are needed; a compiled model keeps those that
        it was compiled with.
        """
        self.wanted = wanted
        if wanted and self._roots:
            self._watch()
        elif not self.is_compiled:
            self._unwatch()

    def _watch(self) -> None:
        if self._hooks:
            return
        for number, layer in enumerate(self.layers):
            if layer.attention not in self._of:
                hook = Hook(self, "_sees_attention", number)
                self._hooks.append(layer.attention.register_forward_pre_hook(hook, with_kwargs=True))
        for module, members in self._of.items():
            self._hooks.append(module.register_forward_hook(Hook(self, "_sees_projection"), with_kwargs=True))
            for _, _, projection in members:
                for target in projection.targets:
                    if target.slice.module is not module:
                        hook = Hook(self, "_sees_adapter")
                        self._hooks.append(target.slice.module.register_forward_pre_hook(hook))

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def samples(self) -> dict[tuple[int, str], Sample]:
        """The newest samples, by number of layer and part."""
        return self.taken.found

    def clear(self) -> None:
        """Forget all tokens and masks."""
        self.taken.clear()
        self._masks, self._local = {}, {}

    def _sees_model(self, outer: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and is_capturing():
            self._watch()  # a CUDA graph repeats what is recorded, so it has to contain the sampling
        if self._looks(module):
            found = masks_in(module, args, kwargs)
            if found or outer:  # a wrapper may not know the names of its arguments, and what it wraps does
                self._masks = found
            self._local = {}

    def _sees_attention(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._looks(module):
            self._local[number] = masks_in(module, args, kwargs)

    def _sees_adapter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._looks(module) and args:
            self.taken.adapter_inputs[module] = args[0].detach()

    def _sees_projection(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._looks(module):
            return
        for number, part, projection in self._of[module]:
            given = self._tokens(projection, part, args, kwargs)
            if not isinstance(given, Tensor):
                raise RuleError(f"{projection.group.name}: was called without a tensor, so its logits are not known")
            result = given if projection.is_torch else output
            masks = masks_in(module, args, kwargs) if projection.is_torch else self._local.get(number, {})
            shape = grid_of(given, projection)
            where = self.layers[number].where
            role = "q" if part == "q" else "k"  # values have the tokens of keys
            valid = valid_tokens(self._masks, shape, where, role)
            if valid is None:
                valid = valid_tokens(masks, shape, where, role)
            if torch.compiler.is_compiling():
                torch.ops.repulsive.take_tokens(
                    given.detach(), result.detach(), valid, self.number, number, PARTS.index(part), self.written
                )
            else:
                self.taken.take(number, part, given.detach(), result.detach(), valid)

    def _tokens(self, projection: Projection, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if projection.is_torch:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            return named[{"q": "query", "k": "key", "v": "value"}[part]]
        return args[0] if args else next(iter(kwargs.values()), None)

    def _looks(self, module: nn.Module) -> bool:
        """Only passes that will be followed by a step are looked at; what is compiled decides when it runs."""
        training = module.training and torch.is_grad_enabled()
        return training if torch.compiler.is_compiling() else training and (self.wanted or is_capturing())


class Hook:
    """A method of a sampler as a hook of a module. Copies of the module get one that does nothing."""

    def __init__(self, sampler: Sampler | None, method: str, *leading: Any) -> None:
        self.sampler, self.method, self.leading = sampler, method, leading

    def __call__(self, *args: Any) -> None:
        if self.sampler is not None:
            getattr(self.sampler, self.method)(*self.leading, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook(None, self.method)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (None, self.method)


def _take_tokens(
    given: Tensor, result: Tensor, valid: Tensor | None, sampler: int, layer: int, part: int, written: Tensor
) -> None:
    """`Sampler.take` as an operation that a compiled model can contain: whether to sample is decided when it runs."""
    found = _samplers.get(sampler)
    if found is not None:
        found.is_compiled = True
    if found is not None and (found.wanted or is_capturing()):
        found.taken.take(layer, PARTS[part], given, result, valid)


_SCHEMA = "(Tensor given, Tensor result, Tensor? valid, int sampler, int layer, int part, Tensor(a!) written) -> ()"
torch.library.custom_op("repulsive::take_tokens", _take_tokens, mutates_args=("written",), schema=_SCHEMA)
