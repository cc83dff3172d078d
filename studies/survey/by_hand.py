"""Hand-written small configurations and inputs, for architectures that `shrink` and `dummies` cannot handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from studies.survey.dummies import TOKENS, token_ids

Made = tuple[dict[str, Any], dict[str, Any]]  # arguments of the configuration, and of the model

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
ENCODER = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}
VISION = {"vision_start_token_id": 291, "vision_end_token_id": 292, "image_token_id": 293, "video_token_id": 294}
SOUND = {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_feat_extract_layers": 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
PATCHES = {"num_patches": 16, "patch_size": 16}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}


def _words(**config: Any) -> Made:
    return config, {"input_ids": token_ids(TOKENS)}


def _text(**more: Any) -> Made:
    return _words(**TEXT | more)


def _encoder(**more: Any) -> Made:
    return _words(**ENCODER | more)


def _detector(**more: Any) -> Made:
    backbone = {"use_timm_backbone": False, "backbone_config": RESNET, "backbone": None}
    return BART | backbone | {"num_queries": 6} | more, {"pixel_values": torch.randn(1, 3, 64, 64)}


def _series(**more: Any) -> Made:
    config = BART | {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
    past = 8 + 2
    inputs = {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }
    return config | more, inputs


def _pictures(config: dict[str, Any], **vision: Any) -> Made:
    """Text with images of 4 x 4 patches, merged 2 x 2: four image tokens in the text."""
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, "in_channels": 3, "spatial_merge_size": 2} | vision
    ids = token_ids(TOKENS)
    ids[:, 2], ids[:, 3:7] = VISION["vision_start_token_id"], VISION["image_token_id"]
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(32, 3 * 2 * 14 * 14),  # two frames each
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == VISION["image_token_id"]).int(),
    }
    return VISION | {"text_config": TEXT | config, "vision_config": vision}, inputs


def _boxes() -> torch.Tensor:
    """Bounding boxes of the tokens of a text: x, y of two corners, as shares of a page."""
    low = torch.randint(0, 500, (2, TOKENS, 2), generator=torch.Generator().manual_seed(0))
    return torch.cat([low, low + 100], -1) / 1000


def _patches() -> dict[str, torch.Tensor]:
    """Two images of 4 x 4 patches, as inputs of SigLIP 2."""
    shapes, mask = torch.tensor([[4, 4], [4, 4]]), torch.ones(2, 16).long()
    return {"pixel_values": torch.randn(2, 16, 768), "pixel_attention_mask": mask, "spatial_shapes": shapes}


# Settings of the shrunk configuration that do not fit together after shrinking; inputs are those of `dummies`.
CHANGED: dict[str, dict[str, Any]] = {
    "qwen3_asr": {"audio_config.output_dim": 64},
    "gemma3": {"mm_tokens_per_image": 49},
    "aya_vision": {"vision_config.image_size": 56},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "modernvbert": {"vision_config.image_size": 256},
    "ultravbert": {"vision_config.image_size": 256},
    "voxtral": {"audio_token_id": 3},
    "glm_ocr": {"text_config.rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "llama4": {
        "vision_config.intermediate_size": 256,
        "vision_config.projector_input_dim": 64,
        "vision_config.projector_output_dim": 64,
        "vision_config.vision_output_dim": 64,
    },
    "aria": {"projector_patch_to_query_dict": {49: 4}, "max_value_projector_patch_to_query_dict": 4},
}

# fmt: off
BY_HAND: dict[str, Callable[[], Made]] = {
    "gpt_neo": lambda: _words(
        hidden_size=64, num_layers=2, num_heads=4, vocab_size=300, attention_types=[[["global", "local"], 1]],
    ),
    "esm": lambda: _encoder(pad_token_id=1, mask_token_id=2, position_embedding_type="rotary"),
    "esmc": lambda: _encoder(),
    "ministral": lambda: _text(head_dim=16),
    "nemotron": lambda: _text(head_dim=16),
    "hunyuan_v1_dense": lambda: _text(head_dim=16),
    "hunyuan_v1_moe": lambda: _text(head_dim=16, num_experts=4, moe_topk=2),
    "deepseek_v2": lambda: _text(
        **EXPERTS, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    ),
    "dbrx": lambda: _words(
        d_model=64, n_heads=4, n_layers=2, vocab_size=300, max_seq_len=64,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "dots1": lambda: _text(**EXPERTS, n_routed_experts=4, n_shared_experts=1, head_dim=16),
    "lfm2_moe": lambda: _text(layer_types=["conv", "full_attention"], num_experts=4, **EXPERTS),
    "gemma3n_text": lambda: _text(
        head_dim=16, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=8,
        num_kv_shared_layers=0, vocab_size_per_layer_input=300, hidden_size_per_layer_input=16,
        intermediate_size=[128] * 4, activation_sparsity_pattern=[0.0] * 4,
    ),
    "qwen2_vl_text": lambda: _text(rope_parameters=SECTIONS),
    "qwen2_5_vl_text": lambda: _text(rope_parameters=SECTIONS),
    "glm4v_text": lambda: _text(rope_parameters=SECTIONS | {"partial_rotary_factor": 1.0}),
    "detr": _detector,
    "conditional_detr": _detector,
    "table-transformer": _detector,
    "dab-detr": lambda: _detector(hidden_size=64),
    "bros": lambda: (ENCODER, {"input_ids": token_ids(TOKENS), "bbox": _boxes()}),
    "decision_transformer": lambda: (
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "state_dim": 5, "act_dim": 3, "max_ep_len": 20},
        {
            "states": torch.randn(2, 6, 5), "actions": torch.randn(2, 6, 3), "rewards": torch.randn(2, 6, 1),
            "returns_to_go": torch.randn(2, 6, 1), "timesteps": torch.arange(6).repeat(2, 1),
            "attention_mask": torch.ones(2, 6),
        },
    ),
    "funnel": lambda: _words(
        vocab_size=300, block_sizes=[1, 1], num_decoder_layers=1, d_model=64, n_head=4, d_head=16, d_inner=128,
        architectures=["FunnelModel"],
    ),
    "lxmert": lambda: (
        ENCODER | {"l_layers": 2, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 20, "visual_pos_dim": 4},
        {"input_ids": token_ids(TOKENS), "visual_feats": torch.randn(2, 5, 20), "visual_pos": torch.rand(2, 5, 4)},
    ),
    "xmod": lambda: _encoder(default_language="en_XX", languages=["en_XX"]),
    "perceiver": lambda: (
        {"num_latents": 8, "d_latents": 64, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2,
         "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        {"inputs": torch.randn(2, 20, 32)},
    ),
    "time_series_transformer": _series,
    "informer": _series,
    "autoformer": lambda: _series(label_length=4, moving_average=3),
    "timesfm": lambda: (
        ENCODER | {"head_dim": 16, "context_length": 64, "horizon_length": 16},
        {
            "past_values": torch.randn(2, 64), "past_values_padding": torch.zeros(2, 64),
            "freq": torch.zeros(2, 1).long(),
        },
    ),
    "wav2vec2-conformer": lambda: (
        ENCODER | SOUND | {"num_conv_pos_embeddings": 16, "conv_depthwise_kernel_size": 3},
        {"input_values": torch.randn(2, 800)},
    ),
    "wav2vec2-bert": lambda: (
        ENCODER | {"feature_projection_input_dim": 20, "conv_depthwise_kernel_size": 3},
        {"input_features": torch.randn(2, 16, 20)},
    ),
    "sew-d": lambda: (
        ENCODER | SOUND | {"num_conv_pos_embeddings": 16, "squeeze_factor": 2, "max_position_embeddings": 64,
                           "position_buckets": 16},
        {"input_values": torch.randn(2, 800)},
    ),
    "speecht5": lambda: (
        {name: value for name, value in BART.items() if name != "d_model"} | {"hidden_size": 64, "vocab_size": 81},
        {"input_values": torch.randn(2, 10, 64), "decoder_input_values": torch.randn(2, 7, 64)},
    ),
    "bamba": lambda: _text(**MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: _text(
        **MAMBA, layer_types=["linear_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "zamba": lambda: _text(
        num_key_value_heads=4, attention_hidden_size=128, attention_head_dim=32, num_hidden_layers=5,
        layers_block_type=["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=8, mamba_dt_rank=4,
    ),
    "zamba2": lambda: _text(
        num_key_value_heads=4, num_hidden_layers=3, mamba_d_state=8,
        layers_block_type=["linear_attention", "linear_attention", "hybrid"],
        mamba_headdim=32, n_mamba_heads=4, chunk_size=8, use_mem_rope=True,
    ),
    "siglip2_vision_model": lambda: (ENCODER | PATCHES, _patches()),
    "siglip2": lambda: (
        {"text_config": ENCODER | {"projection_size": 64}, "vision_config": ENCODER | PATCHES},
        {"input_ids": token_ids(TOKENS)} | _patches(),
    ),
    "qwen2_vl": lambda: _pictures({"rope_parameters": SECTIONS}, embed_dim=64, hidden_size=64),
    "qwen2_5_vl": lambda: _pictures(
        {"rope_parameters": SECTIONS}, hidden_size=64, out_hidden_size=64, intermediate_size=128, window_size=56,
        fullatt_block_indexes=[1],
    ),
    "glm4v": lambda: _pictures(
        {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}}, hidden_size=64, out_hidden_size=64,
        intermediate_size=128, image_size=56,
    ),
    "blip_2_qformer": lambda: (
        ENCODER | {"encoder_hidden_size": 32},
        {"query_embeds": torch.randn(2, 5, 64), "encoder_hidden_states": torch.randn(2, 9, 32)},
    ),
    "udop": lambda: (
        {"vocab_size": 300, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 4, "image_size": 32},
        {"input_ids": token_ids(TOKENS), "bbox": _boxes(), "pixel_values": torch.randn(2, 3, 32, 32),
         "decoder_input_ids": token_ids(7)},
    ),
    "deformable_detr": lambda: _detector(num_feature_levels=1, encoder_n_points=2, decoder_n_points=2),
    "mra": lambda: (ENCODER | {"block_per_row": 4, "max_position_embeddings": 256}, {"input_ids": token_ids(256)}),
    "reformer": lambda: (
        {"vocab_size": 320, "attn_layers": ["local", "lsh"], "hidden_size": 64, "num_attention_heads": 4,
         "attention_head_size": 16, "feed_forward_size": 64, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 48],
         "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2, "max_position_embeddings": 32,
         "hash_seed": 0},
        {"input_ids": token_ids(32)},
    ),
    "chameleon": lambda: _text(num_key_value_heads=4, vocabulary_map={"<image>": 4}, vq_config={
        "embed_dim": 16, "num_embeddings": 8, "latent_channels": 16, "resolution": 32, "base_channels": 32,
        "channel_multiplier": [1, 1], "num_res_blocks": 1,
    }),
    "vits": lambda: _words(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, flow_size=64,
        upsample_initial_channel=64, prior_encoder_num_flows=2,
    ),
    "fastspeech2_conformer": lambda: _words(
        vocab_size=300, hidden_size=64, encoder_layers=2, decoder_layers=2, encoder_linear_units=64,
        decoder_linear_units=64, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
    ),
}
# fmt: on
