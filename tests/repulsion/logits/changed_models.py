"""Small float64 models that change queries and keys after their projection: by a bias, a norm, clipping or rotation."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.repulsion.logits.models import BATCH, LENGTH, Case, ids, padding

CLIP = 0.1  # clips about half of the values


def deberta() -> Case:
    """One weight without bias: q, k and v of head 0, then of head 1, ...; `q_bias` is added to the queries."""
    from transformers import DebertaConfig, DebertaModel

    config = DebertaConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True, pos_att_type=["c2p", "p2c"],
    )  # fmt: skip
    model = DebertaModel(config).double()
    inner = model.encoder.layer[1].attention.self
    mask = padding()
    inputs = {"input_ids": ids(), "attention_mask": mask}
    randomise(inner.q_bias, inner.v_bias)

    def part(x: Tensor, which: int) -> Tensor:
        return inner.in_proj(x).view(*x.shape[:2], 3, 3, 4)[..., which, :]

    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: part(x, 0) + inner.q_bias.view(3, 4), lambda x: part(x, 1),
        inner.in_proj, inner.in_proj, [0, 1, 2], ["in_proj.weight", "q_bias"], "*layer.1*", mask.bool(), mask.bool(),
        inputs=inputs,
    )  # fmt: skip


def deberta_v3() -> Case:
    """The projections of tokens run again on relative positions."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, relative_attention=True, pos_att_type=["c2p", "p2c"],
        share_att_key=True, position_buckets=4, max_relative_positions=8,
    )  # fmt: skip
    model = DebertaV2Model(config).double()
    inner = model.encoder.layer[1].attention.self
    mask = padding()
    inputs = {"input_ids": ids(), "attention_mask": mask}
    randomise(inner.query_proj.bias, inner.key_proj.bias)
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.query_proj(x).view(*x.shape[:2], 3, 4), lambda x: inner.key_proj(x).view(*x.shape[:2], 3, 4),
        inner.query_proj, inner.key_proj, [0, 1, 2], ["query_proj.weight", "query_proj.bias", "key_proj.weight"],
        "*layer.1*", mask.bool(), mask.bool(), inputs=inputs,
    )  # fmt: skip


def conformer() -> Case:
    """`pos_bias_u` [M, d] is added to the queries in the part of the logits that depends on the key."""
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    config = Wav2Vec2ConformerConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, conformer_conv_dropout=0.0, layerdrop=0.0,
        position_embeddings_type="relative", conv_depthwise_kernel_size=3, max_source_positions=20,
        num_conv_pos_embeddings=3, num_conv_pos_embedding_groups=3,
    )  # fmt: skip
    model = Wav2Vec2ConformerEncoder(config).double()
    inner = model.layers[1].self_attn
    randomise(inner.linear_q.bias, inner.linear_k.bias, inner.pos_bias_u, inner.pos_bias_v)
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = {"hidden_states": x}
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.linear_q(x).view(*x.shape[:2], 3, 4) + inner.pos_bias_u,
        lambda x: inner.linear_k(x).view(*x.shape[:2], 3, 4),
        inner.linear_q, inner.linear_k, [0, 1, 2],
        ["linear_q.weight", "linear_q.bias", "pos_bias_u", "linear_k.weight"], "*layers.1*",
        inputs=inputs, example_inputs=inputs,
    )  # fmt: skip


def funnel() -> Case:
    """`r_w_bias` [M, d] is added to the queries; both are scaled."""
    from transformers import FunnelBaseModel, FunnelConfig

    config = FunnelConfig(
        vocab_size=50, d_model=12, n_head=3, d_head=4, d_inner=16, block_sizes=[2], num_decoder_layers=0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    model = FunnelBaseModel(config).double()
    inner = model.encoder.blocks[0][1].attention
    inputs = {"input_ids": ids()}
    randomise(inner.r_w_bias, inner.k_head.bias)
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.q_head(x).view(*x.shape[:2], 3, 4) + inner.r_w_bias,
        lambda x: inner.k_head(x).view(*x.shape[:2], 3, 4),
        inner.q_head, inner.k_head, [0, 1, 2], ["q_head.weight", "r_w_bias", "k_head.weight"], "*blocks.0.1*",
        inputs=inputs, example_inputs=inputs,
    )  # fmt: skip


