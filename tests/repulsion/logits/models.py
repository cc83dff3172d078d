"""Small float64 models with different layouts, and their queries and keys computed by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 3, 5


@dataclass
class Case:
    """A model, a call of it, and the queries and keys of one attention layer as functions of captured inputs."""

    model: nn.Module
    call: Callable[[], Any]
    attention: nn.Module
    queries: Callable[[Tensor], Tensor]  # [B, T, D] -> [B, T, M, d]
    keys: Callable[[Tensor], Tensor]
    query_module: nn.Module
    key_module: nn.Module
    reads: list[int]
    parameters: list[str]
    match: str
    valid_q: Tensor | None = None
    valid_k: Tensor | None = None
    example_inputs: Any = None  # for classes whose heads `find_heads` has to trace
    inputs: Any = None  # keyword arguments of the call


def ids(vocabulary: int = 50, length: int = LENGTH) -> Tensor:
    return torch.randint(0, vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(1))


def padding() -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, 3:] = 0
    mask[1, 4:] = 0
    return mask


def bert() -> Case:
    """Separate q and k projections with biases, padding on the right."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config).double()
    inner = model.encoder.layer[1].attention.self
    mask = padding()
    randomise_biases(inner.query, inner.key)
    return Case(
        model, lambda: model(input_ids=ids(), attention_mask=mask).last_hidden_state, inner,
        lambda x: inner.query(x).view(*x.shape[:2], 3, 4), lambda x: inner.key(x).view(*x.shape[:2], 3, 4),
        inner.query, inner.key, [0, 1, 2], ["query.weight", "query.bias", "key.weight", "key.bias"], "*layer.1*",
        mask.bool(), mask.bool(),
    )  # fmt: skip


def gpt2() -> Case:
    """One transposed weight (Conv1D): all of q, then k, then v."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=50, n_embd=12, n_layer=2, n_head=3, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2Model(config).double()
    inner = model.h[1].attn
    randomise_biases(inner.c_attn)
    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner,
        lambda x: inner.c_attn(x)[..., :12].view(*x.shape[:2], 3, 4),
        lambda x: inner.c_attn(x)[..., 12:24].view(*x.shape[:2], 3, 4),
        inner.c_attn, inner.c_attn, [0, 1, 2], ["c_attn.weight", "c_attn.bias"], "*h.1*",
    )  # fmt: skip


def neox() -> Case:
    """One weight: q, k and v of head 0, then of head 1, ..."""
    from transformers import GPTNeoXConfig, GPTNeoXModel

    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, rotary_pct=0.5
    )
    model = GPTNeoXModel(config).double()
    inner = model.layers[1].attention
    randomise_biases(inner.query_key_value)

    def part(x: Tensor, which: int) -> Tensor:
        return inner.query_key_value(x).view(*x.shape[:2], 3, 3, 4)[..., which, :]

    packed = inner.query_key_value
    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner, lambda x: part(x, 0), lambda x: part(x, 1),
        packed, packed, [0, 1, 2], ["query_key_value.weight", "query_key_value.bias"], "*layers.1*",
    )  # fmt: skip


def llama() -> Case:
    """Four q heads that share two key-value heads, padding on the left."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = LlamaModel(config).double()
    inner = model.layers[1].self_attn
    mask = padding().flip(1)  # padded on the left
    return Case(
        model, lambda: model(input_ids=ids(), attention_mask=mask).last_hidden_state, inner,
        lambda x: inner.q_proj(x).view(*x.shape[:2], 4, 4), lambda x: inner.k_proj(x).view(*x.shape[:2], 2, 4),
        inner.q_proj, inner.k_proj, [0, 0, 1, 1], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
        mask.bool(), mask.bool(),
    )  # fmt: skip


