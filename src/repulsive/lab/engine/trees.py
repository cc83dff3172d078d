"""Nested states as tensors and JSON apart, and together again: what safetensors and JSON can each hold."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import CheckpointError

_TENSOR, _TUPLE, _ITEMS = "__tensor__", "__tuple__", "__items__"


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Tensors by path, and the rest as JSON with a mark where each tensor was.

    Args:
        tree: dictionaries, lists, tuples, tensors, numbers, strings, None.

    Raises:
        CheckpointError: something else is in the tree.
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            tensors[path] = node.detach().cpu().contiguous().clone()  # safetensors takes no shared memory
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
        raise CheckpointError(f"state{path}: {type(node).__name__} can be kept neither as a tensor nor as JSON")

    return tensors, walk(tree, "")


def unpack(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """The tree that `pack` took apart."""
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


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what an optimiser was given for its running means where a step would not take it.

    Raises:
        ValueError: of another shape than its parameter, and no single number.
    """
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.shape != parameter.shape and moment.ndim:
                raise ValueError(f"{name} {list(moment.shape)} of a parameter {list(parameter.shape)}")


def check_weights(weights: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not those of the model.

    Raises:
        ValueError: of other names or shapes.
    """
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in model.items()}:
        raise ValueError("the best weights are not those of the model")


def seed_everything(seed: int) -> None:
    """Seed torch's generators, and Python's and NumPy's, which tasks of others may draw from."""
    import random

    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(seed % 2**32)


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def random_state() -> dict[str, Any]:
    """The state of every generator a training draws from: Python's, NumPy's, torch's, each GPU's."""
    import random

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := _numpy()) is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where `random_state` was taken."""
    import random

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := _numpy()) is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):  # there may have been more then
            torch.cuda.set_rng_state(saved, device)
