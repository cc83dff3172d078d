"""Search the autograd graph: for tensors that influence the result, and for products of two activations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from repulsive.heads.trace.projections import tensors_in

_PRODUCTS = ("Mm", "mm", "Mul", "Dot", "Mv", "Cdist", "PairwiseDistance")  # in names of autograd nodes


class UsedOutputs:
    """Tensors that are watched until a projection, an attention call or the model's result uses them.

    The trace cuts the autograd graph at every projection and softmax. Therefore, each of their inputs is searched for
    watched tensors before the cut. A tensor that only chooses indices, by argmax or sampling, stays unused.
    """

    def __init__(self) -> None:
        self._watched: dict[Any, Tensor] = {}  # autograd node -> tensor

    def watch(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            self._watched[tensor.grad_fn] = tensor

    def use(self, inputs: Iterable[Any]) -> None:
        """Stop watching the tensors that `inputs` are computed from."""
        if not self._watched:
            return
        todo: list[Any] = [tensor.grad_fn for tensor in tensors_in(inputs)]
        visited = set()
        while todo and self._watched:
            node = todo.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            self._watched.pop(node, None)
            todo += [following for following, _ in node.next_functions]

    def use_result(self, result: object) -> None:
        """Stop watching the tensors that the model's result is computed from; all, if the result cannot be searched."""
        leaves = tree_leaves(result)
        if all(leaf is None or isinstance(leaf, Tensor | bool | int | float | str) for leaf in leaves):
            self.use(leaves)
        else:
            self._watched.clear()

    def is_unused(self, tensor: Tensor) -> bool:
        """Check whether a watched tensor was never used."""
        return tensor.grad_fn in self._watched


def has_product_of_activations(tensor: Tensor, sources: Iterable[Tensor]) -> bool:
    """Check whether `tensor` contains a product, or a distance, of two tensors that both depend on `sources`."""
    ids = {id(source) for source in sources}
    depends: dict[Any, bool] = {}  # autograd node -> whether it depends on a source
    todo: list[Any] = [tensor.grad_fn]
    while todo:
        node = todo[-1]
        following = [other for other, _ in node.next_functions if other is not None] if node is not None else []
        if waiting := [other for other in following if other not in depends]:
            todo += waiting
            continue
        todo.pop()
        parts = [other for other in following if depends[other]]
        if len(parts) > 1 and any(word in type(node).__name__ for word in _PRODUCTS):
            return True
        depends[node] = bool(parts) or id(getattr(node, "variable", None)) in ids
    return False
