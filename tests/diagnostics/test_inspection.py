"""Inspection of models of several libraries, on text and pictures."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from repulsive.diagnostics.head_kinds import head_kinds
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.output_change import OutputChange
from repulsive.diagnostics.redundancy import Ablation
from repulsive.diagnostics.similarity import of_attention, of_weights
from repulsive.diagnostics.summary import as_json, as_text
from repulsive.errors import NoHeadsFound
from repulsive.heads import find_heads
from repulsive.pages.inspection_page import render_inspection
from tests.diagnostics.masked_lm import grids_of, masked_lm, text
from tests.heads.zoo import build

transformers = pytest.importorskip("transformers")


def test_inspection_on_text_without_labels():
    model, batches = masked_lm(), text()
    found = inspect_heads(model, batches, ablation=True)
    assert found.items == 4 and found.layers[1] == ("bert.encoder.layer.1.attention.self", 1, "encoder", 4)
    weights = of_weights(find_heads(model))
    assert [d.mean_cosine for d in found.diversity["weights"]] == pytest.approx([d.mean_cosine for d in weights])
    tokens = torch.cat([capture(model, b).layers[0].weights[0].flatten(0, 0) for b in batches])  # [4, M, T, S]
    real = torch.cat([torch.ones(2, 7), batches[1]["attention_mask"]]).bool()
    # The first batch has no mask and is weighted by its items; with masks every token has the same weight.
    batches[0]["attention_mask"] = torch.ones(2, 7, dtype=torch.long)
    even = inspect_heads(model, batches)
    torch.testing.assert_close(even.diversity["attention"][0].cosine, of_attention(tokens, real).cosine)
    assert even.ablation is None and "KL divergence" in found.metric
    own = OutputChange(model.eval(), batches)
    assert float(own(model).abs().max()) == 0
    assert (found.ablation.change > 0).all() and found.ablation.items.shape == (2, 4, 4)


def test_importance_and_ablation_without_labels_agree_on_heads_without_effect():
    model = masked_lm()
    with torch.no_grad():  # head 2 of layer 0 has no effect
        model.bert.encoder.layer[0].attention.output.dense.weight[:, 16:24] = 0
    found = inspect_heads(model, text(), ablation=True)
    assert found.importance[0, 2] == 0 and found.ablation.change[0, 2] == pytest.approx(0, abs=1e-12)
    assert found.least(found.importance, 1)[0][:2] == ("bert.encoder.layer.0.attention.self", 2)
    assert found.least(found.ablation.change, 1)[0][1] == 2


@pytest.mark.parametrize("name", ["llama, sdpa", "bart, sdpa", "albert, sdpa", "torch transformer", "timm", "additive"])
def test_any_model_can_be_inspected(name):
    model, inputs = build(name)
    found = inspect_heads(model, [inputs], ablation=True)
    assert set(found.diversity) == {"weights", "attention", "outputs"}
    assert len(found.diversity["outputs"]) == len(found.layers) == len(found.importance)
    assert "relative change" in found.metric and (found.ablation.change > 0).any()
    assert len(found.circuits.logits) == len(found.circuits.ov) == (0 if name == "additive" else len(found.layers))
    page = render_inspection(found, title="x")
    assert page.count('class="overlap"') == grids_of(found)


def test_without_inputs_weights_alone_are_measured_and_without_heads_it_is_an_error():
    found = inspect_heads(masked_lm())
    assert set(found.diversity) == {"weights"} and found.importance is None
    with pytest.raises(NoHeadsFound):
        inspect_heads(nn.Linear(2, 2))
    with pytest.raises(NoHeadsFound):
        inspect_heads(nn.Linear(2, 2), [torch.ones(3, 2)])


def test_notes_explain_what_is_not_measured():
    class Hidden(nn.Module):
        def __init__(self, out: str) -> None:
            super().__init__()
            self.num_heads, self.out_name = 2, out
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
            self.add_module(out, nn.Linear(8, 8))

        def forward(self, x):
            heads = self.v_proj(x) + self.q_proj(x) * self.k_proj(x)
            if self.out_name == "mystery":  # never called as a module, so that no trace finds it
                return nn.functional.linear(heads, self.mystery.weight)
            return self.out_proj(heads)

    found = inspect_heads(Hidden("out_proj"), [torch.randn(1, 3, 8)])
    assert set(found.diversity) == {"weights", "outputs"} and "attention is not measured" in found.notes[0]
    blind = inspect_heads(Hidden("mystery"), [torch.randn(1, 3, 8)])
    assert set(blind.diversity) == {"weights"} and "name it: out={" in blind.notes[0]
    assert f"note: {blind.notes[0]}" in as_text(blind)
    both = inspect_heads(nn.Sequential(Hidden("mystery"), Hidden("out_proj")), [torch.randn(1, 3, 8)])
    assert [name for name, *_ in both.layers] == ["1"] and len(both.importance) == 1
    assert "0: found no output projection" in both.notes[0] and "attention is not measured" in both.notes[1]


def test_kinds_are_labelled_for_models_that_read_token_ids_alone():
    model = masked_lm()
    found = inspect_heads(model, text(), separators=[3])
    assert found.kinds is not None and not any("kinds" in note for note in found.notes)
    own = head_kinds(model, separators=[3], length=24)
    assert found.kinds.thresholds == own.thresholds
    for kind, scores in own.scores.items():
        torch.testing.assert_close(found.kinds.scores[kind], scores, equal_nan=True)
    short = inspect_heads(masked_lm(max_position_embeddings=16, vocab_size=64), text(), twins=0)
    assert short.kinds is not None and short.kinds.scores["induction"].shape == (2, 4)
    image, inputs = build("vit, sdpa")
    other = inspect_heads(image, [inputs])
    assert other.kinds is None and "does not read input_ids alone" in other.notes[-1]
    assert as_json(other)["kinds"] is None and len(as_json(found)["kinds"]["scores"]["separator"]) == 2


def test_no_nan_is_printed_for_a_single_head():
    found = inspect_heads(masked_lm(num_attention_heads=1), text())
    assert "nan" not in as_text(found)
    assert "<td>nan</td>" not in render_inspection(found, title="one head")


def test_nan_is_null_in_json():
    found = inspect_heads(masked_lm(), text())
    lost = torch.full((len(found.layers), 4), math.nan, dtype=torch.float64)
    spoilt = replace(found, ablation=Ablation(tuple(name for name, *_ in found.layers), math.nan, lost))
    assert json.loads(json.dumps(as_json(spoilt), allow_nan=False))["ablation"]["baseline"] is None


def clip(texts, lengths):
    """A small CLIP with five image positions, and batches of padded texts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 30, "max_position_embeddings": 32, "eos_token_id": 29, "bos_token_id": 0}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**sizes, "image_size": 8, "patch_size": 4}, projection_dim=8
    )
    model = transformers.CLIPModel(config).eval()
    batches = []
    for length in texts:
        mask = torch.tensor([[float(place < real) for place in range(length)] for real in lengths]).long()
        tokens = torch.randint(1, 28, (len(lengths), length))
        image = torch.randn(len(lengths), 3, 8, 8)
        batches.append({"input_ids": tokens, "attention_mask": mask, "pixel_values": image})
    return model, batches