def olmo() -> Case:
    """Queries and keys are clipped in place."""
    from transformers import OlmoConfig, OlmoModel

    config = OlmoConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16, clip_qkv=CLIP
    )
    model = OlmoModel(config).double()
    inner = model.layers[1].self_attn
    inputs = {"input_ids": ids()}
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: clipped(inner.q_proj(x)), lambda x: clipped(inner.k_proj(x)),
        inner.q_proj, inner.k_proj, [0, 1, 2], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
        inputs=inputs,
    )  # fmt: skip


def olmoe() -> Case:
    """Norms over all heads, then clipping in place; without eps, which the module rounds to float32."""
    from transformers import OlmoeConfig, OlmoeModel

    config = OlmoeConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=16, num_experts=2, num_experts_per_tok=1, clip_qkv=0.7, experts_implementation="eager",
        rms_norm_eps=0.0,
    )  # fmt: skip
    model = OlmoeModel(config).double()
    inner = model.layers[1].self_attn
    inputs = {"input_ids": ids()}
    randomise(inner.q_norm.weight, inner.k_norm.weight)

    def normed(x: Tensor, norm: nn.Module) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return clipped(norm.weight.detach() * scaled, 0.7)

    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: normed(inner.q_proj(x), inner.q_norm), lambda x: normed(inner.k_proj(x), inner.k_norm),
        inner.q_proj, inner.k_proj, [0, 1, 2], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
        inputs=inputs,
    )  # fmt: skip


def mpt() -> Case:
    """ALiBi, and clipping of a weight with all of q, then k, then v."""
    from transformers import MptConfig, MptModel

    config = MptConfig(
        vocab_size=50, d_model=12, n_layers=2, n_heads=3, expansion_ratio=1, max_seq_len=16,
        attn_config={"clip_qkv": CLIP, "alibi": True},
    )  # fmt: skip
    model = MptModel(config).double()
    inner = model.blocks[1].attn
    inputs = {"input_ids": ids()}
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: clipped(inner.Wqkv(x)[..., :12]), lambda x: clipped(inner.Wqkv(x)[..., 12:24]),
        inner.Wqkv, inner.Wqkv, [0, 1, 2], ["Wqkv.weight"], "*blocks.1*",
        inputs=inputs,
    )  # fmt: skip


def stablelm() -> Case:
    """Rotation of half of the features of a head, which the functions of heads do not include."""
    from transformers import StableLmConfig, StableLmModel

    config = StableLmConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=16, partial_rotary_factor=0.5, use_qkv_bias=True,
    )  # fmt: skip
    model = StableLmModel(config).double()
    inner = model.layers[1].self_attn
    inputs = {"input_ids": ids()}
    randomise(inner.q_proj.bias, inner.k_proj.bias)
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.q_proj(x).view(*x.shape[:2], 4, 4), lambda x: inner.k_proj(x).view(*x.shape[:2], 2, 4),
        inner.q_proj, inner.k_proj, [0, 0, 1, 1], ["q_proj.weight", "q_proj.bias", "k_proj.weight"], "*layers.1*",
        inputs=inputs,
    )  # fmt: skip


