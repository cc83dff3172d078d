"""Positions of patches and special tokens, and attention rollout."""

import pytest
import torch
from torch import nn

from repulsive.diagnostics.patches import PatchLayout, check_layout, patch_layout
from repulsive.diagnostics.rollout import attention_rollout
from repulsive.errors import DataError

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 24, "patch_size": 8}


def test_special_tokens_are_known_and_left_out():
    vit = transformers.ViTModel(transformers.ViTConfig(intermediate_size=16, **SIZES))
    deit = transformers.DeiTModel(transformers.DeiTConfig(intermediate_size=16, **SIZES))
    registers = transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(num_register_tokens=3, **SIZES)
    )
    assert patch_layout(vit, 24, 32) == PatchLayout(3, 4, ("class",), (8, 8))
    assert patch_layout(deit, 24, 24).special == ("class", "distillation")
    layout = patch_layout(registers, 16, 24)
    assert layout.special == ("class", "register 0", "register 1", "register 2")
    assert (layout.patches, layout.tokens) == (6, 10)
    weights = torch.arange(10.0).expand(2, 10)
    assert layout.on_picture(weights).tolist() == [[[4, 5, 6], [7, 8, 9]]] * 2


def test_the_default_query_is_the_class_token_or_the_mean_over_patches():
    weights = torch.rand(3, 5, 5)
    assert torch.equal(PatchLayout(2, 2, ("class",)).default_query(weights), weights[:, 0])
    assert torch.equal(PatchLayout(2, 2, ("register 0",)).default_query(weights), weights[:, 1:].mean(1))


def test_models_without_patches_are_refused():
    for model in (nn.Linear(2, 2), nn.Conv2d(3, 4, 3)):
        with pytest.raises(DataError, match="--images needs a ViT"):
            patch_layout(model, 24, 24)
    with pytest.raises(DataError, match="smaller than a patch"):
        patch_layout(nn.Conv2d(3, 4, 8, 8), 24, 4)


def test_layers_must_attend_between_all_patches():
    layout = PatchLayout(2, 2, ("class",))
    check_layout(layout, [torch.ones(1, 2, 5, 5)], "ViT")
    with pytest.raises(DataError, match=r"expected attention between 2 x 2 patches and 1 class .* layers of 4 tokens"):
        check_layout(layout, [torch.ones(4, 2, 4, 4)], "Swin")


def test_rollout_is_the_product_of_all_layers():
    """Oracle: sum over all paths of the product of the steps, in float64."""
    make = torch.Generator().manual_seed(0)
    layers = [torch.randn(3, 4, 4, generator=make).softmax(-1) for _ in range(3)]
    steps = [
        [[0.5 * (float(x[:, t, s].double().mean()) + (t == s)) for s in range(4)] for t in range(4)] for x in layers
    ]
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for t in range(4):
        for a in range(4):
            for b in range(4):
                for s in range(4):
                    expected[t, s] += steps[2][t][a] * steps[1][a][b] * steps[0][b][s]
    rolled = attention_rollout(layers)
    assert torch.allclose(rolled, expected, rtol=1e-6) and torch.allclose(rolled.sum(-1), torch.ones(4).double())
    batched = attention_rollout([layer[:, None].expand(3, 2, 4, 4).transpose(0, 1) for layer in layers])
    assert torch.allclose(batched[1], rolled, rtol=1e-14)  # products of batches round differently on some CPUs
    with pytest.raises(ValueError, match="at least one layer"):
        attention_rollout([])
