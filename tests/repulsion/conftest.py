"""Small real models and one plain training step, shared by the tests of this folder."""

from collections.abc import Callable

import pytest
import torch
from torch import nn


class Encoder(nn.Module):
    """Two attention layers and an output layer, in float64 so that comparisons can be exact."""

    def __init__(self, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, heads, 32, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.stack(x).mean(1))


@pytest.fixture
def make_model() -> Callable[..., Encoder]:
    def make(seed: int = 0, dtype: torch.dtype = torch.float64, **options: int) -> Encoder:
        torch.manual_seed(seed)
        model = Encoder(**options).to(dtype)
        for parameter in model.parameters():  # nn.TransformerEncoder copies one layer: heads of all layers are equal
            nn.init.normal_(parameter, std=0.3)
        return model

    return make


@pytest.fixture
def backward() -> Callable[..., torch.Tensor]:
    """Compute a loss and its gradients on a batch that depends only on `index`."""

    def run(model: nn.Module, index: int = 0, scale: float = 1.0, zero: bool = True) -> torch.Tensor:
        source = torch.Generator().manual_seed(100 + index)
        dtype = next(model.parameters()).dtype
        x = torch.randn(6, 5, 16, generator=source, dtype=torch.float64).to(dtype)
        y = torch.randint(3, (6,), generator=source)
        if zero:
            model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * scale
        loss.backward()
        return loss

    return run


@pytest.fixture
def plain_step(backward: Callable[..., torch.Tensor]) -> Callable[..., None]:
    """Take one training step without closures, scaling or clipping."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
        backward(model, index)
        optimizer.step()

    return step
