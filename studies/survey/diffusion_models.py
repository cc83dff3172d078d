"""Small diffusion models of diffusers, each with an example."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from studies.survey.package_models import Case, Cases

N = torch.randn
TEXT, POOLED = (2, 5, 32), (2, 32)
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
_TIME = torch.tensor([3, 3])
_MMDIT = {
    **_HEADS,
    "joint_attention_dim": 32,
    "caption_projection_dim": 32,
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
}
_UNET = {"sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_FLUX = {**_HEADS, "in_channels": 4, "num_single_layers": 1, "joint_attention_dim": 32, "axes_dims_rope": (2, 2, 4)}


def _image(channels: int = 4, side: int = 8) -> torch.Tensor:
    return N(2, channels, side, side)


def _ids(count: int, axes: int = 3) -> torch.Tensor:
    return torch.zeros(count, axes)


# class -> (arguments of the class, arguments of its forward)
MODELS: dict[str, Any] = {
    "UNet2DModel": lambda: (
        {**_UNET, "in_channels": 3, "out_channels": 3, "attention_head_dim": 8,
         "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": _image(3), "timestep": 3}),
    "UNet2DConditionModel": lambda: (
        {**_UNET, "cross_attention_dim": 32, "attention_head_dim": 4,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D",
         "UpBlock2D")},
        {"sample": _image(), "timestep": 3, "encoder_hidden_states": N(*TEXT)}),
    "UNet2DConditionModel, added kv": lambda: (
        {**_UNET, "cross_attention_dim": 32, "attention_head_dim": 8, "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
         "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
         "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D")},
        {"sample": _image(), "timestep": 3, "encoder_hidden_states": N(*TEXT)}),
    "UNet3DConditionModel": lambda: (
        {**_UNET, "cross_attention_dim": 32, "attention_head_dim": 8,
         "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D",
         "CrossAttnUpBlock3D")},
        {"sample": N(1, 4, 3, 8, 8), "timestep": 3, "encoder_hidden_states": N(1, 5, 32)}),
    "AutoencoderKL": lambda: (
        {"block_out_channels": (16, 16), "norm_num_groups": 8, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4},
        {"sample": N(2, 3, 16, 16)}),
    "Transformer2DModel": lambda: (
        {**_HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": _image(32), "encoder_hidden_states": N(*TEXT)}),
    "DiTTransformer2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 8},
        {"hidden_states": _image(), "timestep": _TIME, "class_labels": torch.tensor([1, 2])}),
    "PixArtTransformer2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32,
         "use_additional_conditions": False},
        {"hidden_states": _image(), "timestep": _TIME, "encoder_hidden_states": N(*TEXT), "added_cond_kwargs": {}}),
    "SD3Transformer2DModel": lambda: (
        {**_MMDIT, "pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 8},
        {"hidden_states": _image(), "timestep": _TIME, "encoder_hidden_states": N(*TEXT),
        "pooled_projections": N(*POOLED)}),
    "SD3Transformer2DModel, dual, qk norm": lambda: (
        {**_MMDIT, "pooled_projection_dim": 32, "out_channels": 4, "pos_embed_max_size": 8, "qk_norm": "rms_norm",
         "dual_attention_layers": (0,)},
        {"hidden_states": _image(), "timestep": _TIME, "encoder_hidden_states": N(*TEXT),
        "pooled_projections": N(*POOLED)}),
    "FluxTransformer2DModel": lambda: (
        {**_FLUX, "pooled_projection_dim": 32},
        {"hidden_states": N(2, 16, 4), "encoder_hidden_states": N(*TEXT), "pooled_projections": N(*POOLED),
         "timestep": torch.tensor([0.5, 0.5]), "img_ids": _ids(16), "txt_ids": _ids(5)}),
    "ChromaTransformer2DModel": lambda: (
        {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 32, "approximator_layers": 1},
        {"hidden_states": N(2, 16, 4), "encoder_hidden_states": N(*TEXT), "timestep": torch.tensor([0.5, 0.5]),
         "img_ids": _ids(16), "txt_ids": _ids(5)}),
    "Flux2Transformer2DModel": lambda: (
        {**_FLUX, "axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 32, "guidance_embeds": False},
        {"hidden_states": N(2, 16, 4), "encoder_hidden_states": N(*TEXT), "timestep": torch.tensor([0.5, 0.5]),
         "img_ids": _ids(16, 4), "txt_ids": _ids(5, 4), "guidance": torch.ones(2)}),
    "AuraFlowTransformer2DModel": lambda: (
        {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8,
         "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        {"hidden_states": _image(), "encoder_hidden_states": N(*TEXT), "timestep": torch.tensor([0.5, 0.5])}),
    "QwenImageTransformer2DModel": lambda: (
        {**_HEADS, "in_channels": 16, "out_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": N(2, 16, 16), "encoder_hidden_states": N(*TEXT), "timestep": torch.tensor([0.5, 0.5]),
         "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.long), "img_shapes": [(1, 4, 4)] * 2}),
    "CogVideoXTransformer3DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "sample_width": 8,
         "sample_height": 8, "sample_frames": 8, "max_text_seq_length": 5},
        {"hidden_states": N(2, 2, 4, 8, 8), "encoder_hidden_states": N(*TEXT), "timestep": _TIME}),
    "CogView4Transformer2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8,
         "pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
        {"hidden_states": _image(), "encoder_hidden_states": N(*TEXT), "timestep": _TIME,
         **{name: N(2, 2) for name in ("original_size", "target_size", "crop_coords")}}),
    "CogView3PlusTransformer2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8,
         "pos_embed_max_size": 8, "sample_size": 8},
        {"hidden_states": _image(), "encoder_hidden_states": N(*TEXT), "timestep": _TIME,
         **{name: N(2, 2) for name in ("original_size", "target_size", "crop_coords")}}),
    "LTXVideoTransformer3DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 32},
        {"hidden_states": N(2, 16, 4), "encoder_hidden_states": N(*TEXT), "timestep": _TIME,
         "encoder_attention_mask": torch.ones(2, 5).bool(), "num_frames": 1, "height": 4, "width": 4}),
    "MochiTransformer3DModel": lambda: (
        {**_HEADS, "in_channels": 4, "pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 4,
         "max_sequence_length": 5, "activation_fn": "swiglu"},
        {"hidden_states": N(2, 4, 2, 8, 8), "encoder_hidden_states": N(*TEXT), "timestep": _TIME,
         "encoder_attention_mask": torch.ones(2, 5).bool()}),
    "WanTransformer3DModel": lambda: (
        {**_HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32,
         "ffn_dim": 32,
         "rope_max_seq_len": 32},
        {"hidden_states": N(2, 4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": N(*TEXT)}),
    "WanTransformer3DModel, with pictures": lambda: (
        {**_HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32,
         "ffn_dim": 32,
         "rope_max_seq_len": 32, "image_dim": 16, "added_kv_proj_dim": 48},
        {"hidden_states": N(2, 4, 2, 8, 8), "timestep": _TIME, "encoder_hidden_states": N(2, 512, 32),
         "encoder_hidden_states_image": N(2, 7, 16)}),
    "Lumina2Transformer2DModel": lambda: (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
         "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2),
         "axes_lens": (64, 64, 64), "cap_feat_dim": 32},
        {"hidden_states": _image(), "timestep": torch.rand(2), "encoder_hidden_states": N(*TEXT),
         "encoder_attention_mask": torch.ones(2, 5).bool()}),
    "SanaTransformer2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
         "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8},
        {"hidden_states": _image(), "encoder_hidden_states": N(*TEXT), "timestep": _TIME}),
    "AllegroTransformer3DModel": lambda: (
        {**_HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 48,
         "sample_width": 8,
         "sample_height": 8, "sample_frames": 2, "caption_channels": 32},
        {"hidden_states": N(2, 4, 2, 8, 8), "encoder_hidden_states": N(*TEXT), "timestep": _TIME,
         "attention_mask": torch.ones(2, 2, 8, 8), "encoder_attention_mask": torch.ones(2, 5)}),
    "HunyuanDiT2DModel": lambda: (
        {**_HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 32, "cross_attention_dim": 32,
         "cross_attention_dim_t5": 32, "pooled_projection_dim": 4, "text_len": 5, "text_len_t5": 6},
        {"hidden_states": _image(), "timestep": torch.ones(2), "encoder_hidden_states": N(*TEXT),
         "text_embedding_mask": torch.ones(2, 5), "encoder_hidden_states_t5": N(2, 6, 32),
         "text_embedding_mask_t5": torch.ones(2, 6), "image_meta_size": N(2, 6), "style": torch.zeros(2,
         dtype=torch.long),
         "image_rotary_emb": [N(16, 8), N(16, 8)]}),
    "PriorTransformer": lambda: (
        {**_HEADS, "embedding_dim": 16, "num_embeddings": 5, "additional_embeddings": 4},
        {"hidden_states": N(2, 16), "timestep": 2, "proj_embedding": N(2, 16), "encoder_hidden_states": N(2, 5, 16)}),
    "StableAudioDiTModel": lambda: (
        {**_HEADS, "sample_size": 4, "in_channels": 4, "num_key_value_attention_heads": 2, "out_channels": 4,
         "cross_attention_dim": 16, "time_proj_dim": 8, "global_states_input_dim": 8, "cross_attention_input_dim": 16},
        {"hidden_states": N(2, 4, 8), "timestep": torch.tensor([3, 3]), "encoder_hidden_states": N(2, 5, 16),
         "global_hidden_states": N(2, 1, 8), "rotary_embedding": (N(9, 4), N(9, 4))}),
    "LatteTransformer3DModel": lambda: (
        {**_HEADS, "in_channels": 4, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 32,
         "caption_channels": 32,
         "norm_type": "ada_norm_single", "video_length": 2, "num_embeds_ada_norm": 1000,
         "activation_fn": "gelu-approximate"},
        {"hidden_states": N(1, 4, 2, 8, 8), "timestep": torch.tensor([3]), "encoder_hidden_states": N(1, 5, 32),
         "enable_temporal_attentions": True}),
    "HunyuanVideoTransformer3DModel": lambda: (
        {**_HEADS, "in_channels": 4, "out_channels": 4, "num_single_layers": 1, "num_refiner_layers": 1,
         "patch_size": 1,
         "guidance_embeds": True, "text_embed_dim": 32, "pooled_projection_dim": 8, "rope_axes_dim": (2, 2, 4)},
        {"hidden_states": N(1, 4, 2, 4, 4), "timestep": torch.tensor([3]), "encoder_hidden_states": N(1, 5, 32),
         "encoder_attention_mask": torch.ones(1, 5), "pooled_projections": N(1, 8), "guidance": torch.ones(1)}),
}  # fmt: skip


def diffusers() -> Cases:
    """Models of diffusers at small sizes."""

    def build(name: str) -> Case:
        settings, inputs = MODELS[name]()
        return kinds[name](**settings), inputs

    package = importlib.import_module("diffusers")
    kinds = {name: getattr(package, name.partition(",")[0]) for name in MODELS}  # imported once, before any fork
    return {f"diffusers.{name}": partial(build, name) for name in MODELS}