def fsmt() -> Case:
    """Inputs are [T, B, D]."""
    from transformers import FSMTConfig, FSMTModel

    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=50, tgt_vocab_size=50, d_model=12, encoder_layers=2, decoder_layers=1,
        encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    model = FSMTModel(config).double().encoder  # the decoder does not run in float64
    inner = model.layers[1].self_attn
    mask = padding()
    inputs = {"input_ids": ids(), "attention_mask": mask}
    randomise(inner.q_proj.bias, inner.k_proj.bias)
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.q_proj(x).view(LENGTH, BATCH, 3, 4).transpose(0, 1),
        lambda x: inner.k_proj(x).view(LENGTH, BATCH, 3, 4).transpose(0, 1),
        inner.q_proj, inner.k_proj, [0, 1, 2], ["q_proj.weight", "q_proj.bias", "k_proj.weight"], "*layers.1*",
        mask.bool(), mask.bool(), inputs=inputs,
    )  # fmt: skip


def fsmt_unmasked() -> Case:
    """Inputs are [T, B, D], which no mask shows."""
    case = fsmt()
    inputs = {"input_ids": ids()}
    return replace(case, call=lambda: case.model(**inputs).last_hidden_state, valid_q=None, valid_k=None, inputs=inputs)


def longformer() -> Case:
    """Projections of [T, B, D], and a mask [B, T] of layers that is added to logits and has no negative numbers."""
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16,
        max_position_embeddings=32, attention_window=4, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = LongformerModel(config, add_pooling_layer=False).double()
    inner = model.encoder.layer[1].attention.self
    length = 8  # two windows
    inputs = {"input_ids": ids(length=length)}
    randomise(inner.query.bias, inner.key.bias)
    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: inner.query(x).view(length, BATCH, 3, 4).transpose(0, 1),
        lambda x: inner.key(x).view(length, BATCH, 3, 4).transpose(0, 1),
        inner.query, inner.key, [0, 1, 2], ["query.weight", "query.bias", "key.weight"], "*layer.1*self.[qkv]",
        inputs=inputs,
    )  # fmt: skip


def stablelm_norms() -> Case:
    """A list of layer norms without bias, one for each head of q and of k."""
    from transformers import StableLmConfig, StableLmModel

    config = StableLmConfig(
        vocab_size=50, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=16, qk_layernorm=True, layer_norm_eps=1e-3,
    )  # fmt: skip
    model = StableLmModel(config).double()
    inner = model.layers[1].self_attn
    inputs = {"input_ids": ids()}
    norms = [norm.weight for both in (inner.q_layernorm, inner.k_layernorm) for norm in both.norms]
    randomise(*norms)

    def normed(x: Tensor, weights: list[Tensor]) -> Tensor:
        x = x.view(*x.shape[:2], 3, 4)
        x = x - x.mean(-1, keepdim=True)
        return torch.stack(weights).detach() * x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    return Case(
        model, lambda: model(**inputs).last_hidden_state, inner,
        lambda x: normed(inner.q_proj(x), norms[:3]), lambda x: normed(inner.k_proj(x), norms[3:]),
        inner.q_proj, inner.k_proj, [0, 1, 2], ["q_proj.weight", "k_proj.weight"], "*layers.1*",
        inputs=inputs,
    )  # fmt: skip


def clipped(x: Tensor, limit: float = CLIP) -> Tensor:
    """Clip [B, T, 12] and split it into three heads."""
    return x.clamp(-limit, limit).view(*x.shape[:2], 3, 4)


def randomise(*parameters: Tensor) -> None:
    """Set parameters to random values; with the initial zeros or ones a mistake would not show."""
    for number, parameter in enumerate(parameters):
        with torch.no_grad():
            parameter.normal_(generator=torch.Generator().manual_seed(number))


CHANGED: dict[str, Callable[[], Case]] = {
    "deberta": deberta,
    "deberta-v3": deberta_v3,
    "conformer": conformer,
    "funnel": funnel,
    "olmo": olmo,
    "olmoe": olmoe,
    "mpt": mpt,
    "stablelm": stablelm,
    "stablelm-norms": stablelm_norms,
    "fsmt": fsmt,
    "fsmt-unmasked": fsmt_unmasked,
    "longformer": longformer,
}
