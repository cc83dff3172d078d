"""Tokens to evaluate logits on: a sample of what the projections of each layer see in training.

Hooks on the projections keep a few hundred tokens, their projections and their sequence, of the last training pass
before a step that needs a new force. Nothing is kept in evaluation, and nothing is saved with a checkpoint: which
positions are taken follows from the seed and the step alone.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from repulsive.errors import RuleError
from repulsive.heads.place import unwrap
from repulsive.repulsion.live import is_captured as is_capturing
from repulsive.repulsion.logits.norms import NormFormula, formula_of
from repulsive.repulsion.logits.padding import masks_in, valid_tokens
from repulsive.repulsion.logits.positions import Positions, choose
from repulsive.repulsion.logits.projections import CircuitLayer, Projection

PARTS = ("q", "k", "v")

_numbers = itertools.count()
_samplers: weakref.WeakValueDictionary[int, Sampler] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Sample:
    """Tokens that one projection saw.

    Args:
        inputs: what each weight of the projection was multiplied with, [N, D_in] each.
        outputs: the projected tokens [N, M, d], before any norm.
        weights: 1 for a token that counts, 0 for padding, [N].
        sequences: which sequence a token belongs to, int64 [N].
        count: how many sequences there are.
        norm: of q or k, as it was during the forward pass.
    """

    inputs: tuple[Tensor, ...]
    outputs: Tensor
    weights: Tensor
    sequences: Tensor
    count: int
    norm: NormFormula | None = None


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
        self.tokens, self.seed = tokens, seed
        self.step = 0
        self.wanted = True
        self.samples: dict[tuple[int, str], Sample] = {}
        self.passes = 0  # training passes that were sampled since the last `clear`
        self._model = model
        self._masks: dict[str, Tensor] = {}
        self._local: dict[int, dict[str, Tensor]] = {}
        self._positions: dict[tuple[object, ...], Positions] = {}
        self._adapter_inputs: dict[nn.Module, Tensor] = {}
        self._rows: dict[tuple[int, str, torch.device], Tensor | slice] = {}
        self._checked: set[tuple[int, str]] = set()
        self._roots: list[RemovableHandle] = []
        self._hooks: list[RemovableHandle] = []
        self.is_compiled = False  # a compiled model was seen to call the hooks
        self._given: tuple[Tensor, Positions, Tensor] | None = None  # q and k of a layer often have one input
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

    def clear(self) -> None:
        """Forget all tokens."""
        self.samples.clear()
        self._positions.clear()
        self._adapter_inputs.clear()
        self._given = None
        self._masks, self._local = {}, {}
        self.passes = 0

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
            self._adapter_inputs[module] = args[0].detach()

    def _sees_projection(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._looks(module):
            return
        for number, part, projection in self._of[module]:
            given = self._tokens(projection, part, args, kwargs)
            if not isinstance(given, Tensor):
                raise RuleError(f"{projection.group.name}: was called without a tensor, so its logits are not known")
            result = given if projection.is_torch else output
            masks = masks_in(module, args, kwargs) if projection.is_torch else self._local.get(number, {})
            shape = _grid(given, projection)
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
                self.take(number, part, given.detach(), result.detach(), valid)

    def _looks(self, module: nn.Module) -> bool:
        """Only passes that will be followed by a step are looked at; what is compiled decides when it runs."""
        training = module.training and torch.is_grad_enabled()
        return training if torch.compiler.is_compiling() else training and (self.wanted or is_capturing())

    # -- taking -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, number: int, part: str, given: Tensor, result: Tensor, valid: Tensor | None) -> None:
        """Keep tokens of one call of one projection.

        Args:
            number: of the layer.
            part: "q", "k" or "v".
            given: the projection's input [..., D_in].
            result: its result [..., features]; of `nn.MultiheadAttention` the input again.
            valid: bool [B, T], or None.
        """
        projection = self.layers[number].watched[part]
        at = self._choose(_grid(given, projection), valid, given.device)
        flat = self._rows_of(given, projection, at)  # [N, D_in]
        if projection.is_torch:
            outputs = self._project(projection, flat)
        else:
            whole = result.flatten(0, -2).index_select(0, at.index)  # [N, features]
            outputs = whole[:, self._columns(number, part, projection, whole.device)]
        outputs = outputs.unflatten(-1, (projection.group.num_heads, projection.width))
        inputs = [flat]
        if projection.targets[0].slice.module is not projection.output:
            modules = [target.slice.module for target in projection.targets]
            seen = [self._adapter_inputs[module] for module in modules if module in self._adapter_inputs]
            inputs = [x.flatten(0, -2).index_select(0, at.index) for x in seen]
        norm = None
        if projection.norm is not None:
            norm = formula_of(projection.norm, outputs, projection.group.name)
        if (number, part) not in self._checked and len(inputs) == 1 and not is_capturing():
            self._check(number, part, projection, flat, outputs)
        self.samples[number, part] = Sample(
            tuple(inputs), outputs, at.weights, at.sequences, at.count, norm
        )
        self.passes += 1

    def _choose(self, shape: tuple[int, int], valid: Tensor | None, device: torch.device) -> Positions:
        """Positions for one call; all layers that see one batch share them."""
        step = None if is_capturing() else self.step  # inside a CUDA graph nothing can be drawn: take the last ones
        key = (shape, device, None if valid is None else valid.data_ptr(), step)
        if key not in self._positions:
            self._positions[key] = choose(shape, self.tokens, valid, device, seed=self.seed, step=self.step)
            self._positions[*key[:3], None] = self._positions[key]
        return self._positions[key]

    def _rows_of(self, given: Tensor, projection: Projection, at: Positions) -> Tensor:
        """The sampled rows of an input, [N, D_in]."""
        if self._given is not None:
            last, positions, rows = self._given
            if positions is at and last.data_ptr() == given.data_ptr() and last.shape == given.shape:
                return rows
        flat = _flat(given, projection).index_select(0, at.index)
        self._given = given, at, flat
        return flat

    def _tokens(self, projection: Projection, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if projection.is_torch:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            return named[{"q": "query", "k": "key", "v": "value"}[part]]
        return args[0] if args else next(iter(kwargs.values()), None)

    def _columns(self, number: int, part: str, projection: Projection, device: torch.device) -> Tensor | slice:
        key = (number, part, device)
        if key not in self._rows:
            rows = projection.rows.flatten()
            first = int(rows[0])
            straight = torch.equal(rows, torch.arange(first, first + len(rows)))
            self._rows[key] = slice(first, first + len(rows)) if straight else rows.to(device)
        return self._rows[key]

    def _project(self, projection: Projection, tokens: Tensor) -> Tensor:
        weight, *bias = [target.slice for target in projection.targets]
        rows = projection.rows.flatten().to(tokens.device)
        matrix = weight.parameter().detach()[rows].to(tokens.dtype)
        if not bias:
            return F.linear(tokens, matrix)
        numbers = bias[0].rows.flatten().to(tokens.device)
        return F.linear(tokens, matrix, bias[0].parameter().detach()[numbers].to(tokens.dtype))

    def _check(self, number: int, part: str, projection: Projection, given: Tensor, outputs: Tensor) -> None:
        """On the first sample: the module does multiply its input with the weight that the force is meant for."""
        self._checked.add((number, part))
        target = projection.targets[0].slice
        weight = target.parameter().detach()
        if hasattr(weight, "placements") or target.module is not projection.output:
            return
        rows = projection.rows.flatten().to(weight.device)
        expected = given @ weight.movedim(target.axis, 0)[rows].to(given.dtype).T
        bias = getattr(target.module, "bias", None)
        if isinstance(bias, Tensor) and not projection.is_torch:
            expected = expected + bias.detach()[rows].to(given.dtype)
        error = float((expected - outputs.flatten(1)).abs().max())
        if not projection.is_torch and error > 0.05 * float(expected.abs().max()) + 1e-6:
            raise RuleError(
                f"{projection.group.name}: {type(target.module).__name__} does more than multiply its input with "
                f"{target.parameter_name}, so space='logits' cannot move it; choose space='sphere' for this layer"
            )


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


def _grid(tokens: Tensor, projection: Projection) -> tuple[int, int]:
    """(B, T): sequences, and tokens of each."""
    if tokens.ndim == 2:
        return 1, tokens.shape[0]
    if _is_transposed(projection):
        return tokens.shape[1], tokens.shape[0]
    return tokens.shape[0], math.prod(tokens.shape[1:-1])


def _flat(tokens: Tensor, projection: Projection) -> Tensor:
    """[B T, D], sequence after sequence."""
    if tokens.ndim == 3 and _is_transposed(projection):
        tokens = tokens.transpose(0, 1)
    return tokens.flatten(0, -2)


def _is_transposed(projection: Projection) -> bool:
    return isinstance(projection.output, nn.MultiheadAttention) and not projection.output.batch_first


def _take_tokens(
    given: Tensor, result: Tensor, valid: Tensor | None, sampler: int, layer: int, part: int, written: Tensor
) -> None:
    """`Sampler.take` as an operation that a compiled model can contain: whether to sample is decided when it runs."""
    found = _samplers.get(sampler)
    if found is not None:
        found.is_compiled = True
    if found is not None and (found.wanted or is_capturing()):
        found.take(layer, PARTS[part], given, result, valid)


_SCHEMA = "(Tensor given, Tensor result, Tensor? valid, int sampler, int layer, int part, Tensor(a!) written) -> ()"
torch.library.custom_op("repulsive::take_tokens", _take_tokens, mutates_args=("written",), schema=_SCHEMA)
