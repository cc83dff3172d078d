"""Intercept products of activations with weights that are bare parameters [heads, features, ...]."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from repulsive.heads.products.reshaped_weights import elements_of, note_reshape, parameter_of, shape_key

_MATMUL = ("matmul", "__matmul__", "mm", "bmm")
_MULTIPLY = ("mul", "multiply", "__mul__")

# Axes and order of the heads in forms of a weight: all numbers of a weight are looked at once for each shape.
_ORDERS: dict[tuple[object, ...], tuple[list[int], Tensor | None]] = {}

Labels = tuple[Hashable, ...]  # one label for each axis of a tensor; axes of the same label belong together


@dataclass(frozen=True, eq=False)
class WeightProduct:
    """A product of a weight with another tensor.

    Args:
        parameter: the weight.
        weight: the form of the parameter that the product uses.
        others: the other operands, several for an einsum.
        weight_labels: a label for each axis of `weight`.
        others_labels: a label for each axis of each of `others`.
        out_labels: a label for each axis of the result.
        has_bias: whether the call also adds a bias.
    """

    parameter: Tensor
    weight: Tensor
    others: tuple[Tensor, ...]
    weight_labels: Labels
    others_labels: tuple[Labels, ...]
    out_labels: Labels
    has_bias: bool = False

    @cached_property
    def other(self) -> Tensor:
        """The product of all other operands; computed when first needed."""
        if len(self.others) == 1:
            return self.others[0]
        terms = ",".join("".join(map(str, labels)) for labels in self.others_labels)
        product: Tensor = torch.einsum(f"{terms}->{''.join(map(str, self.other_labels))}", *self.others)
        return product

    @cached_property
    def other_labels(self) -> Labels:
        """A label for each axis of `other`."""
        if len(self.others) == 1:
            return self.others_labels[0]
        needed = {*self.out_labels, *self.weight_labels}
        return tuple(dict.fromkeys(label for labels in self.others_labels for label in labels if label in needed))

    def heads_in(self, axis: int) -> Tensor | None:
        """Arrange the other operand as head outputs [..., M, d]; None if it does not hold them.

        Args:
            axis: the parameter's axis that counts heads; the next axis counts the features of a head.
        """
        return self._arrange(self.other, self.other_labels, axis, axis + 1)

    def with_heads(self, axis: int, heads: Tensor) -> Tensor:
        """Arrange head outputs [..., M, d] as the other operand: the inverse of `heads_in`."""
        labels, order = self._order(axis, axis + 1)
        sizes = {label: self.other.shape[i] for i, label in enumerate(self.other_labels)}
        flat = heads.flatten(-2)
        flat = flat if order is None else flat[..., order.to(heads.device)]
        shaped = flat.unflatten(-1, [sizes[label] for label in labels])
        arranged = (*(label for label in self.other_labels if label not in labels), *labels)
        permuted: Tensor = shaped.permute([arranged.index(label) for label in self.other_labels])
        return permuted

    def heads_out(self, result: Tensor, axis: int, features: int) -> Tensor | None:
        """Arrange the result of the product as projected tokens [..., M, d]; None if it does not hold them.

        Args:
            result: the result.
            axis: the parameter's axis that counts heads.
            features: the parameter's axis that counts the features of a head.
        """
        return self._arrange(result, self.out_labels, axis, features)

    def tokens_in(self, axis: int, features: int) -> Tensor | None:
        """Arrange the other operand as tokens [..., D], with their axes in the order of `heads_out`.

        Returns:
            None if it does not hold tokens, or if each head has tokens of its own.
        """
        labels, _ = self._order(axis, features)
        inputs = [label for label in self.weight_labels if label not in labels]
        if len(inputs) != 1 or inputs[0] not in self.other_labels or any(x in self.other_labels for x in labels):
            return None
        return self.other.movedim(self.other_labels.index(inputs[0]), -1)

    def _arrange(self, tensor: Tensor, tensor_labels: Labels, axis: int, features: int) -> Tensor | None:
        labels, order = self._order(axis, features)
        sizes = dict(zip(self.weight_labels, self.weight.shape, strict=True))
        for label in labels:
            if label not in tensor_labels or tensor.shape[tensor_labels.index(label)] != sizes[label]:
                return None
        others = [i for i, label in enumerate(tensor_labels) if label not in labels]
        if set(tensor_labels) - set(labels) <= set(self.other_labels):  # tokens in the order of the other operand
            others.sort(key=lambda i: self.other_labels.index(tensor_labels[i]))
        arranged = tensor.permute(*others, *(tensor_labels.index(label) for label in labels))
        flat = arranged.flatten(len(others))
        heads, width = self.parameter.shape[axis], self.parameter.shape[features]
        if flat.shape[-1] != heads * width:
            return None
        flat = flat if order is None else flat[..., order.argsort().to(flat.device)]
        by_head: Tensor = flat.unflatten(-1, (heads, width))
        return by_head

    def _order(self, axis: int, features: int) -> tuple[Labels, Tensor | None]:
        """Find the labels of the axes that count heads or features, and the number of the feature at each place.

        Returns:
            The labels, and for each place along their axes (flattened) the number i d + j of feature j of head i; None
            if the numbers are 0, 1, 2, ...
        """
        key = (tuple(self.parameter.shape), shape_key(self.weight), axis, features)
        if key not in _ORDERS:
            places = torch.unravel_index(elements_of(self.weight), self.parameter.shape)
            numbers = places[axis] * self.parameter.shape[features] + places[features]
            varies = [numbers.shape[i] > 1 and bool((numbers.diff(dim=i) != 0).any()) for i in range(numbers.ndim)]
            first = numbers[tuple(slice(None) if each else 0 for each in varies)].flatten()
            is_ordered = torch.equal(first, torch.arange(len(first), device="cpu"))
            _ORDERS[key] = [i for i, each in enumerate(varies) if each], None if is_ordered else first
        axes, order = _ORDERS[key]
        return tuple(self.weight_labels[i] for i in axes), order


# Called with a product before it is computed; returns the new other operand, or None for no change.
Before = Callable[[WeightProduct], Tensor | None]
# Called with a product and its result.
After = Callable[[WeightProduct, Tensor], None]


class WeightProducts(TorchFunctionMode):
    """Torch function mode that intercepts products of a module's own parameters, while `is_active`.

    Args:
        module: the module that owns the parameters.
        before: parameter name -> what to do before a product with it.
        after: parameter name -> what to do after a product with it.
    """

    def __init__(self, module: nn.Module, before: Mapping[str, Before], after: Mapping[str, After]) -> None:
        super().__init__()
        self.module, self._before, self._after = module, before, after
        self.is_active = True

    def start(self) -> None:
        """Intercept products from now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Undo the last `start`."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_active:
            return func(*args, **kwargs)
        name, product = _product(getattr(func, "__name__", ""), args, kwargs, self._name_of)
        new = self._before[name](product) if product is not None and name in self._before else None
        if product is not None and new is not None:
            if len(product.others) == 1:
                args, kwargs = _replaced(args, product.other, new), _replaced(kwargs, product.other, new)
            else:  # all operands but the weight are multiplied already
                func, args, kwargs = torch.einsum, (_equation(product), new, product.weight), {}
        result = func(*args, **kwargs)
        note_reshape(func, args, kwargs, result)
        if product is not None and name in self._after:
            self._after[name](product, result)
        return result

    def _name_of(self, tensor: Tensor) -> str:
        """Return the name of a watched parameter; "" for any other tensor. Wrappers may replace parameters."""
        names = (*self._before, *self._after)
        return next((name for name in names if self.module._parameters.get(name) is tensor), "")