def qwen3() -> Case:
    """Shared key-value heads, and an RMS norm on each head of q and k."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=16,
    )  # fmt: skip
    model = Qwen3Model(config).double()
    inner = model.layers[1].self_attn
    with torch.no_grad():
        inner.q_norm.weight.mul_(torch.linspace(0.5, 2, 6))
        inner.k_norm.weight.mul_(torch.linspace(2, 0.5, 6))

    def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()

    eps = inner.q_norm.variance_epsilon
    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner,
        lambda x: normed(inner.q_proj(x).view(*x.shape[:2], 4, 6), inner.q_norm.weight.detach(), eps),
        lambda x: normed(inner.k_proj(x).view(*x.shape[:2], 2, 6), inner.k_norm.weight.detach(), eps),
        inner.q_proj, inner.k_proj, [0, 0, 1, 1], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
    )  # fmt: skip


def olmo2() -> Case:
    """An RMS norm over the full width of q and of k."""
    from transformers import Olmo2Config, Olmo2Model

    config = Olmo2Config(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, pad_token_id=0
    )
    model = Olmo2Model(config).double()
    inner = model.layers[1].self_attn

    def normed(x: Tensor, norm: nn.Module) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return (norm.weight.detach() * scaled).view(*x.shape[:2], 3, 4)

    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner,
        lambda x: normed(inner.q_proj(x), inner.q_norm), lambda x: normed(inner.k_proj(x), inner.k_norm),
        inner.q_proj, inner.k_proj, [0, 1, 2], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
    )  # fmt: skip


def llama4() -> Case:
    """Shared key-value heads, and one norm without weights for q and k, after the rotation."""
    from transformers import Llama4TextConfig, Llama4TextModel

    config = Llama4TextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        intermediate_size=16, intermediate_size_mlp=16, num_local_experts=1, moe_layers=[], use_qk_norm=True,
    )  # fmt: skip
    model = Llama4TextModel(config).double()
    inner = model.layers[1].self_attn

    def normed(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + inner.qk_norm.eps).rsqrt()

    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner,
        lambda x: normed(inner.q_proj(x).view(*x.shape[:2], 4, 4)),
        lambda x: normed(inner.k_proj(x).view(*x.shape[:2], 2, 4)),
        inner.q_proj, inner.k_proj, [0, 0, 1, 1], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
    )  # fmt: skip


def deepseek() -> Case:
    """Latent attention: logits without the rotated features of q; keys share a weight with values."""
    from transformers import DeepseekV3Config, DeepseekV3Model

    config = DeepseekV3Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=16, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3,
        first_k_dense_replace=2,
    )  # fmt: skip
    model = DeepseekV3Model(config).double()
    inner = model.layers[1].self_attn
    return Case(
        model, lambda: model(input_ids=ids()).last_hidden_state, inner,
        lambda x: inner.q_b_proj(x).view(*x.shape[:2], 4, 6)[..., :4],
        lambda x: inner.kv_b_proj(x).view(BATCH, LENGTH, 4, 7)[..., :4],
        inner.q_b_proj, inner.kv_b_proj, [0, 1, 2, 3], ["q_b_proj.weight", "kv_b_proj.weight"], "*layers.1*",
        example_inputs={"input_ids": ids()},
    )  # fmt: skip


def lora() -> Case:
    """LoRA on q and k: only the second matrix of each adapter has rows of heads."""
    from peft import LoraConfig, get_peft_model

    base = llama()
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    model = get_peft_model(base.model, config).double()
    inner = base.attention
    mask = padding().flip(1)
    names = ["q_proj.lora_B.default.weight", "k_proj.lora_B.default.weight"]
    return Case(
        model, lambda: model(input_ids=ids(), attention_mask=mask).last_hidden_state, inner, base.queries, base.keys,
        inner.q_proj, inner.k_proj, base.reads, names, "*layers.1*", mask.bool(), mask.bool(),
    )  # fmt: skip


def t5_cross() -> Case:
    """Cross-attention: queries from the decoder, padded keys from the encoder."""
    from transformers import T5Config, T5Model

    config = T5Config(
        vocab_size=50, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=3, dropout_rate=0.0
    )
    model = T5Model(config).double()
    inner = model.decoder.block[0].layer[1].EncDecAttention
    mask = torch.ones(BATCH, 4, dtype=torch.long)
    mask[2, 2:] = 0
    everything = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    return Case(
        model,
        lambda: model(
            input_ids=ids(length=4), attention_mask=mask, decoder_input_ids=ids(), use_cache=False
        ).last_hidden_state,
        inner,
        lambda x: inner.q(x).view(*x.shape[:2], 3, 4), lambda x: inner.k(x).view(*x.shape[:2], 3, 4),
        inner.q, inner.k, [0, 1, 2], ["q.weight", "k.weight"], "*EncDecAttention*", everything, mask.bool(),
    )  # fmt: skip


def torch_encoder(batch_first: bool = True) -> Case:
    """nn.MultiheadAttention: one weight with all of q, then k, then v."""
    layer = nn.TransformerEncoderLayer(12, 3, 16, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    inner = model.layers[1].self_attn
    with torch.no_grad():
        inner.in_proj_bias.normal_(generator=torch.Generator().manual_seed(2))
    padded = ~padding().bool()
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = x if batch_first else x.transpose(0, 1).contiguous()

    def part(tokens: Tensor, first: int) -> Tensor:
        tokens = tokens if batch_first else tokens.transpose(0, 1)
        rows = slice(first, first + 12)
        return nn.functional.linear(tokens, inner.in_proj_weight[rows], inner.in_proj_bias[rows]).view(BATCH, -1, 3, 4)

    return Case(
        model, lambda: model(x, src_key_padding_mask=padded), inner, lambda t: part(t, 0), lambda t: part(t, 12),
        inner, inner, [0, 1, 2], ["in_proj_weight", "in_proj_bias"], "*layers.1*", ~padded, ~padded,
    )  # fmt: skip


class OwnAttention(nn.Module):
    """Four query heads that share two key-value heads, under names that no table has. The gate is as wide as `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.vals = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)
        self.gate, self.mix = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 3)).transpose(1, 2) for each in (self.queries, self.keys, self.vals))
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))  # [B, M, T, d]
        heads = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # [B, T, M d]
        return x + self.gate(x).sigmoid() * self.mix(heads)


def own() -> Case:
    """A class whose heads and output projection are found with example inputs only."""
    layers = [OwnAttention(), OwnAttention()]
    model = nn.Sequential(nn.Embedding(50, 12), *layers).double()
    inner = layers[1]
    return Case(
        model, lambda: model(ids()), inner,
        lambda x: inner.queries(x).unflatten(-1, (4, 3)), lambda x: inner.keys(x).unflatten(-1, (2, 3)),
        inner.queries, inner.keys, [0, 0, 1, 1], ["queries.weight", "queries.bias", "keys.weight"], "2.*",
        example_inputs=ids(),
    )  # fmt: skip


def randomise_biases(*modules: nn.Module) -> None:
    """Set biases to random values; with the initial zeros a mistake would not show."""
    for number, module in enumerate(modules):
        with torch.no_grad():
            module.bias.normal_(generator=torch.Generator().manual_seed(number))  # type: ignore[union-attr, operator]


CASES: dict[str, Callable[[], Case]] = {
    "bert": bert,
    "gpt2": gpt2,
    "neox": neox,
    "llama": llama,
    "qwen3": qwen3,
    "olmo2": olmo2,
    "llama4": llama4,
    "deepseek": deepseek,
    "lora": lora,
    "t5-cross": t5_cross,
    "torch": torch_encoder,
    "torch-time-first": lambda: torch_encoder(batch_first=False),
    "own": own,
}