def test_a_text_mask_is_not_applied_to_the_image():
    model, (batch,) = clip([5], [2, 5])  # as many tokens as image positions
    maps = inspect_heads(model, [batch]).maps
    shapes = {name: [tuple(item[name].shape) for item in maps] for name in maps[0]}
    (text,) = (shape for name, shape in shapes.items() if "text" in name)
    (vision,) = (shape for name, shape in shapes.items() if "vision" in name)
    assert text == [(2, 2, 2), (2, 5, 5)] and vision == [(2, 5, 5), (2, 5, 5)]


def test_image_layers_are_weighted_by_image_positions():
    model, batches = clip([24, 4], [3, 3])
    cosines = [each.mean_cosine for each in _vision(model, batches)]
    separate = [each.mean_cosine for batch in batches for each in _vision(model, [batch])]
    assert cosines == [pytest.approx(sum(separate) / 2)]


def _vision(model, batches):
    found = inspect_heads(model, batches).diversity["outputs"]
    return [each for each in found if "vision" in each.name]


def test_windows_of_an_image_are_not_shown_as_items():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4
    )
    model = transformers.SwinModel(config).eval()
    found = inspect_heads(model, [{"pixel_values": torch.randn(2, 3, 16, 16)}])
    assert [len(item) for item in found.maps] == [1, 1]  # the second stage has one window per image
    assert any("attends within 8 parts of 2 items" in note for note in found.notes)
