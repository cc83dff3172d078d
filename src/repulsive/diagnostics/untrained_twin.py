"""Build untrained twins: the architecture of a model with new random weights.

Random heads with few dimensions or on few tokens are similar by chance. A similarity score is therefore compared with
its value in untrained twins.
"""

from __future__ import annotations

import inspect
from copy import deepcopy

import torch
from torch import nn

from repulsive.errors import NoTwin
from repulsive.heads.module_paths import unwrap

_SEED_OFFSET = 1 << 20  # with the seed of the model itself, the twin would equal the initial model
_RESETS = ("reset_parameters", "_reset_parameters")  # torch.nn.Transformer has the second name
_INIT = "init_weights"  # of whole models, as in timm
# Settings of a `cfg` of TransformerLens for a twin: draw new weights, and load no tokenizer.
_LENS = {"seed": None, "init_weights": True, "tokenizer_name": None}


def untrained_twin(model: nn.Module, seed: int = 0) -> nn.Module:
    """Build the same model with new random weights, on the same device.

    A model with a `config` of transformers, or a `cfg` of TransformerLens, is built by its class. Any other model is
    copied, and `reset_parameters` and then `init_weights` of every module that has them draw new weights, as in the
    models of torch and timm. The global random state does not change.

    Args:
        model: any module; it does not change.
        seed: random seed of the new weights.

    Raises:
        NoTwin: the model cannot be built from its config, and a module cannot be reset.

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
    """Build a model from the config of `model`; None if there is no config, or if the parameters have other shapes."""
    config = getattr(model, "config", None)
    cfg = getattr(model, "cfg", None)
    if config is None and all(hasattr(cfg, name) for name in _LENS):
        config = deepcopy(cfg)
        for name, value in _LENS.items():
            setattr(config, name, value)
    if config is None or isinstance(config, nn.Module):
        return None
    config = deepcopy(config)
    if getattr(config, "quantization_config", None) is not None:
        return None
    try:
        twin = type(model)(config)
    except Exception:  # third-party constructor: may need other arguments
        return None
    for name, _ in list(twin.named_children()):
        if getattr(model, name, twin) is None:  # the model was loaded without this part, such as a pooler
            setattr(twin, name, None)
    return twin if _shapes(twin) == _shapes(model) else None


def _match_placement(model: nn.Module, twin: nn.Module) -> nn.Module:
    """Move every parameter and buffer of the twin to the device and dtype of its counterpart in the model."""
    originals = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
        if name in originals:
            tensor.data = tensor.data.to(originals[name].device, originals[name].dtype)
    return twin


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _reset_copy(model: nn.Module) -> nn.Module:
    without_reset = [
        _title(name, module)
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not _resets(module)
    ]
    if without_reset:
        raise NoTwin(
            f"cannot build an untrained twin: {type(model).__name__} cannot be built from its config, and "
            f"{without_reset[0]} has no method reset_parameters() that draws new weights; add one to the class"
        )
    twin = deepcopy(model).cpu()
    for module in reversed(list(twin.modules())):  # children first: a parent may initialise their weights differently
        for reset in _resets(module):
            with torch.no_grad():
                getattr(module, reset)()
    for (name, original), module in zip(model.named_modules(), twin.modules(), strict=True):
        if _resets(module) == [_INIT] and _equal_parameters(original, module):
            raise NoTwin(
                f"cannot build an untrained twin: {_INIT} of {_title(name, module)} draws no new weights; add a method "
                "reset_parameters() to the class that does"
            )
    return twin


def _title(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _equal_parameters(first: nn.Module, second: nn.Module) -> bool:
    """Check whether two modules own parameters and all of these are equal."""
    pairs = list(zip(first.parameters(recurse=False), second.parameters(recurse=False), strict=True))
    return bool(pairs) and all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in pairs)


def _resets(module: nn.Module) -> list[str]:
    """List the methods that draw new weights for a module, in the order to call them."""
    methods = [name for name in _RESETS if callable(getattr(module, name, None))][:1]
    try:
        inspect.signature(getattr(module, _INIT)).bind()
    except (AttributeError, TypeError, ValueError):  # there is none, or it needs arguments
        return methods
    return [*methods, _INIT]
