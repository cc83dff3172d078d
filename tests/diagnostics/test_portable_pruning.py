"""Pruned models are ordinary checkpoints: plain transformers loads them and gets the outputs of the ablated model."""

import json

import pytest
import torch

from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.portable_pruning import prove_equal, prune_portably, select_heads
from repulsive.errors import HeadLayoutError, SelectionError

transformers = pytest.importorskip("transformers")

GROUPED = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
}
ENCODER = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
}
VISION = {**ENCODER, "image_size": 16, "patch_size": 4}
T5 = {"vocab_size": 60, "d_model": 48, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 6}
LATENT = {k: v for k, v in GROUPED.items() if k != "head_dim"} | {  # head_dim is that of rotary positions
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
PORTABLE = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "T5ForConditionalGeneration": ("T5Config", T5),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENT),
    "ViTModel": ("ViTConfig", {k: v for k, v in VISION.items() if k != "vocab_size"}),
}
REFUSED = {
    "BertForMaskedLM": ("BertConfig", ENCODER, "width / heads"),
    "ElectraForMaskedLM": ("ElectraConfig", ENCODER, "width / heads"),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 60, "n_embd": 48, "n_layer": 2, "n_head": 6}, "width / heads"),
    "FalconForCausalLM": (
        "FalconConfig",
        {k: v for k, v in ENCODER.items() if k != "intermediate_size"},
        "width / heads",
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", {k: v for k, v in GROUPED.items() if k != "head_dim"}, "spans all heads"),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name, config, fields):
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**fields)).eval()


def inputs_of(model):
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 60, (2, 9), generator=generator)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def scores_of(heads):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(len(heads.layers), heads.layers[0].num_heads, generator=generator)


@pytest.mark.parametrize("name", PORTABLE)
def test_plain_transformers_computes_the_ablated_model(name, tmp_path):
    model = build(name, *PORTABLE[name])
    inputs = inputs_of(model)
    heads = Heads(model, inputs)
    selection = select_heads(heads, scores_of(heads), 0.67)
    assert selection.heads == (6, 4)
    smaller = prune_portably(heads, selection, inputs)
    smaller.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert prove_equal(heads, selection, loaded, inputs) <= 1e-10
    whole = model.config.to_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {key for key in config if key in whole and config[key] != whole[key]} - {"transformers_version", "dtype"}
    assert changed <= {"num_attention_heads", "num_key_value_heads", "num_heads", "head_dim", "architectures"}
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_classes_that_cannot_be_portable_are_refused_with_the_reason(name):
    config, fields, reason = REFUSED[name]
    model = build(name, config, fields)
    heads = Heads(model, inputs_of(model))
    with pytest.raises(HeadLayoutError, match=reason):
        prune_portably(heads, select_heads(heads, scores_of(heads), 0.67), inputs_of(model))


class Few(transformers.LlamaForCausalLM):
    def __init__(self, config):
        if 1 < config.num_attention_heads < 6:
            raise ValueError("needs 1 or 6 heads")
        super().__init__(config)


def test_the_reason_of_a_class_that_refuses_some_numbers_of_heads_is_named():
    model = Few(transformers.LlamaConfig(**GROUPED)).eval()
    heads = Heads(model, inputs_of(model))
    with pytest.raises(HeadLayoutError, match="Few cannot be built with fewer heads: ValueError: needs 1 or 6 heads"):
        prune_portably(heads, select_heads(heads, scores_of(heads), 0.67), inputs_of(model))


def pruned_llama():
    """Prune a Llama to two thirds of its heads; return its heads, the selection, the smaller model and inputs."""
    model = build("LlamaForCausalLM", *PORTABLE["LlamaForCausalLM"])
    inputs = inputs_of(model)
    heads = Heads(model, inputs)
    selection = select_heads(heads, scores_of(heads), 0.67)
    smaller = prune_portably(heads, selection, inputs)
    return heads, selection, smaller, inputs


def test_generation_is_that_of_the_ablated_model_with_and_without_cache():
    heads, selection, smaller, inputs = pruned_llama()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with heads.ablated(selection.removed):
        expected = heads.model.generate(**inputs, **settings)
    for cache in (True, False):
        assert torch.equal(smaller.generate(**inputs, **settings, use_cache=cache), expected)


