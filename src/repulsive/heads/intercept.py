"""Watch a forward pass: cut it at projections, hold norms constant, note what enters and leaves attention.

Gradients then run from a head to the nearest projection and no further, whatever the model does around it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_MATMUL = ("matmul", "__matmul__", "bmm", "mm", "baddbmm")
_CONV = ("conv1d", "conv2d", "conv3d")
_STATISTICS = ("mean", "var", "std", "norm", "rsqrt", "vector_norm")
_DESCEND = ("multi_head_attention_forward", "normalize")  # Python functions whose inner calls must be seen


@dataclass(frozen=True, eq=False)
class Leaf:
    """The output of one projection, where gradients end.

    Args:
        tensor: the output, a leaf that requires grad.
        parameter: the projection's weight.
        name: the weight's dotted name.
        axis: the weight's dimension that counts output features.
        rows: int64 [features], the weight's row behind each output feature.
        feature_axis: the output's dimension that counts features.
    """

    tensor: Tensor
    parameter: nn.Parameter
    name: str
    axis: int
    rows: Tensor
    feature_axis: int


@dataclass(eq=False)
class Call:
    """One attention call.

    Args:
        owner: dotted name of the module that made it.
        operands: q, k and v where the call names them (scaled dot-product attention).
        scores: what entered the softmax, where it does not; `dim` is the softmax's axis, `attended` [..] how many
            entries of each row have weight.
        outputs: (what left the heads, its axes that may count heads).
    """

    owner: str
    operands: dict[str, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None
    dim: int = -1
    attended: Tensor | None = None
    outputs: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    graph: bool = False


class Hold(torch.autograd.Function):
    """Identity forward, no gradient backward. The node stays in the graph so that a walk can see what was held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        ctx.width = width
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def hold(x: Tensor, width: int) -> Tensor:
    """`x` as a constant; `width` is how many features it was computed from."""
    held: Tensor = Hold.apply(x, width)  # type: ignore[no-untyped-call]
    return held


class Intercept(TorchFunctionMode):
    """Records projections and attention calls while active.

    Args:
        parameters: (dotted name, parameter) pairs of the model.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self.leaves: dict[int, Leaf] = {}
        self.calls: list[Call] = []
        self.modules: list[str] = []  # the modules being run, outermost first
        self._storages: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            self._storages.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DESCEND and isinstance(func, types.FunctionType):
            inner = _undispatched(func)
            with self:
                return inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if name == "softmax":
            return self._softmax(func, args, kwargs)
        if name == "scaled_dot_product_attention":
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            self.calls.append(Call(self._owner(), {part[0]: given[part] for part in names}))
            return func(*args, **kwargs)
        if name in ("layer_norm", "rms_norm"):
            return _norm(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return self._pass_tag(args, kwargs, result)
        if name in _STATISTICS:
            return _held(name, args, kwargs, result)
        cut = self._cut(name, args, kwargs, result)
        if cut is not None:
            return self._pass_tag(args, kwargs, cut)
        if name in _MATMUL or name == "einsum":
            call = _tag(args, kwargs)
            if call is not None:
                call.outputs.append((result, _head_axes(name, args, result)))
                return result
        return self._pass_tag(args, kwargs, result)

    def graph_output(self, output: Tensor) -> None:
        """Note what leaves the heads of a graph convolution, [nodes, heads, channels]."""
        axes = tuple(range(output.ndim - 1))
        self.calls.append(Call(self._owner(), outputs=[(output, axes)], graph=True))

    def _owner(self) -> str:
        return self.modules[-1] if self.modules else ""

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        scores = args[0] if args else kwargs["input"]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        out: Tensor = func(*args, **kwargs)
        if dim is None or not scores.requires_grad:
            return out
        dim %= scores.ndim
        out = out.detach()
        call = Call(self._owner(), scores=scores, dim=dim, attended=(out > 0).sum(dim))
        self.calls.append(call)
        out._attention_call = call  # type: ignore[attr-defined]
        return out

    def _cut(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """The output as a fresh leaf if this is a projection by a parameter, else None."""
        found = _weight(name, args, kwargs, out)
        if found is None:
            return None
        weight, weight_axis, feature_axis = found
        source = self._locate(weight, weight_axis)
        if source is None or out.shape[feature_axis] != weight.shape[weight_axis]:
            return None
        leaf = out.detach().clone()
        if not leaf.any():  # a zero-initialised adapter would hide its partner in the dot product
            leaf += torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0)).to(leaf)
        leaf.requires_grad_()
        self.leaves[id(leaf)] = Leaf(leaf, *source, feature_axis % out.ndim)
        return leaf.clone()  # models write into projections in place, which a leaf forbids

    def _locate(self, weight: Tensor, axis: int) -> tuple[nn.Parameter, str, int, Tensor] | None:
        """Which rows of which parameter `weight`, possibly a view of it, counts along `axis`."""
        for name, parameter in self._storages.get(weight.untyped_storage().data_ptr(), ()):
            stride, size = weight.stride(axis), weight.shape[axis]
            axes = [a for a in range(parameter.ndim) if parameter.stride(a) == stride and parameter.shape[a] >= size]
            if axes:
                along = max(axes, key=lambda a: parameter.shape[a])
                start = (weight.storage_offset() - parameter.storage_offset()) // max(stride, 1)
                start %= parameter.shape[along]
                if start + size <= parameter.shape[along]:
                    return parameter, name, along, torch.arange(start, start + size)
        return None

    def _pass_tag(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Attention weights stay known through dropout, casts, masks, slices and reshapes."""
        call = _tag(args, kwargs)
        if call is not None:
            for tensor in _tensors([result]):
                tensor._attention_call = call  # type: ignore[attr-defined]
        return result


