"""Find the operand of a torch call that may be a projection's weight, and the axes that count features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MATMUL = ("matmul", "__matmul__", "bmm", "mm", "baddbmm")
_CONV = ("conv1d", "conv2d", "conv3d")


def weights_in(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Iterator[tuple[Tensor, int, int, tuple[int, ...]]]:
    """Yield each operand that may be a projection's weight.

    Yields:
        The operand, its axis that counts output features, the feature axis of the result, and further axes of the
        result that come from the operand (if an einsum has separate axes for heads and features).
    """
    if name == "linear":
        yield args[1] if len(args) > 1 else kwargs["weight"], 0, -1, ()
    elif name == "addmm":
        yield args[2] if len(args) > 2 else kwargs["mat2"], 1, -1, ()
    elif name in _CONV:
        x = args[0] if args else kwargs["input"]
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        channels = out.ndim - (weight.ndim - 2) - 1
        if not (groups > 1 and groups == x.shape[channels]):  # depthwise: features stay separate, not a projection
            yield weight, 0, channels, ()
    elif name in MATMUL and name != "baddbmm":
        left, right, *_ = tensors_in((*args, *kwargs.values()))
        if right.ndim == 2:
            yield right, 1, -1, ()
        if left.ndim == 2 and out.ndim >= 2:
            yield left, 0, -2, ()
    elif name == "einsum" and _is_explicit_einsum(args) and args[0].count(",") == 1:
        inputs, output = args[0].replace(" ", "").split("->")
        for i, tensor in enumerate(tensors_in(args)):
            mine, other = inputs.split(",")[i], inputs.split(",")[1 - i]
            shared = [letter for letter in mine if letter in output and letter in other]  # each head has its own input
            made = [letter for letter in mine if letter in output and letter not in other]
            summed = [letter for letter in mine if letter in other and letter not in output]
            if made and summed and len(shared) < 2 and len(shared) + len(made) + len(summed) == len(mine):
                features = [*shared, *made]
                axes = [output.index(letter) for letter in features]
                yield tensor, mine.index(features[0]), axes[0], tuple(axes[1:])


def _is_explicit_einsum(args: tuple[Any, ...]) -> bool:
    """Check whether einsum arguments have an explicit output ("->") and no ellipsis."""
    return isinstance(args[0], str) and "." not in args[0] and "->" in args[0]


def several_factors(args: tuple[Any, ...]) -> tuple[str, list[tuple[str, Tensor]]] | None:
    """Split an einsum of more than two tensors: its output and (axes, tensor) pairs, parameters last; None if fewer."""
    if not _is_explicit_einsum(args) or args[0].count(",") < 2:
        return None
    inputs, output = args[0].replace(" ", "").split("->")
    factors = list(zip(inputs.split(","), tensors_in(args), strict=True))
    return output, sorted(factors, key=lambda factor: isinstance(factor[1], nn.Parameter))


def multiply_in_pairs(output: str, factors: list[tuple[str, Tensor]]) -> Tensor:
    """Compute an einsum two tensors at a time, so that each product can be recorded."""
    (axes, result), *rest = factors
    while rest:
        (other, tensor), *rest = rest
        needed = output if not rest else "".join([output, *(letters for letters, _ in rest)])
        kept = output if not rest else "".join(x for x in dict.fromkeys(axes + other) if x in needed)
        axes, result = kept, torch.einsum(f"{axes},{other}->{kept}", result, tensor)
    return result


def value_axes(name: str, args: tuple[Any, ...], out: Tensor, left: bool) -> tuple[int, ...]:
    """Find the axes that may count heads in the product of attention weights and values: all but the feature axis.

    Args:
        name: name of the torch function, a matrix product or einsum.
        args: the arguments of the call.
        out: the result of the call.
        left: whether the attention weights are the left operand.
    """
    if name == "einsum" and _is_explicit_einsum(args):
        inputs, output = args[0].replace(" ", "").split("->")
        return tuple(i for i, letter in enumerate(output) if letter in inputs.split(",")[0 if left else 1])
    features = out.ndim - 1 if left else out.ndim - 2
    return tuple(i for i in range(out.ndim) if i != features)


def summed_axis(name: str, args: tuple[Any, ...], operands: list[Tensor], weights: Tensor) -> int | None:
    """Find the axis of `weights`, an operand of a matrix product or einsum, that the product sums over.

    Returns:
        The axis, or None if there are several or none.
    """
    left = operands[0] is weights
    if name == "einsum":
        if not _is_explicit_einsum(args) or args[0].count(",") != 1:
            return None
        inputs, output = args[0].replace(" ", "").split("->")
        mine = inputs.split(",")[0 if left else 1]
        summed = [axis for axis, letter in enumerate(mine) if letter not in output]
        return summed[0] if len(summed) == 1 else None
    if name == "baddbmm" or min(operand.ndim for operand in operands) < 2:
        return None
    return weights.ndim - (1 if left else 2)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in a call's arguments, including tensors inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
