"""LoRA on nn.MultiheadAttention, whose adapter has the attributes of the layer it adapts."""

import pytest
import torch
from torch import nn

from repulsive import SVGD, repel

peft = pytest.importorskip("peft")


def test_heads_of_an_adapter_of_multihead_attention():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True), 2)
    model = peft.get_peft_model(
        encoder, peft.LoraConfig(r=4, target_modules=["self_attn"], init_lora_weights=False, lora_dropout=0.0)
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rule = SVGD(stepsize=0.1, alpha=0.5)
    handle = repel(model, optimizer, rule, verbose=False)
    assert [(g.layer, g.part, g.num_heads) for g in handle.groups] == [(n, p, 4) for n in range(2) for p in "qkv"]
    model(torch.randn(2, 5, 16)).square().sum().backward()
    expected = []
    for group in handle.groups:
        (part,) = group.slices
        weight, rows = part.parameter(), part.rows  # [48, 4], packed: q, then k, then v
        assert part.parameter_name.endswith("self_attn.lora_B.default.weight")
        assert torch.equal(rows.flatten(), torch.arange(16) + 16 * "qkv".index(group.part))
        particles, gradients = (x.detach()[rows].flatten(1).clone() for x in (weight, weight.grad))
        expected.append(rule.gradient(particles, gradients))
    handle.apply()
    for group, gradient in zip(handle.groups, expected, strict=True):
        (part,) = group.slices
        assert torch.allclose(part.parameter().grad[part.rows].flatten(1), gradient, atol=1e-6)
