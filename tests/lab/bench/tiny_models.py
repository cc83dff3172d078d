"""Models of the benchmark, small enough for a test."""

from repulsive.lab.bench.presets import find_preset
from repulsive.lab.bench.training_variants import SharedModel, TrainingVariant

NARROW = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TINY = {
    "bert-base": {**NARROW, "vocab_size": 200},
    "vit-b16": {**NARROW, "image_size": 32, "num_labels": 10},
    "gpt2": {"n_embd": 32, "n_head": 4, "vocab_size": 200},
    "llama": {**NARROW, "num_key_value_heads": 2, "vocab_size": 200},
}


def tiny_model(name, compiled=False, device="cpu", cuda_graphs=False, **more):
    preset = find_preset(name)
    model = preset.build(device, layers=1, length=16, overrides={**TINY[name], **more})
    inputs = preset.inputs(model.config, 2, 1 if preset.unit == "images" else 16, device)
    return SharedModel(model, inputs, compiled=compiled, cuda_graphs=cuda_graphs)


def tiny_variant(name, case=None, steps=2, max_norm=None, **more):
    return TrainingVariant(tiny_model(name, **more), case, steps=steps, max_norm=max_norm)
