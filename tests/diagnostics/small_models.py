"""Small models of several libraries and their inputs."""

import pytest
import torch
from torch import nn

from tests.heads.zoo import TimmAttention

transformers = pytest.importorskip("transformers")


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=3, n_positions=16)
    )


def llama(**more):
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TimmAttention() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def tokens(seed=0):
    return {"input_ids": torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(seed))}


def floats(width, seed=0):
    return torch.randn(2, 7, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "torch": (Encoder, lambda seed=0: floats(24, seed)),
    "timm": (Vision, lambda seed=0: floats(TimmAttention().qkv.in_features, seed)),
}


def make(name):
    torch.manual_seed(0)
    build, inputs = CASES[name]
    return build().double().eval(), inputs
