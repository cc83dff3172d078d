"""Label-free measures against their formulas; inspection of models; its text, JSON and page."""

import html
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from repulsive.diagnostics.head_kinds import head_kinds
from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.output_change import Output, OutputChange, label_free_loss, output_change, read_output
from repulsive.diagnostics.redundancy import Ablation
from repulsive.diagnostics.similarity import of_attention, of_weights
from repulsive.diagnostics.summary import as_json, as_text
from repulsive.diagnostics.verdict import verdict
from repulsive.errors import DataError, NoHeadsFound
from repulsive.heads import find_heads
from repulsive.pages.html.document import write_whole
from repulsive.pages.inspection_page import layered_examples, render_inspection
from tests.heads.zoo import SMALL, build, ids
from tests.pages.browser import driven_browser, driven_page, needs_browser, needs_driver, open_page, violations

transformers = pytest.importorskip("transformers")


def masked_lm(**changes):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**SMALL, **changes}))
    with torch.no_grad():  # with initial weights, heads have little effect
        for name, parameter in model.named_parameters():
            if "attention" in name and parameter.ndim == 2:
                parameter.mul_(15)
    return model


def text():
    """Two batches; the second has padding."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return [{"input_ids": ids()}, {"input_ids": ids().flip(1), "attention_mask": mask}]


def grids_of(found):
    """Number of cosine matrices that the page draws."""
    pairs = [d.num_heads > 1 for each in found.diversity.values() for d in each]
    return sum(pairs) + sum(c.similarity.num_heads > 1 for c in found.circuits.logits + found.circuits.ov)


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 5), (3, 2, 2, 5)])
def test_change_of_logits_is_the_kl_divergence(shape):
    make = torch.Generator().manual_seed(0)
    old, new = torch.randn(shape, generator=make), torch.randn(shape, generator=make)
    found = output_change(Output("logits", old), Output("logits", new))
    for item in range(3):
        p, q = (x[item].double().reshape(-1, 5).softmax(-1).tolist() for x in (old, new))
        each = [sum(a * math.log(a / b) for a, b in zip(r, s, strict=True)) for r, s in zip(p, q, strict=True)]
        assert float(found[item]) == pytest.approx(sum(each) / len(each))
    assert output_change(Output("logits", old), Output("logits", old)).tolist() == [0.0] * 3


def test_change_of_states_is_relative_and_leaves_padding_out():
    make = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 3, 4, generator=make), torch.randn(2, 3, 4, generator=make)
    real = torch.tensor([[True, True, False], [True, True, True]])
    found = output_change(Output("states", old), Output("states", new), real)
    assert float(found[0]) == pytest.approx(float((new[0, :2] - old[0, :2]).norm() / old[0, :2].norm()))
    assert float(found[1]) == pytest.approx(float((new[1] - old[1]).norm() / old[1].norm()))
    scaled = output_change(Output("states", 7 * old), Output("states", 7 * new), real)
    torch.testing.assert_close(scaled, found)
    other = output_change(Output("logits", old), Output("logits", new), real)
    moved = new.clone()
    moved[0, 2] += 100
    torch.testing.assert_close(output_change(Output("logits", old), Output("logits", moved), real), other)


@pytest.mark.parametrize("kind", ["states", "logits"])
def test_padding_may_be_nan(kind):
    """Attention without a key gives NaN, and so do queries of padding under some masks."""
    old, real = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, True, True]])
    new = old + 0.1
    expected = output_change(Output(kind, old), Output(kind, new), real)
    old[0, 2] = new[0, 2] = torch.nan
    assert torch.equal(output_change(Output(kind, old), Output(kind, new), real), expected)


def test_a_small_change_is_accurate():
    old = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).double()
    step = 1e-6 * torch.arange(6).double()
    p = old.softmax(-1)
    second = 0.5 * float((p * step**2).sum() - (p * step).sum() ** 2)  # KL to second order
    assert float(output_change(Output("logits", old), Output("logits", old + step))) == pytest.approx(second, rel=1e-3)


def test_the_kind_of_output_depends_on_the_result():
    model = masked_lm()
    with torch.no_grad(), evaluating(model):
        assert read_output(model(input_ids=ids())).kind == "logits"
        states = model.bert(input_ids=ids())
    assert read_output(states).values is states.last_hidden_state
    assert read_output((torch.ones(2), None)).kind == "states"
    config = transformers.ElectraConfig(**{**SMALL, "embedding_size": 16, "num_labels": 1})
    with torch.no_grad():
        binary = transformers.ElectraForPreTraining(config).eval()(input_ids=ids())
        regression = transformers.ElectraForSequenceClassification(config).eval()(input_ids=ids())
    replaced = read_output(binary)  # [B, T, 2]: logits of "original" and "replaced"
    torch.testing.assert_close(replaced.values.softmax(-1)[..., 1], binary.logits.sigmoid())
    assert replaced.kind == "logits" and read_output(regression).kind == "states"
    with pytest.raises(DataError, match="without a floating-point tensor"):
        read_output({"text": "yes"})


def test_label_free_loss_draws_labels_from_the_model_and_signs_for_states():
    model = masked_lm()
    batch = text()[1]
    with torch.no_grad(), evaluating(model):
        log_p = model(**batch).logits.float().log_softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=torch.Generator().manual_seed(3)).squeeze(-1)
        picked = log_p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)[batch["attention_mask"].bool().flatten()]
        found = label_free_loss(torch.Generator().manual_seed(3))(model, batch)
        assert float(found) == pytest.approx(float(-picked.sum() / 2), rel=1e-6)
        bare = label_free_loss(torch.Generator().manual_seed(3))(model.bert, batch)
        h = model.bert(**batch)[0]
    signs = torch.randint(0, 2, h.shape, generator=torch.Generator().manual_seed(3)) * 2 - 1
    assert float(bare) == pytest.approx(float((signs * h)[batch["attention_mask"].bool()].sum() / 2), rel=1e-5)


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


def test_page_text_and_json_have_the_numbers(tmp_path):
    model, batches = masked_lm(), text()
    found = inspect_heads(model, batches, ablation=True)
    tokens = [[f"<w{place}>" for place in range(7)] for _ in range(2)]
    path = write_whole(tmp_path / "deep" / "page.html", render_inspection(found, title="Heads of <x>", tokens=tokens))
    page = path.read_text()
    assert page.count("<script") == 3 and "http" not in page.replace("http-equiv", "")
    assert page.count("Heads of &lt;x&gt;") == 2 and "<x>" not in page
    assert "\\u003cw3\\u003e" in page and "<w3>" not in page
    assert f"{found.diversity['outputs'][1].effective_heads:.2f}" in page
    assert "Exact ablation of one head" in page and "% of heads" in page
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    text_summary = as_text(found)
    assert text_summary.startswith(f"{verdict(found)}\n\n") and html.escape(verdict(found)) in page
    last = found.diversity["outputs"][-1]
    assert (
        page.count('<th scope="col">cosine of tokens</th>')
        == text_summary.count("  cosine of tokens  effective heads\n")
        == 1
    )
    assert f"<td>{last.tokens:.3f}</td></tr>" in page and f"{last.mean_distance:.4g}" in text_summary
    assert text_summary.split("effective heads\n")[-1].splitlines()[1].split()[-2] == f"{last.tokens:+.3f}"
    best = found.closest("weights", 1)[0]
    assert f"{best.name}  {best.first} and {best.second}  {best.cosine:+.3f}" in text_summary
    lowest = found.least(found.ablation.change, 1)[0]
    assert f"{lowest[0]}  {lowest[1]}     {lowest[2]:.4g}" in text_summary
    assert found.pruned.metric[0] == 0 and found.pruned.removed[-1] == len(found.pruned.order) == 8
    assert "Least important heads first" in page
    numbers = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert numbers["pruning"]["change"] == list(found.pruned.metric)
    assert numbers["ablation"]["change"][1][3] == pytest.approx(float(found.ablation.change[1, 3]))
    assert numbers["diversity"]["outputs"][-1]["mean_cosine_of_tokens"] == last.tokens
    assert "mean_cosine_of_tokens" not in numbers["diversity"]["attention"][-1]
    assert numbers["diversity"]["attention"][0]["effective_heads"] == found.diversity["attention"][0].effective_heads


@needs_browser
def test_a_browser_reports_no_errors(tmp_path):
    found = inspect_heads(masked_lm(), text(), ablation=True)
    path = write_whole(tmp_path / "page.html", render_inspection(found, title="Heads", tokens=[list("abcdefg")]))
    opened = open_page(path, "example=1")  # unfolds the explorer
    assert opened.console == []
    assert opened.dom.count('class="overlap"') == grids_of(found)
    assert opened.dom.count('class="alone"') == 4 and 'class="h9"' in opened.dom  # all heads of the first layer


@needs_driver
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["light", "dark"])
def test_the_page_fits_a_phone_and_passes_axe(tmp_path, dark):
    found = inspect_heads(masked_lm(), text(), ablation=True)
    path = write_whole(tmp_path / "page.html", render_inspection(found, title="Heads", tokens=[list("abcdefg")]))
    with driven_browser() as browser:
        with driven_page(browser, path, dark=dark, width=360) as (page, console):
            page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
            names = page.evaluate(
                """() => [...document.querySelectorAll(".scroll")].map(
                     (box) => box.querySelector("tbody th").offsetWidth / box.offsetWidth)"""
            )
            assert wide[0] <= wide[1] and names and max(names) < 0.5  # names stay visible and leave room for numbers
            assert console == []
        assert violations(browser, path, "heads=mean", dark=dark, width=360) == []


def test_maps_show_tokens_or_numbered_positions_without_padding():
    batch = {"input_ids": ids(), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    found = inspect_heads(masked_lm(), [batch])
    assert [maps["bert.encoder.layer.0.attention.self"].shape for maps in found.maps] == [(4, 7, 7), (4, 4, 4)]
    first, second = layered_examples(found, [list("abcdefg")])
    assert (first.texts, second.texts) == ({"text": list("abcdefg")}, {"4 positions": list("0123")})
    assert [maps.layer for maps in first.readings["model"]] == ["layer 0", "layer 1"]
    image, inputs = build("vit, sdpa")
    (example, _) = layered_examples(inspect_heads(image, [inputs]), [])
    assert list(example.texts) == ["5 positions"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([0.0, -200.0, 3.0], [0.0, 0.0, 3.0]),  # e^d overflows where p is zero
        ([0.0, -60.0, 3.0], [0.0, 90.0, 3.0]),  # and where it is not
        ([100.0, 0.0], [0.0, 100.0]),
        ([0.0, -math.inf, 3.0], [1.0, -math.inf, 3.0]),  # a masked class
    ],
)
def test_the_kl_divergence_is_finite_however_far_the_output_moves(old, new):
    p = torch.tensor(old, dtype=torch.float64).softmax(-1).tolist()
    q = torch.tensor(new, dtype=torch.float64).log_softmax(-1).tolist()
    wanted = sum(a * (math.log(a) - b) for a, b in zip(p, q, strict=True) if a > 0)
    found = output_change(Output("logits", torch.tensor([old])), Output("logits", torch.tensor([new])))
    assert found.tolist() == pytest.approx([wanted], rel=1e-6)


def test_the_output_of_a_decoder_is_measured_at_the_decoders_tokens():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model, given = transformers.T5ForConditionalGeneration(config).eval(), torch.randint(3, 20, (2, 6))
    short = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    batch = {"input_ids": given, "decoder_input_ids": given.flip(1), "decoder_attention_mask": short}
    batch["attention_mask"] = short.flip(0)  # same length as the decoder's, other tokens
    own = OutputChange(model, [batch])
    before = model(**batch).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
        after = model(**batch).logits
    wanted = output_change(Output("logits", before), Output("logits", after), short.bool())
    torch.testing.assert_close(own(model), wanted)
    assert not torch.allclose(
        wanted, output_change(Output("logits", before), Output("logits", after), short.flip(0).bool())
    )


def test_the_output_of_a_decoder_that_is_called_with_labels_is_measured_at_all_its_tokens():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model, given = transformers.T5ForConditionalGeneration(config).eval(), torch.randint(3, 20, (2, 6))
    source = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])  # as long as the labels, but of other tokens
    batch = {"input_ids": given, "attention_mask": source, "labels": given.flip(1)}
    own = OutputChange(model, [batch])
    before = model(**batch).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    wanted = output_change(Output("logits", before), Output("logits", model(**batch).logits))
    torch.testing.assert_close(own(model), wanted)


def test_batches_without_a_mask_are_weighted_by_their_tokens():
    model, (short, long) = masked_lm(), (ids()[:1, :2], ids()[:1])
    each = [inspect_heads(model, [{"input_ids": x}]).diversity["outputs"][0].distance for x in (short, long)]
    both = inspect_heads(model, [{"input_ids": short}, {"input_ids": long}]).diversity["outputs"][0].distance
    tokens = [x.shape[1] for x in (short, long)]
    torch.testing.assert_close(both, (each[0] * tokens[0] + each[1] * tokens[1]) / sum(tokens))


def test_no_nan_is_printed_for_a_single_head():
    found = inspect_heads(masked_lm(num_attention_heads=1), text())
    assert "nan" not in as_text(found)
    assert "<td>nan</td>" not in render_inspection(found, title="one head")


def test_an_item_of_padding_only_has_no_change():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1] = 0
    found = inspect_heads(masked_lm(), [{"input_ids": ids(), "attention_mask": mask}], ablation=True)
    assert found.ablation is not None and found.ablation.change.isfinite().all()
    assert (found.ablation.items[..., 0] > 0).all() and (found.ablation.items[..., 1] == 0).all()
    zeros, ones = Output("states", torch.zeros(1, 2, 3)), Output("states", torch.ones(1, 2, 3))
    assert output_change(zeros, zeros).tolist() == [0] and output_change(zeros, ones).tolist() == [math.inf]


def test_nan_is_null_in_json():
    found = inspect_heads(masked_lm(), text())
    lost = torch.full((len(found.layers), 4), math.nan, dtype=torch.float64)
    spoilt = replace(found, ablation=Ablation(tuple(name for name, *_ in found.layers), math.nan, lost))
    assert json.loads(json.dumps(as_json(spoilt), allow_nan=False))["ablation"]["baseline"] is None


@needs_driver
def test_tokens_beside_a_map_are_not_cut_off(tmp_path):
    found = inspect_heads(masked_lm(), text()[:1])
    words = [["a" * 60, "漢字" * 9, "Ġthe", "▁" * 20, "x", "nnnnnnnnnnnnnnnn", "."]]
    page_of = write_whole(tmp_path / "words.html", render_inspection(found, title="words", tokens=words))
    with driven_browser() as browser, driven_page(browser, page_of, width=390) as (page, _):
        page.evaluate("location.hash = 'example=1'")
        page.wait_for_selector("#stage text")
        cut = page.evaluate(
            "[...document.querySelectorAll('#stage text')].filter((text) => { const box = text.getBoundingClientRect(),"
            " all = text.closest('svg').getBoundingClientRect(); return box.left + 0.5 < all.left || box.top + 0.5 <"
            " all.top; }).map((text) => text.textContent)"
        )
        assert page.locator("#stage text").count() > 7 and cut == []


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
