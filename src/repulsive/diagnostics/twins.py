"""Untrained twins: the same architecture with fresh random weights, as the null of a score.

Random heads of few dimensions or on few tokens are alike by chance, so that a score says little without its value for
heads that never learned anything.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from repulsive.errors import NoTwin
from repulsive.heads.module_paths import unwrap

_SEED_OFFSET = 1 << 20  # models are made with small seeds; a twin with the same seed would be the model itself
_RESETS = ("reset_parameters", "_reset_parameters")  # the second is that of torch's own Transformer


def untrained_twin(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same model with fresh random weights, on the same device.

    A model with a `config` is built again by its class, as those of transformers are. Any other is copied, and every
    module's `reset_parameters` draws its weights again. The global random state stays as it is.

    Args:
        model: any module; it stays as it is.
        seed: of the fresh weights.

    Raises:
        NoTwin: the configuration does not describe the model's weights, and a module cannot be reset.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> twin = untrained_twin(model)
        >>> twin[0].weight.shape == model[0].weight.shape, torch.equal(twin[0].weight, model[0].weight)
        (True, False)
    """
    inner = unwrap(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED_OFFSET + seed)
        twin = _from_config(inner)
        if twin is None:
            twin = _reset_copy(inner)
    return _match_placement(inner, twin).eval()


def _from_config(model: nn.Module) -> nn.Module | None:
    """A new model from the configuration; None where there is none, or where its weights have other shapes."""
    config = getattr(model, "config", None)
    if config is None or isinstance(config, nn.Module):
        return None
    config = deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        return None
    try:
        twin = type(model)(config)
    except Exception:  # the constructor is foreign code and may want anything
        return None
    return twin if _shapes(twin) == _shapes(model) else None


def _match_placement(model: nn.Module, twin: nn.Module) -> nn.Module:
    """Give every weight and buffer the device and dtype of its namesake."""
    theirs = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name in theirs:
            tensor.data = tensor.data.to(theirs[name].device, theirs[name].dtype)
    return twin


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _reset_copy(model: nn.Module) -> nn.Module:
    without_reset = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and _reset_of(module) is None
    ]
    if without_reset:
        raise NoTwin(
            f"no untrained twin: {type(model).__name__} is not built by its config alone, and "
            f"{without_reset[0]} has no reset_parameters"
        )
    twin = deepcopy(model).cpu()
    for module in reversed(list(twin.modules())):  # children first: a parent may set their weights in its own way
        reset = _reset_of(module)
        if reset is not None:
            with torch.no_grad():
                getattr(module, reset)()
    return twin


def _reset_of(module: nn.Module) -> str | None:
    return next((name for name in _RESETS if callable(getattr(module, name, None))), None)