def _weight(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> tuple[Tensor, int, int] | None:
    """(weight, its axis of output features, the output's) of a call that may be a projection."""
    if name == "linear":
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        return weight, 0, -1
    if name == "addmm":
        return args[2], 1, -1
    if name in _CONV:
        x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        channels = out.ndim - (weight.ndim - 2) - 1
        # a depthwise convolution keeps every feature apart: look through it
        return None if groups > 1 and groups == x.shape[channels] else (weight, 0, channels)
    if name in _MATMUL and name != "baddbmm" and len(args) == 2:
        left, right = args
        if isinstance(right, Tensor) and right.ndim == 2:
            return right, 1, -1
        if isinstance(left, Tensor) and left.ndim == 2 and out.ndim >= 2:
            return left, 0, -2
    if name == "einsum" and isinstance(args[0], str) and "." not in args[0] and len(list(_tensors(args))) == 2:
        inputs, _, output = args[0].replace(" ", "").partition("->")
        letters = inputs.split(",")
        for i, tensor in enumerate(_tensors(args)):
            own = [x for x in letters[i] if x in output and x not in letters[1 - i]]
            if own and set(letters[i]) - set(output):
                return tensor, letters[i].index(own[0]), output.index(own[0])
    return None


def _head_axes(name: str, args: tuple[Any, ...], out: Tensor) -> tuple[int, ...]:
    """Axes of attention x values that may count heads: all but the one that counts the values' features."""
    operands = list(_tensors(args))
    tagged = next(i for i, x in enumerate(operands) if hasattr(x, "_attention_call"))
    if name == "einsum" and isinstance(args[0], str) and "." not in args[0] and "->" in args[0]:
        inputs, output = args[0].replace(" ", "").split("->")
        return tuple(i for i, letter in enumerate(output) if letter in inputs.split(",")[tagged])
    features = out.ndim - 1 if tagged < len(operands) - 1 else out.ndim - 2
    return tuple(i for i in range(out.ndim) if i != features)


def _norm(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """layer_norm or rms_norm with its statistics held constant."""
    names = ("input", "normalized_shape", "weight", "bias", "eps") if name == "layer_norm" else (
        "input", "normalized_shape", "weight", "eps")  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    x: Tensor = given["input"]
    result: Tensor = func(*args, **kwargs)
    if not x.requires_grad:
        return result
    shape = given["normalized_shape"]
    axes = tuple(range(x.ndim - (1 if isinstance(shape, int) else len(shape)), x.ndim))
    width = int(x.shape[-1])
    centred = x - hold(x.mean(axes, keepdim=True), width) if name == "layer_norm" else x
    eps = given.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scaled = centred * hold((centred.square().mean(axes, keepdim=True) + eps).rsqrt(), width)
    if given.get("weight") is not None:
        scaled = scaled * given["weight"]
    if given.get("bias") is not None:
        scaled = scaled + given["bias"]
    return scaled.to(result.dtype)


def _held(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor:
    """Statistics over the last axis, as hand-written norms compute them, are constants; pooling over tokens is not."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not result.requires_grad:
        return result
    last = result.ndim == x.ndim and result.shape[-1] == 1 and result.shape[:-1] == x.shape[:-1]
    return hold(result, int(x.shape[-1])) if last or name == "rsqrt" else result


def _undispatched(func: types.FunctionType) -> Callable[..., Any]:
    """`func` without its own check for overrides, so that it runs here while its inner calls are still seen."""
    never = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False
    )
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _tag(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    for tensor in _tensors((*args, *kwargs.values())):
        call: Call | None = getattr(tensor, "_attention_call", None)
        if call is not None:
            return call
    return None
