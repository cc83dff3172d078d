"""Split nested states into tensors (for safetensors) and JSON, and join both again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from repulsive.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into tensors, keyed by path, and a JSON skeleton that refers to these tensors.

    Args:
        tree: dictionaries, lists, tuples, tensors, numbers, strings, None.

    Raises:
        CheckpointError: the tree holds a value of another type.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node.detach().cpu().contiguous().clone()  # safetensors refuses shared memory
            return {_TENSOR: path}
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node) and not any(key.startswith("__") for key in node):
                return {key: walk(value, f"{path}.{key}") for key, value in node.items()}
            items = enumerate(node.items())
            return {_ITEMS: [[walk(key, f"{path}.k{i}"), walk(value, f"{path}.{i}")] for i, (key, value) in items]}
        if isinstance(node, tuple):
            return {_TUPLE: [walk(value, f"{path}.{i}") for i, value in enumerate(node)]}
        if isinstance(node, list):
            return [walk(value, f"{path}.{i}") for i, value in enumerate(node)]
        if node is None or isinstance(node, str | bool | int | float):
            return node
        raise CheckpointError(f"state{path}: {type(node).__name__} cannot be saved as a tensor or as JSON")

    return tensors, walk(tree, "")


def unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """Rebuild a nested state from the tensors and the skeleton that `pack` returned."""
    if isinstance(skeleton, list):
        return [unpack(tensors, value) for value in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if _TENSOR in skeleton:
        return tensors[skeleton[_TENSOR]]
    if _TUPLE in skeleton:
        return tuple(unpack(tensors, value) for value in skeleton[_TUPLE])
    if _ITEMS in skeleton:
        return {unpack(tensors, key): unpack(tensors, value) for key, value in skeleton[_ITEMS]}
    return {key: unpack(tensors, value) for key, value in skeleton.items()}
