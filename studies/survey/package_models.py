"""Small models of other packages, each with an example, for `studies.survey.packages`.

Sizes are passed by name to every class that has an argument of that name.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Case = tuple[nn.Module, Any]
Cases = dict[str, Callable[[], Case]]
PACKAGES = {
    "diffusers": "diffusers", "vit-pytorch": "vit_pytorch", "x-transformers": "x_transformers",
    "open_clip_torch": "open_clip", "litgpt": "litgpt", "torchtune": "torchtune",
    "sentence-transformers": "sentence_transformers", "timm": "timm",
}  # fmt: skip

VIT_SIZES: dict[str, Any] = {
    "image_size": 32, "img_size": 32, "patch_size": 8, "num_classes": 3, "dim": 32, "depth": 2, "heads": 4,
    "mlp_dim": 32,
    "dim_head": 8, "cls_depth": 1, "max_tokens_per_depth": (8, 6), "seq_len": 32, "image_patch_size": 8, "frames": 4,
    "frame_patch_size": 2, "freq_patch_size": 8, "num_residual_streams": 2, "mlp_mult": 2, "num_hierarchies": 2,
    "block_repeats": (1, 1), "max_frames": 4, "ndim": 2, "input_shape": (32, 32), "pre_loop_depth": 1,
    "post_loop_depth": 1,
    "num_looped_blocks": 1, "loop_depth": 2, "highres_patch_size": 8, "cross_attn_heads": 4, "cross_attn_dim_head": 8,
    "spatial_depth": 2, "temporal_depth": 2, "num_slots": 4, "decoder_dim": 32, "decoder_heads": 4,
    "decoder_dim_head": 8, "masking_ratio": 0.5, "hidden_layer": "to_latent", "projection_hidden_size": 16,
    "num_classes_K": 16, "dim_action": 6, "self_attn_dim_head": 8, "num_frames": 4,
}  # fmt: skip
VIT_MODELS = ("vit", "net", "encoder", "image_net", "teacher", "student")  # arguments that take a vision Transformer
VIT_OWN: dict[str, dict[str, Any]] = {  # sizes that a file of vit-pytorch needs to differ
    "cross_vit": {"sm_dim": 24, "lg_dim": 32, "image_size": 48, "sm_enc_heads": 4, "lg_enc_heads": 4,
    "lg_enc_depth": 1, "depth": 1},
    "crossformer": {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "global_window_size": (2, 2, 2, 2),
    "local_window_size": 2, "image_size": 128},
    "max_vit": {"depth": (1, 1), "window_size": 2, "dim_conv_stem": 16},
    "max_vit_with_registers": {"depth": (1, 1), "window_size": 2, "dim_conv_stem": 16},
    "mobile_vit": {"dims": (16, 24, 32), "channels": (8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64), "image_size": (64,
    64), "patch_size": (1, 1)},
    "pit": {"depth": (1, 1), "heads": 4},
    "levit": {"dim": (32, 48, 64), "depth": 1, "heads": (2, 3, 4), "image_size": 64},
    "regionvit": {"dim": (32, 32, 64, 64), "depth": (1, 1, 1, 1), "window_size": 2},
    "scalable_vit": {"depth": (1, 1, 1, 1), "heads": (2, 2, 2, 2), "reduction_factor": (4, 2, 1, 1),
    "window_size": (2, 2, None, None), "image_size": 64},
    "sep_vit": {"depth": (1, 1), "heads": (2, 4), "image_size": 56},
    "cct": {"num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "embedding_dim": 32, "img_size": 32},
    "cct_3d": {"num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "embedding_dim": 32, "img_size": 32,
    "num_frames": 4},
    "twins_svt": {f"s{stage}_{name}": value for stage in (1, 2, 3, 4) for name, value in (("local_patch_size", 2),
    ("global_k", 2), ("emb_dim", 64), ("depth", 1))} | {"s4_global_k": 1, "image_size": 64},
    "look_vit": {"image_size": 48, "patch_size": 12, "highres_patch_size": 8},
    "vat_siglip": {"siglip_image_size": 32, "siglip_patch_size": 8, "siglip_dim": 32, "siglip_depth": 2,
    "siglip_heads": 4, "siglip_mlp_dim": 32},
    "nest": {"patch_size": 4},
}  # fmt: skip


def _named(kind: Callable[..., nn.Module], sizes: dict[str, Any], takes_any: bool = False) -> nn.Module:
    """Build a class with those sizes for which it has arguments; with all if `takes_any`."""
    takes = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in sizes.items() if takes_any or name in takes})


def vit_pytorch() -> Cases:
    """The last class of each file of vit-pytorch; if it takes a vision Transformer, the one of its file or `ViT`."""
    package = importlib.import_module("vit_pytorch")
    cases: Cases = {}
    for module in pkgutil.iter_modules(package.__path__):

        def build(name: str = module.name) -> Case:
            file = importlib.import_module(f"vit_pytorch.{name}")
            kinds = [x for x in vars(file).values() if inspect.isclass(x) and x.__module__ == file.__name__]
            modules = [kind for kind in kinds if issubclass(kind, nn.Module)]
            if not modules:
                raise NotImplementedError(f"vit_pytorch.{name} has no module")
            is_cct = name.startswith("cct")  # it passes on any argument
            sizes = VIT_OWN[name] if is_cct else VIT_SIZES | VIT_OWN.get(name, {})
            inner = getattr(file, "ViT", package.ViT)
            models = {
                argument: _named(inner, sizes)
                for argument in VIT_MODELS
                if argument in inspect.signature(modules[-1]).parameters
            }
            model = _named(modules[-1], sizes | models, is_cct)
            side = sizes.get("image_size", 32)
            shape: tuple[int, ...] = (side, side) if isinstance(side, int) else side
            if "1d" in name:
                shape = (32,)
            elif any(word in name for word in ("3d", "vivit", "video")):
                shape = (4, 32, 32)
            views = (1,) if name.startswith("vat") else ()
            return model, (torch.randn(2, *views, 3, *shape),)

        cases[f"vit_pytorch.{module.name}"] = build
    return cases


def timm_classes() -> Cases:
    """Single attention modules of timm whose models are large, or that have options which few models use."""

    def case(path: str, *arguments: Any, inputs: tuple[Any, ...], **options: Any) -> Callable[[], Case]:
        module, _, name = path.rpartition(".")
        return lambda: (getattr(importlib.import_module(f"timm.{module}"), name)(*arguments, **options), inputs)

    tokens, picture = torch.randn(2, 16, 32), torch.randn(2, 4, 4, 32)
    rope, eva = "layers.attention.AttentionRope", "models.eva.EvaAttention"
    sam2 = "models.hieradet_sam2.MultiScaleAttention"
    of_picture = {"inputs": (tokens, (4, 4))}
    norms = {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm}
    cases = {
        f"{rope}": case(rope, 32, 4, inputs=(tokens,)),
        f"{rope}, separate": case(rope, 32, 4, qkv_fused=False, inputs=(tokens,)),
        f"{rope}, grouped heads": case(rope, 32, 4, qkv_fused=False, num_kv_heads=2, inputs=(tokens,)),
        f"{rope}, norms and gate": case(rope, 32, 4, gated=True, attn_head_dim=4, **norms, inputs=(tokens,)),
        f"{eva}, separate": case(eva, 32, 4, qkv_fused=False, **norms, inputs=(tokens,)),
        f"{sam2}": case(sam2, 32, 32, 4, inputs=(picture,)),
        f"{sam2}, pooled queries": case(sam2, 32, 64, 4, q_pool=nn.MaxPool2d(2, 2), inputs=(picture,)),
        "models.vision_transformer_sam.Attention": case(
            "models.vision_transformer_sam.Attention", 32, 4, use_rel_pos=True, input_size=(4, 4), inputs=(picture,)
        ),
        "models.fastvit.Attention": case("models.fastvit.Attention", 32, 8, inputs=(torch.randn(2, 32, 4, 4),)),
        "models.twins.LocallyGroupedAttn": case("models.twins.LocallyGroupedAttn", 32, 4, ws=2, **of_picture),
        "models.twins.GlobalSubSampleAttn": case("models.twins.GlobalSubSampleAttn", 32, 4, sr_ratio=2, **of_picture),
        "models.pvt_v2.Attention": case("models.pvt_v2.Attention", 32, 4, sr_ratio=2, **of_picture),
        "layers.attention_pool.AttentionPoolLatent": case(
            "layers.attention_pool.AttentionPoolLatent", 32, num_heads=4, latent_len=2, inputs=(tokens,)
        ),
        "models.volo.ClassAttention": case("models.volo.ClassAttention", 32, 4, inputs=(tokens,)),
    }
    return {f"timm.{name}": build for name, build in cases.items()}


X_SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "flash": {"attn_flash": True}, "alibi": {"alibi_pos_bias": True},
    "one kv head": {"attn_one_kv_head": True}, "two kv heads": {"attn_kv_heads": 2}, "qk norm": {"attn_qk_norm": True},
    "talking heads before": {"attn_pre_talking_heads": True}, "talking heads after": {"attn_post_talking_heads": True},
    "sigmoid": {"attn_sigmoid": True}, "head scale": {"attn_head_scale": True},
    "value gate": {"attn_gate_values": True},
    "sparse top-k": {"attn_sparse_topk": 2}, "memory kv": {"attn_num_mem_kv": 3}, "t5 bias": {"rel_pos_bias": True},
    "cope": {"attn_use_cope": True}, "laser": {"attn_laser": True},
    "selective": {"attn_selective": True}, "value residual": {"add_value_residual": True},
}  # fmt: skip

X_NEEDS: dict[str, dict[str, Any]] = {  # further options without which a switch changes nothing or is refused
    "sparse_topk_straight_through": {"attn_sparse_topk": 2}, "gate_values_headwise": {"attn_gate_values": True},
    "output_gate_headwise": {"attn_output_gate": True}, "qk_norm_dim_scale": {"attn_qk_norm": True},
    "data_dependent_alibi_per_row": {"attn_data_dependent_alibi": True}, "use_latent_q": {"attn_dim_latent_q": 16},
    "cope_soft_onehot_pos": {"attn_use_cope": True}, "cope_talking_heads": {"attn_use_cope": True},
    "swiglu_values": {"attn_gate_values": True},
    "use_latent_kv": {"attn_dim_latent_kv": 16}, "learned_value_residual_mix": {"add_value_residual": True},
}  # fmt: skip
X_OF_DECODER = ("learned_value_residual_mix", "qkv_receive_diff_residuals")  # options of the decoder, without a prefix


def x_transformers() -> Cases:
    """The model classes of x-transformers, and a decoder for each option of its attention.

    Options are those of `X_SWITCHES` and every other switch in the signature of the attention class.
    """
    x = importlib.import_module("x_transformers")
    arguments = inspect.signature(x.Attention).parameters.values()
    switches = [argument.name for argument in arguments if argument.default is False]
    listed = {switch.removeprefix("attn_") for switches in X_SWITCHES.values() for switch in switches} | {"causal"}
    prefixes = {name: "" if name in X_OF_DECODER else "attn_" for name in switches}
    others = {
        name.replace("_", " "): {f"{prefixes[name]}{name}": True} | X_NEEDS.get(name, {})
        for name in switches
        if name not in listed
    }

    def decoder(switches: dict[str, Any]) -> nn.Module:
        torch.manual_seed(0)
        layers = x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **switches)
        model: nn.Module = x.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
        return model.eval()

    def build(switches: dict[str, Any]) -> Case:
        model, plain, tokens = decoder(switches), decoder({}), torch.randint(0, 50, (2, 9))
        is_same_class = list(model.state_dict()) == list(plain.state_dict()) and repr(model) == repr(plain)
        if switches and is_same_class and torch.equal(model(tokens), plain(tokens)):
            raise NotImplementedError("the option alone changes nothing")
        return model, (tokens,)

    sizes = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}
    tokens, vectors = torch.randint(0, 50, (2, 9)), torch.randn(2, 9, 32)

    def other(name: str) -> Case:
        if name == "Encoder":
            return x.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=x.Encoder(**sizes)), (tokens,)
        if name == "CrossAttender":
            return x.CrossAttender(**sizes), {"x": vectors, "context": torch.randn(2, 7, 32)}
        if name == "XTransformer":
            both = {"num_tokens": 50, "depth": 2, "heads": 4, "max_seq_len": 16, "attn_dim_head": 8}
            both = {f"{side}_{key}": value for side in ("enc", "dec") for key, value in both.items()}
            return x.XTransformer(dim=32, **both), {"src": tokens, "tgt": tokens}
        if name == "ViTransformerWrapper":
            model = x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=3, attn_layers=x.Encoder(**sizes))
            return model, (torch.randn(2, 3, 32, 32),)
        model = x.ContinuousTransformerWrapper(dim_in=32, max_seq_len=16, attn_layers=x.Decoder(**sizes))
        return model, (vectors,)

    classes = ("Encoder", "CrossAttender", "XTransformer", "ViTransformerWrapper", "ContinuousTransformerWrapper")

    options: Cases = {
        f"x_transformers, {name}": partial(build, switches) for name, switches in (X_SWITCHES | others).items()
    }
    return {f"x_transformers.{name}": partial(other, name) for name in classes} | options


def open_clip() -> Cases:
    """open_clip models with each of its attention classes."""
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
    text = {"context_length": 12, "vocab_size": 60, "width": 32, "heads": 4, "layers": 2}
    variants: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "plain": ({}, {}, "CLIP"), "CoCa": ({"output_tokens": True}, {"embed_cls": True, "output_tokens": True},
        "CoCa"),
        "attentional pool": ({"attentional_pool": True, "attn_pooler_heads": 4, "attn_pooler_queries": 4}, {}, "CLIP"),
        "scaled cosine": ({"block_type": "custom", "scaled_cosine_attn": True}, {}, "CLIP"),
        "custom block": ({"block_type": "custom"}, {}, "CLIP"), "qk norm": ({"block_type": "custom",
        "qk_norm": True}, {}, "CLIP"),
    }  # fmt: skip

    def build(name: str) -> Case:
        clip = importlib.import_module("open_clip.model")
        more_vision, more_text, kind = variants[name]
        if kind == "CoCa":
            coca = importlib.import_module("open_clip.coca_model").CoCa
            decoder = {
                "context_length": 12,
                "vocab_size": 60,
                "width": 32,
                "heads": 4,
                "layers": 2,
                "attn_pooler_heads": 4,
            }
            model = coca(
                32, decoder, text | more_text, vision | {"attentional_pool": True, "attn_pooler_heads": 4} | more_vision
            )
        else:
            known = inspect.signature(clip.CLIPVisionCfg).parameters
            model = clip.CLIP(32, {k: v for k, v in (vision | more_vision).items() if k in known}, text | more_text)
        return model, {"image": torch.randn(2, 3, 32, 32), "text": torch.randint(1, 60, (2, 12))}

    return {f"open_clip, {name}": partial(build, name) for name in variants}


def litgpt() -> Cases:
    """One litgpt model for each way of sharing key-value heads, and some other options."""
    base = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 16,
        "padded_vocab_size": 60,
        "vocab_size": 60,
        "intermediate_size": 48,
    }
    variants: dict[str, dict[str, Any]] = {
        "all kv heads": {}, "two kv heads": {"n_query_groups": 2}, "one kv head": {"n_query_groups": 1},
        "qk norm": {"norm_qk": True}, "parallel": {"parallel_residual": True, "shared_attention_norm": True},
        "Llama MLP": {"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "bias": False},
    }  # fmt: skip

    def build(more: dict[str, Any]) -> Case:
        package = importlib.import_module("litgpt")
        return package.GPT(package.Config(**base, **more)), (torch.randint(0, 60, (2, 9)),)

    return {f"litgpt, {name}": partial(build, more) for name, more in variants.items()}


def torchtune() -> Cases:
    """The decoders of torchtune, and its encoders of images and of text."""
    sizes = {
        "vocab_size": 60,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "embed_dim": 32,
        "intermediate_dim": 48,
        "mlp_dim": 48,
        "max_seq_len": 16,
        "rel_pos_num_buckets": 8,
        "rel_pos_max_dist": 16,
        "norm_eps": 1e-6,
        "tile_size": 32,
        "patch_size": 8,
        "max_num_tiles": 1,
    }
    names = {name: name for name in ("llama2", "llama3", "llama3_1", "gemma", "gemma2", "phi3", "qwen2", "mistral")}
    names |= {"clip": "clip_vision_encoder", "t5": "t5_encoder"}

    def build(name: str) -> Case:
        model = _named(getattr(importlib.import_module(f"torchtune.models.{name}"), names[name]), sizes)
        if name == "clip":
            return model, (torch.randn(2, 1, 1, 3, 32, 32), torch.ones(2, 1, 2, dtype=torch.int64))
        return model, (torch.randint(0, 60, (2, 16)),)

    return {f"torchtune.{name}": partial(build, name) for name in names}
