"""Try portable pruning on a tiny random model of many transformers families, and list which work.

    python -m studies.pruning.families --out results/pruning

A family is portable if the pruned model, saved and loaded by plain transformers, computes what the ablated model
computes. Weights are random, in float64 (experts in float32): this tests layouts, not quality.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from studies.output import save

from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.portable_pruning import Selection, prove_equal, prune_portably, select_heads
from repulsive.errors import RepulsiveError

TEXT = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMPLICIT = {**TEXT, "num_key_value_heads": 2}  # the head size is width / heads
EXPERTS = {**GROUPED, "num_local_experts": 4}
VISION = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}
SEQUENCE = {
    "vocab_size": 60,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
}
T5 = {"vocab_size": 60, "d_model": 48, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 6}
GPT2 = {"vocab_size": 60, "n_embd": 48, "n_layer": 2, "n_head": 6}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 16}
# family -> model class, config class, fields of the config
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, SmolLM2": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", EXPERTS),
    "Qwen 2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", GROUPED),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED),
    "Phi": ("PhiForCausalLM", "PhiConfig", IMPLICIT),
    "Phi 3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", IMPLICIT),
    "OLMo 2": ("Olmo2ForCausalLM", "Olmo2Config", IMPLICIT),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", IMPLICIT),
    "GLM 4": ("Glm4ForCausalLM", "Glm4Config", GROUPED),
    "SmolLM 3": ("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", EXPERTS),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", IMPLICIT),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6},
    ),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "BERT, MiniLM": ("BertForMaskedLM", "BertConfig", TEXT),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", TEXT),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "BART": ("BartForConditionalGeneration", "BartConfig", SEQUENCE),
    "Whisper": ("WhisperModel", "WhisperConfig", {**SEQUENCE, **AUDIO}),
    "ViT": ("ViTModel", "ViTConfig", VISION),
    "DINOv2": ("Dinov2Model", "Dinov2Config", VISION),
    "CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
}


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Random inputs for a model that reads text, images or sound."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if model.main_input_name == "input_features":
        features = torch.randn(2, 8, 32, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def try_family(model_class: str, config_class: str, fields: dict[str, Any]) -> tuple[bool, str]:
    """Prune a tiny model, save it and load it with plain transformers.

    Returns:
        Whether it is portable; the numbers of heads, or the reason of the refusal.
    """
    default = torch.get_default_dtype()
    dtype = torch.float32 if fields is EXPERTS else torch.float64  # transformers has no experts in float64
    torch.set_default_dtype(dtype)  # constants that a model computes when it is built, such as Gemma's, need it
    try:
        selection = _prune_and_load(model_class, config_class, fields, dtype)
    except RepulsiveError as error:
        return False, str(error).split(". ")[0]  # the rest is advice
    finally:
        torch.set_default_dtype(default)
    before, after = selection.heads, selection.kv_heads
    return True, f"{before[1]} of {before[0]} query heads, {after[1]} of {after[0]} key-value heads"


def _prune_and_load(model_class: str, config_class: str, fields: dict[str, Any], dtype: torch.dtype) -> Selection:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields)).eval()
    inputs = inputs_of(model)
    heads = Heads(model, inputs)
    scores = torch.rand(len(heads.layers), heads.layers[0].num_heads, generator=torch.Generator().manual_seed(2))
    selection = select_heads(heads, scores, 0.67)
    smaller = prune_portably(heads, selection, inputs)
    with tempfile.TemporaryDirectory() as folder:
        smaller.save_pretrained(folder)  # type: ignore[operator]
        loaded = type(model).from_pretrained(folder, dtype=dtype).eval()
    prove_equal(heads, selection, loaded, inputs)
    return selection


def main(words: Sequence[str] | None = None) -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/pruning"), help="folder of the results")
    arguments = parser.parse_args(words)
    rows = []
    for family, (model_class, config_class, fields) in FAMILIES.items():
        is_portable, detail = try_family(model_class, config_class, fields)
        rows.append({"family": family, "class": model_class, "portable": is_portable, "detail": detail})
        print(f"{family}: {'portable' if is_portable else 'refused'}, {detail}", flush=True)
    date = datetime.now(UTC).date().isoformat()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    save(arguments.out / "families.json", {"date": date, "versions": versions, "rows": rows})
    lines = [
        "# Families that can be pruned portably",
        "",
        "Tiny random models in float64 (experts in float32), pruned from 6 to 4 heads per layer, saved, loaded by "
        "plain transformers and compared with the ablated model.",
        "",
        "| family | class | result | detail |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['family']} | `{row['class']}` | {'portable' if row['portable'] else 'refused'} | {row['detail']} |"
            for row in rows
        ),
        "",
        f"`python -m studies.pruning.families` (torch {torch.__version__}, transformers {transformers.__version__}, "
        f"CPU, {date})",
        "",
    ]
    save(arguments.out / "families.md", "\n".join(lines))


if __name__ == "__main__":
    main()
