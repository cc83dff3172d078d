"""Record the projections and attention calls of a forward pass.

The output of every projection is replaced by a fresh leaf tensor, and the statistics of norms are held constant.
Therefore, the gradients of a head stop at the nearest projections.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.heads.products.reshaped_weights import note_reshape
from repulsive.heads.trace.attention_calls import dot_product_operands, longest_sample, varlen
from repulsive.heads.trace.norms import NORMS, STATISTICS, constant_norm, constant_statistic
from repulsive.heads.trace.parameter_index import ParameterIndex, WeightRows
from repulsive.heads.trace.projections import (
    MATMUL,
    multiply_in_pairs,
    several_factors,
    summed_axis,
    tensors_in,
    value_axes,
    weights_in,
)
from repulsive.heads.trace.records import Call, Leaf
from repulsive.heads.trace.usage import UsedOutputs

_UNMASKED = 5e3  # a score that is lower than the largest of its row by more than this is masked
_DESCEND = (
    "multi_head_attention_forward",
    "normalize",
    "gumbel_softmax",
)  # Python functions whose inner calls are recorded


class Recorder(TorchFunctionMode):
    """Torch function mode that records projections and attention calls.

    Args:
        parameters: (dotted name, parameter) pairs of the model.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.leaves: dict[int, Leaf] = {}
        self.calls: list[Call] = []
        self.modules: list[str] = []  # running modules, outermost first
        self.hidden: dict[str, str] = {}  # module -> why attention in it was not traced
        self.products = 0  # number of matrix products of two activations that are not the scores of a recorded call
        self._usage = UsedOutputs()
        self._opaque: list[str] = []  # running autograd functions that are not traced
        self._forced = 0  # depth of autograd functions that run as plain code
        self._parameters = ParameterIndex(parameters)

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled" and self._forced:
            return None  # ignore the no_grad of a checkpoint's forward
        if name in _DESCEND and isinstance(func, types.FunctionType):
            inner = undispatched(func)
            with self:
                return inner(*args, **kwargs)
        if name == "einsum" and (terms := several_factors(args)) is not None:
            with self:
                return multiply_in_pairs(*terms)
        if not torch.is_grad_enabled():
            if name in ("softmax", "scaled_dot_product_attention", "_varlen_attn"):
                inside = f"the autograd function {self._opaque[-1]}" if self._opaque else "torch.no_grad"
                self.hidden.setdefault(self._owner(), f"attention runs inside {inside}, which the trace cannot follow")
            return func(*args, **kwargs)
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            self.record(*dot_product_operands(args, kwargs))
            return func(*args, **kwargs)
        if name == "_varlen_attn":
            return varlen(args, self.record)
        if name in NORMS:
            return self._propagate_tag(args, kwargs, constant_norm(func, name, args, kwargs))
        result = func(*args, **kwargs)
        note_reshape(func, args, kwargs, result)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return self._propagate_tag(args, kwargs, result)
        return self._trace_result(func, name, args, kwargs, result)

    def _trace_result(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor
    ) -> Any:
        """Return what replaces the result of a function: a leaf for a projection, or a tensor of an attention call."""
        if name in STATISTICS:
            return constant_statistic(name, args, kwargs, result)
        source = self._projection(name, args, kwargs, result)
        if source is not None:
            self._usage.use((*args, *kwargs.values()))
            # A matrix that mixes attention weights gives attention weights; any other product is a projection.
            if not _is_attention_weights(args, kwargs, result):
                return self._leaf(result, *source)
            # Use random values: a learned mixing matrix may start as the identity and look as if it did not mix.
            return self._propagate_tag(args, kwargs, func(*map(_with_random_values, args), **kwargs))
        operands = list(tensors_in((*args, *kwargs.values()))) if name in (*MATMUL, "einsum") else []
        call = _tag(args, kwargs) if len(operands) > 1 else None
        if call is not None:
            left = not hasattr(operands[-1], "_attention_call")
            self._output(call, result, value_axes(name, args, result, left))
            return result
        if len(operands) == 2 and all(operand.requires_grad for operand in operands):
            self.products += 1
            self._without_softmax(func, name, args, kwargs, operands)
            result._is_product = True  # type: ignore[attr-defined]
            return result
        return self._propagate_tag(args, kwargs, result)

    def record(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Record an attention call whose operands are [.., heads, tokens, features]."""
        self._usage.use((q, k, v))
        self.calls.append(Call(self._owner(), dict(zip("qkv", longest_sample(q, k, v), strict=True))))

    def finish(self, result: Any) -> None:
        """Drop products with attention weights that influence nothing, such as scores for choosing tokens."""
        self._usage.use_result(result)
        for call in self.calls:
            used = [output for output in call.outputs if not self._usage.is_unused(output[0])]
            call.outputs = used or call.outputs

    def mark(self) -> tuple[int, int, tuple[str, ...]]:
        """Return the current position of the record, for `has_recorded_since` and `rewind`."""
        return len(self.calls), len(self.leaves), tuple(self.modules)

    def has_recorded_since(self, mark: tuple[int, int, tuple[str, ...]]) -> bool:
        """Check whether a projection or an attention call was recorded since `mark`."""
        return self.mark()[:2] != mark[:2]

    def rewind(self, mark: tuple[int, int, tuple[str, ...]]) -> None:
        """Discard what was recorded since `mark`."""
        calls, leaves, modules = mark
        del self.calls[calls:]
        for key in list(self.leaves)[leaves:]:
            del self.leaves[key]
        self.modules[:] = modules

    @contextmanager
    def with_gradients(self) -> Iterator[None]:
        """Ignore `torch.no_grad` in this block."""
        self._forced += 1
        try:
            yield
        finally:
            self._forced -= 1

    @contextmanager
    def inside_opaque(self, name: str) -> Iterator[None]:
        """Mark attention calls in this block as hidden inside the autograd function `name`, which cannot be traced."""
        self.hidden.setdefault(self._owner(), f"the trace cannot look into the autograd function {name}")
        forced, self._forced = self._forced, 0
        self._opaque.append(name)
        try:
            yield
        finally:
            self._opaque.pop()
            self._forced = forced

    def graph_output(self, output: Tensor) -> None:
        """Record the output of a graph convolution's heads, [nodes, heads, channels]."""
        axes = tuple(range(output.ndim - 1))
        self.calls.append(Call(self._owner(), outputs=[(output, axes)], is_graph=True))

    def _owner(self) -> str:
        return self.modules[-1] if self.modules else ""

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores = args[0] if args else kwargs["input"]
        self._usage.use([scores])
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        out: Tensor = func(*args, **kwargs)
        if dim is None or not scores.requires_grad:
            return out
        dim %= scores.ndim
        out = out.detach()
        weights = out.clone().requires_grad_()
        is_used = out.amax(dim) > out.amin(dim)  # a fully masked row is uniform
        attended = (out > 0).sum(dim)
        # The weights of a saturated softmax underflow; its keys are unmasked all the same.
        unmasked = (scores.detach() > scores.detach().amax(dim, keepdim=True) - _UNMASKED).sum(dim)
        attended = torch.where(attended < 2, unmasked, attended) * (is_used if is_used.any() else 1)
        self.products -= hasattr(scores, "_is_product")
        call = Call(self._owner(), scores=scores, dim=dim, attended=attended, weights=weights)
        self.calls.append(call)
        out = weights.clone()  # a clone, because models may write into attention weights in place
        out._attention_call = call  # type: ignore[attr-defined]
        return out

    def _without_softmax(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]
    ) -> None:
        """Record attention whose weights are a function of q k^T other than a softmax, such as a sigmoid."""
        products = [operand for operand in operands if hasattr(operand, "_is_product")]
        if len(products) != 1:
            return
        (weights,) = products
        dim = summed_axis(name, args, operands, weights)
        if dim is None:
            return
        leaf = weights.detach().clone().requires_grad_()

        def with_leaf(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(with_leaf, value))
            return leaf if value is weights else value

        # The model goes on with its own result, so that gradients of later calls are complete.
        result = func(*map(with_leaf, args), **{key: with_leaf(value) for key, value in kwargs.items()})
        attended = (leaf.detach() != 0).sum(dim)
        call = Call(self._owner(), scores=weights, dim=dim, attended=attended, weights=leaf, has_softmax=False)
        call.outputs.append((result, value_axes(name, args, result, operands[0] is weights)))
        self.calls.append(call)

    def _output(self, call: Call, result: Tensor, axes: tuple[int, ...]) -> None:
        call.outputs.append((result, axes))
        self._usage.watch(result)

    def _projection(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> tuple[WeightRows, int, tuple[int, ...]] | None:
        """Find the weight, feature axis and inner axes if the call is a projection by a parameter, else return None."""
        for weight, weight_axis, feature_axis, inner in weights_in(name, args, kwargs, out):
            source = self._parameters.find(weight, weight_axis)
            if source is not None and out.shape[feature_axis] == weight.shape[weight_axis]:
                return source, feature_axis, inner
        return None

    def _leaf(
        self,
        out: Tensor,
        source: WeightRows,
        feature_axis: int,
        inner: tuple[int, ...],
    ) -> Tensor:
        """Replace the output of a projection by a fresh leaf, where gradients end."""
        leaf = out.detach().clone()
        feature_axis %= out.ndim
        if leaf.is_nested:
            feature_axis -= 1  # gradients are read from the values of all samples, [tokens, features]
        else:
            # Zeros (a new adapter, a token that starts at zero) would zero the gradient of the other operand of q k^T.
            is_zero = ~leaf.any(feature_axis, keepdim=True)
            if is_zero.any():
                noise = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(leaf)
                leaf = torch.where(is_zero, noise, leaf)
        leaf.requires_grad_()
        self.leaves[id(leaf)] = Leaf(leaf, *source, feature_axis, inner)
        return leaf.clone()  # a clone, because models may write into projections in place

    def _propagate_tag(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Mark a result as attention weights if an argument is: follow dropout, casts, masks, slices and reshapes."""
        call = _tag(args, kwargs)
        for tensor in tensors_in([result]):
            if call is not None:
                tensor._attention_call = call  # type: ignore[attr-defined]
            elif any(
                hasattr(x, "_is_product") and x.shape == tensor.shape for x in tensors_in((*args, *kwargs.values()))
            ):
                tensor._is_product = True  # type: ignore[attr-defined]
        return result


def _is_attention_weights(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """Check whether `out`, a product with attention weights, still has the size of attention weights."""
    call = _tag(args, kwargs)
    if call is None or call.weights is None or out.ndim < 4:
        return False
    tagged = [x for x in tensors_in((*args, *kwargs.values())) if hasattr(x, "_attention_call")]
    return {x.numel() for x in (*tagged, out)} == {call.weights.numel()}


def _with_random_values(argument: Any) -> Any:
    """Replace a parameter by random values of its shape; return anything else unchanged."""
    if not isinstance(argument, nn.Parameter):
        return argument
    return torch.randn(argument.shape, generator=torch.Generator().manual_seed(2), device="cpu").to(argument)


def undispatched(func: types.FunctionType) -> Callable[..., Any]:
    """Copy `func` without its check for overrides, so that it runs here and its inner calls are still recorded."""
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _tag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    for tensor in tensors_in((*args, *kwargs.values())):
        call: Call | None = getattr(tensor, "_attention_call", None)
        if call is not None:
            return call
    return None
