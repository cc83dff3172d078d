"""Models for tests of logits and OV circuits, and the cosines of a loop over token pairs."""

import pytest
import torch
from torch import nn

from tests.heads.zoo import ids

transformers = pytest.importorskip("transformers")

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
TEXT = {"input_ids": ids(), "attention_mask": MASK}


def shaken(model: nn.Module) -> nn.Module:
    """Random float64 parameters, including biases and norms, so that each has an effect."""
    generator = torch.Generator().manual_seed(3)
    model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model
