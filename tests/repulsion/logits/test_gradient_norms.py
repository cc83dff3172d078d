"""Gradient norms of layers against float64, for every way in which a layer keeps its heads."""

import pytest
import torch
from torch import nn

from repulsive.heads.layout import HeadSlice
from repulsive.repulsion.logits.gradient_norms import GradientNorms

HEADS, WIDTH, INPUTS = 3, 4, 12
ROWS = torch.arange(HEADS * WIDTH).view(HEADS, WIDTH)


def part(module: nn.Module, rows: torch.Tensor, axis: int = 0, attribute: str = "weight") -> HeadSlice:
    return HeadSlice(module, attribute, attribute, rows, axis)


def separate() -> list[HeadSlice]:
    """A weight and a bias for each of q and k."""
    modules = [nn.Linear(INPUTS, HEADS * WIDTH) for _ in "qk"]
    return [part(module, ROWS, attribute=name) for module in modules for name in ("weight", "bias")]


def transposed() -> list[HeadSlice]:
    """One weight [inputs, q, k and v], as in GPT-2."""
    module = nn.Linear(3 * HEADS * WIDTH, INPUTS)
    return [part(module, ROWS + index * HEADS * WIDTH, axis=1) for index in range(2)]


def interleaved() -> list[HeadSlice]:
    """One weight with q, k and v of each head, as in GPT-NeoX."""
    module = nn.Linear(INPUTS, 3 * HEADS * WIDTH)
    rows = torch.arange(3 * HEADS * WIDTH).view(HEADS, 3, WIDTH)
    return [part(module, rows[:, index]) for index in range(2)]


def uneven() -> list[HeadSlice]:
    """A projection of queries alone, in another order of heads."""
    return [part(nn.Linear(INPUTS, HEADS * WIDTH), ROWS.flip(0))]


LAYERS = {
    "separate": [separate, separate, separate],
    "transposed": [transposed, transposed, transposed],
    "interleaved": [interleaved, interleaved],
    "mixed": [separate, transposed, uneven, interleaved],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_norms_of_layers(kind, dtype):
    torch.manual_seed(0)
    layers = [make() for make in LAYERS[kind]]
    modules = {one.module for parts in layers for one in parts}
    norms = GradientNorms(layers)
    for missing in (False, True, False):
        for module in modules:
            module.to(dtype)
            for parameter in module.parameters():
                parameter.grad = torch.randn_like(parameter)
        if missing:
            layers[0][0].parameter().grad = None
        expected = []
        for parts in layers:
            heads = [one.take(one.parameter().grad).double() for one in parts if one.parameter().grad is not None]
            expected.append(sum((rows.square().sum() for rows in heads), torch.zeros((), dtype=torch.float64)).sqrt())
        result = norms()
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), torch.stack(expected), rtol=1e-6, atol=0)


def test_no_gradients():
    assert torch.equal(GradientNorms([separate(), transposed()])(), torch.zeros(2))
