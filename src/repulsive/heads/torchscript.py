"""Refuse TorchScript models, whose attention classes and functions are not visible."""

from __future__ import annotations

import torch
from torch import nn

from repulsive.errors import NoHeadsFound


def refuse_torchscript(model: nn.Module) -> None:
    """Raise an error if a model is the result of `torch.jit.script`, `torch.jit.trace` or `torch.jit.load`.

    Raises:
        NoHeadsFound: it is.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise NoHeadsFound(
            f"{model.original_name} is a TorchScript model, in which attention cannot be found; pass the Python model "
            "that was scripted or traced (both share their weights), or load the weights into such a model"
        )