@pytest.mark.gpu
def test_the_smaller_model_is_on_the_device_of_the_whole_one():
    model = build("LlamaForCausalLM", *PORTABLE["LlamaForCausalLM"]).cuda()
    inputs = {name: value.cuda() for name, value in inputs_of(model).items()}
    heads = Heads(model)
    smaller = prune_portably(heads, select_heads(heads, torch.rand(2, 6), 0.5), inputs)
    assert {parameter.device.type for parameter in smaller.parameters()} == {"cuda"}


def test_the_best_heads_of_each_group_stay():
    """6 heads, 2 key-value heads, by hand: of heads 0-2 and 3-5 the two with the largest scores stay."""
    model = build("LlamaForCausalLM", *PORTABLE["LlamaForCausalLM"])
    heads = Heads(model)
    scores = torch.tensor([[9.0, 1, 8, 2, 7, 6], [1.0, 2, 3, 6, 5, 4]])
    selection = select_heads(heads, scores, 0.67)
    assert selection.kept == ((0, 2, 4, 5), (1, 2, 3, 4)) and selection.kv_heads == (2, 2)
    assert selection.removed == [(0, 1), (0, 3), (1, 0), (1, 5)]
    half = select_heads(heads, scores, 0.5)  # one group of three, or two groups... 3 = 1 x 3
    assert half.heads == (6, 3) and half.kept == ((0, 1, 2), (3, 4, 5)) and half.kept_kv == ((0,), (1,))


def test_the_number_of_key_value_heads_can_be_fixed():
    """4 of 6 heads: 2 groups of 2, since one group has only 3 heads; 3 of 6 heads only as 1 group of 3."""
    model = build("LlamaForCausalLM", *PORTABLE["LlamaForCausalLM"])
    heads = Heads(model)
    scores = torch.tensor([[9.0, 1, 8, 2, 7, 6], [1.0, 2, 3, 6, 5, 4]])
    one = select_heads(heads, scores, 0.67, kv_heads=1)
    assert one.heads == (6, 3) and one.kv_heads == (2, 1) and one.kept == ((0, 1, 2), (3, 4, 5))
    assert select_heads(heads, scores, 0.67, kv_heads=2) == select_heads(heads, scores, 0.67)
    with pytest.raises(SelectionError, match="choose 1 to 2"):
        select_heads(heads, scores, 0.67, kv_heads=3)


def test_all_layers_of_t5_keep_the_same_heads():
    model = build("T5ForConditionalGeneration", *PORTABLE["T5ForConditionalGeneration"])
    heads = Heads(model)
    selection = select_heads(heads, scores_of(heads), 0.5)
    by_stack = {}
    for layer, kept in zip(heads.layers, selection.kept, strict=True):
        by_stack.setdefault(layer.where, set()).add(kept)
    assert all(len(kept) == 1 for kept in by_stack.values())


@pytest.mark.parametrize("keep", [0.0, 1.0, -1, 75])
def test_a_share_that_removes_nothing_or_everything_is_refused(keep):
    model = build("LlamaForCausalLM", *PORTABLE["LlamaForCausalLM"])
    heads = Heads(model)
    with pytest.raises(SelectionError, match="above 0 and below 1"):
        select_heads(heads, scores_of(heads), keep)


def test_numbers_that_the_config_refuses_are_not_chosen():
    """Llama's config asks for a width that the number of heads divides: of 10, not of 7 or 8."""
    fields = {**GROUPED, "hidden_size": 50, "num_attention_heads": 10, "num_key_value_heads": 10, "head_dim": 6}
    model = build("LlamaForCausalLM", "LlamaConfig", fields)
    heads = Heads(model)
    assert select_heads(heads, scores_of(heads), 0.55).heads == (10, 5)
    with pytest.raises(SelectionError, match="accepts only 1, 2, 5 heads"):
        select_heads(heads, scores_of(heads), 0.9)


def test_a_smaller_model_that_computes_something_else_is_refused():
    heads, selection, smaller, inputs = pruned_llama()
    with torch.no_grad():
        smaller.model.layers[0].self_attn.q_proj.weight[0] += 1
    with pytest.raises(HeadLayoutError, match="differs from the ablated model"):
        prove_equal(heads, selection, smaller, inputs)


def test_a_smaller_model_that_does_not_run_is_refused():
    heads, selection, smaller, inputs = pruned_llama()
    smaller.model.layers[0].self_attn.head_dim = 5
    with pytest.raises(HeadLayoutError, match=r"LlamaForCausalLM does not run with 4 heads: .* Nothing was written"):
        prove_equal(heads, selection, smaller, inputs)
