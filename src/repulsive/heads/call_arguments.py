"""Convert example inputs to the arguments of a model's `forward`."""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def call_arguments(model: nn.Module, inputs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a tensor, a tuple of arguments or a mapping of keyword arguments.

    If `forward` has one required argument whose name is not in the mapping, the mapping itself is that argument, as in
    sentence-transformers. Dictionaries are copied (not their tensors), since such a model may write results into them.

    Example:
        >>> call_arguments(nn.Identity(), (1, 2))
        ((1, 2), {})
        >>> call_arguments(nn.Identity(), {"input": 1})
        ((), {'input': 1})
        >>> call_arguments(nn.Identity(), {"ids": 1})
        (({'ids': 1},), {})
    """
    if isinstance(inputs, Mapping):
        if _takes_mapping(model, inputs):
            return (_copied(inputs),), {}
        return (), {str(name): _copied(value) for name, value in inputs.items()}
    return (tuple(map(_copied, inputs)), {}) if isinstance(inputs, list | tuple) else ((inputs,), {})


def named_inputs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a module's call by name; positional arguments without a name are left out.

    Example:
        >>> named_inputs(nn.Identity(), (1, 2), {})
        {'input': 1}
    """
    parameters = inspect.signature(type(module).forward).parameters.values()
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names[1:], args, strict=False)) | dict(kwargs)  # without self


def _takes_mapping(model: nn.Module, inputs: Mapping[Any, Any]) -> bool:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return False
    names = {str(name) for name in inputs}
    if names <= set(parameters):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [name for name, one in parameters.items() if one.kind in kinds and one.default is one.empty]
    return len(required) == 1 and required[0] not in names


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | UserDict) else value
