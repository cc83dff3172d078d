"""Tiny random models of most families in the family table, each with an example input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

Case = tuple[nn.Module, Any]


def ids(length: int = 7) -> Tensor:
    return torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))


class TimmAttention(nn.Module):
    """Attention as in timm's vision transformers: one `qkv` weight, all of q, then k, then v, head after head."""

    def __init__(self, dim: int = 24, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = num_heads, dim // num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, H, T, D]
        weights = (self.q_norm(q) * self.scale @ self.k_norm(k).transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


class CausalSelfAttention(nn.Module):
    """Attention as in nanoGPT: one `c_attn` weight, all of q, then k, then v, head after head."""

    def __init__(self, n_embd: int = 24, n_head: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(*x.shape[:2], self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(self.n_embd, 2)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class MultiHeadedAttention(nn.Module):
    """Attention as in the Annotated Transformer: q, k, v and the output projection in one `ModuleList`."""

    def __init__(self, h: int = 4, d_model: int = 24) -> None:
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.h, self.d_k).transpose(1, 2) for layer in self.linears[:3])
        weights = (torch.matmul(q, k.transpose(-2, -1)) / self.d_k**0.5).softmax(dim=-1)
        return self.linears[-1](torch.matmul(weights, v).transpose(1, 2).flatten(2))


class AdditiveAttention(nn.Module):
    """Additive attention, A = softmax(W2 tanh(W1 H)) over tokens; a head is one row of W2."""

    def __init__(self, dim: int = 12, hidden: int = 7, heads: int = 5) -> None:
        super().__init__()
        self.heads = heads
        self.hidden = nn.Linear(dim, hidden, bias=False)
        self.score = nn.Linear(hidden, heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.score(torch.tanh(self.hidden(x))), dim=1)  # [B, T, M]
        return weights.transpose(1, 2) @ x  # [B, M, dim]


def _torch_packed() -> Case:
    x = torch.randn(2, 5, 16)
    return nn.MultiheadAttention(16, 4, batch_first=True), (x, x, x)


def _torch_separate() -> Case:
    model = nn.MultiheadAttention(16, 4, kdim=12, vdim=10, batch_first=True)
    return model, (torch.randn(2, 5, 16), torch.randn(2, 6, 12), torch.randn(2, 6, 10))


def _torch_transformer() -> Case:
    return nn.Transformer(16, 4, 2, 2, 32, batch_first=True), (torch.randn(2, 5, 16), torch.randn(2, 6, 16))


def _transformers(name: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Any]]) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        return getattr(transformers, f"{name}Model")(config), inputs()

    return build


def _text() -> dict[str, Any]:
    return {"input_ids": ids()}


def _text_and_target() -> dict[str, Any]:
    return {"input_ids": ids(), "decoder_input_ids": ids(5)}


def _text_and_states() -> dict[str, Any]:
    return {"input_ids": ids(), "encoder_hidden_states": torch.randn(2, 5, 32)}


def _image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, **IDS}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
_DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": 64}
_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}

TORCH: dict[str, Callable[[], Case]] = {
    "torch packed": _torch_packed,
    "torch separate": _torch_separate,
    "torch transformer": _torch_transformer,
    "timm": lambda: (nn.Sequential(TimmAttention(), TimmAttention()), torch.randn(2, 5, 24)),
    "nanogpt": lambda: (nn.Sequential(CausalSelfAttention(), CausalSelfAttention()), torch.randn(2, 5, 24)),
    "annotated": lambda: (MultiHeadedAttention(), torch.randn(2, 5, 24)),
    "additive": lambda: (AdditiveAttention(), torch.randn(2, 6, 12)),
}

# (class prefix, configuration, inputs) of models that support eager and sdpa attention
_EAGER_AND_SDPA: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "bert": ("Bert", SMALL, _text),
    "bert with cross-attention": ("Bert", {**SMALL, "is_decoder": True, "add_cross_attention": True}, _text_and_states),
    "roberta": ("Roberta", SMALL, _text),
    "electra": ("Electra", {**SMALL, "embedding_size": 16}, _text),
    "distilbert": ("DistilBert", _DISTIL, _text),
    "albert": ("Albert", {**SMALL, "embedding_size": 16}, _text),
    "gpt2 with cross-attention": ("GPT2", {**_GPT2, "add_cross_attention": True}, _text_and_states),
    "gpt-neox": ("GPTNeoX", {**SMALL, **IDS}, _text),
    "bart": ("Bart", BART, _text_and_target),
    "marian": ("Marian", BART, _text_and_target),
    "llama": ("Llama", {**SMALL, "num_key_value_heads": 2}, _text),
    "mistral": ("Mistral", {**SMALL, "num_key_value_heads": 2}, _text),
    "qwen2": ("Qwen2", {**SMALL, "num_key_value_heads": 1}, _text),
    "olmo2": ("Olmo2", {**SMALL, **IDS, "num_key_value_heads": 2}, _text),
    "vit": ("ViT", {**_VIT, "image_size": 16, "patch_size": 8}, _image),
}
_DEFAULT_ONLY: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, _text),
    "falcon": ("Falcon", {**SMALL, **IDS, "num_kv_heads": 2, "new_decoder_architecture": True}, _text),
    "falcon with one kv head": ("Falcon", {**SMALL, **IDS, "multi_query": True}, _text),
    "phi3": ("Phi3", {**SMALL, **IDS, "num_key_value_heads": 2}, _text),
    "codegen": ("CodeGen", {**_GPT2, "rotary_dim": 4}, _text),
    "t5": ("T5", _T5, _text_and_target),
}
TRANSFORMERS: dict[str, Callable[[], Case]] = {
    f"{name}, {kind}": _transformers(prefix, {**settings, "attn_implementation": kind}, inputs)
    for name, (prefix, settings, inputs) in _EAGER_AND_SDPA.items()
    for kind in ("eager", "sdpa")
} | {name: _transformers(*case) for name, case in _DEFAULT_ONLY.items()}


def build(name: str) -> Case:
    """Build a model and its example inputs from a fixed seed."""
    torch.manual_seed(0)
    return {**TORCH, **TRANSFORMERS}[name]()
