"""Look up the current parameters and gradients of head slices, the only Python loop of a fused step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from repulsive.heads.layout import HeadSlice


class ParameterLookup:
    """The distinct parameters of some slices, in order of first appearance.

    Attributes:
        parts: the first slice of each parameter.
    """

    def __init__(self, parts: Iterable[HeadSlice]) -> None:
        first: dict[tuple[int, str], HeadSlice] = {}
        for part in parts:
            first.setdefault((id(part.module), part.attribute), part)
        self.parts = list(first.values())
        self._index = {key: index for index, key in enumerate(first)}
        self._slots = [(part.module, part.attribute) for part in self.parts]

    def index_of(self, part: HeadSlice) -> int:
        """Return the index of the parameter that contains a slice."""
        return self._index[id(part.module), part.attribute]

    def current(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the parameters and their gradients as they are now.

        They are looked up by name each time: wrappers replace parameters, and every backward pass replaces gradients.

        Raises:
            UnsupportedWeights: a module no longer has a tensor of that name.
        """
        try:  # reading `_parameters` takes a fifth of the time of an attribute access
            parameters: list[Tensor] = [module._parameters[name] for module, name in self._slots]  # type: ignore[misc]
            return parameters, [parameter.grad for parameter in parameters]
        except (KeyError, AttributeError):
            parameters = [part.parameter() for part in self.parts]
            return parameters, [parameter.grad for parameter in parameters]

    def all_have_gradients(self) -> bool:
        """Check whether all parameters have gradients, and none of them is frozen."""
        for module, name in self._slots:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.grad is None or not parameter.requires_grad:
                return False
        return True


def are_same(tensors: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Check whether two lists of lists hold the same tensor objects.

    `==` on lists compares items by identity first, without reading the tensors. That matters here: after a backward
    pass hundreds of tensors are not in the CPU cache.
    """
    try:
        return tensors == others
    except Exception:  # different tensors, whose values were then compared
        return False