def intercept_products(
    stack: ExitStack,
    module: nn.Module,
    before: Mapping[str, Before] | None = None,
    after: Mapping[str, After] | None = None,
) -> None:
    """Intercept products of a module's own parameters whenever the module runs, until the stack closes.

    Args:
        stack: removes the hooks when it closes.
        module: the module that owns the parameters and multiplies with them.
        before: parameter name -> what to do before a product with it.
        after: parameter name -> what to do after a product with it.
    """
    running: list[WeightProducts] = []

    def enter(_module: nn.Module, _args: object) -> None:
        mode = WeightProducts(module, before or {}, after or {})
        mode.start()
        running.append(mode)

    def leave(*_: object) -> None:
        if running:
            running.pop().stop()

    def leave_all() -> None:  # an interrupt does not call forward hooks
        while running:
            leave()

    stack.callback(leave_all)
    stack.callback(module.register_forward_pre_hook(enter).remove)
    # First among the hooks, so that nested contexts leave in the opposite order; also after an exception.
    stack.callback(module.register_forward_hook(leave, prepend=True, always_call=True).remove)


def _product(
    function: str, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: Callable[[Tensor], str]
) -> tuple[str, WeightProduct | None]:
    """Recognise a product with a watched parameter: its name and the product; "" and None for any other call."""
    if not (function in ("linear", "addmm", "einsum") or function in _MATMUL or function in _MULTIPLY):
        return "", None
    operands = _operands(function, args, kwargs)
    names = ["" if (p := parameter_of(tensor)) is None else name_of(p) for tensor in operands]
    labelled = _labels(function, args, operands) if any(names) else None
    if labelled is None:
        return "", None
    labels, out = labelled
    i = next(j for j, name in enumerate(names) if name)
    parameter = parameter_of(operands[i])
    assert parameter is not None
    bias = args[2] if function == "linear" and len(args) > 2 else kwargs.get("bias")
    has_bias = function == "addmm" or (function == "linear" and bias is not None)
    others = tuple(operand for j, operand in enumerate(operands) if j != i)
    others_labels = tuple(own for j, own in enumerate(labels) if j != i)
    return names[i], WeightProduct(parameter, operands[i], others, labels[i], others_labels, out, has_bias)


def _operands(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """List the tensors that a call multiplies."""
    values = [*args, *(value for key, value in kwargs.items() if key not in ("bias", "out"))]
    if function == "einsum":
        values = list(values[1]) if len(values) == 2 and isinstance(values[1], list | tuple) else values[1:]
    elif function == "addmm":
        values = values[1:3]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return tensors if function == "einsum" else tensors[:2]


def _labels(function: str, args: tuple[Any, ...], operands: Sequence[Tensor]) -> tuple[list[Labels], Labels] | None:
    """Label the axes of all operands and of the result; None if the call is not understood."""
    if function == "einsum":
        equation = args[0].replace(" ", "") if isinstance(args[0], str) else ""
        if "->" not in equation or "." in equation:
            return None
        inputs, out = equation.split("->")
        terms: list[Labels] = [tuple(term) for term in inputs.split(",")]
        is_complete = [len(term) for term in terms] == [tensor.ndim for tensor in operands]
        return (terms, tuple(out)) if is_complete and all(len(set(term)) == len(term) for term in terms) else None
    if len(operands) != 2:
        return None
    left, right = (tensor.ndim for tensor in operands)
    if function == "linear":
        batch = tuple(range(left - 1))
        return [(*batch, "in"), ("out", "in")], (*batch, "out")
    size = max(left, right)
    if function in _MULTIPLY:
        return [tuple(range(size - n, size)) for n in (left, right)], tuple(range(size))
    if min(left, right) < 2:
        return None
    first, second = (tuple(range(size - n, size - 2)) for n in (left, right))
    return [(*first, "row", "sum"), (*second, "sum", "column")], (*range(size - 2), "row", "column")


def _equation(product: WeightProduct) -> str:
    other, weight, out = (
        "".join(map(str, labels)) for labels in (product.other_labels, product.weight_labels, product.out_labels)
    )
    return f"{other},{weight}->{out}"


def _replaced(values: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(values, dict):
        return {key: _replaced(value, old, new) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_replaced(value, old, new) for value in values)
    return new if values is old else values
