"""`Heads`: shapes, contributions and ablation in three modes, on models of several libraries."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from repulsive import find_heads
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.model_heads import Heads
from repulsive.errors import SelectionError
from tests.diagnostics.small_models import CASES, floats, gpt2, make, tokens
from tests.heads.zoo import AdditiveAttention

transformers = pytest.importorskip("transformers")

PADDING = torch.zeros(2, 7, dtype=torch.long)


def run(model, inputs):
    result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return result if isinstance(result, torch.Tensor) else result.logits


def attention_outputs(heads, inputs):
    """What each attention layer adds to the model, recorded by hooks of the test's own."""
    recorded = {}
    hooks = []
    for layer in heads.layers:
        module = layer.attention if layer.kind == "torch" else layer.module

        def keep(_module, _args, result, name=layer.name):
            recorded[name] = result[0] if isinstance(result, tuple) else result

        hooks.append(module.register_forward_hook(keep))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    run(heads.model, inputs)
    torch.backends.mha.set_fastpath_enabled(fast)
    for hook in hooks:
        hook.remove()
    return recorded


@pytest.mark.parametrize("name", CASES)
def test_contributions_of_a_layer_add_up_to_its_output(name):
    model, inputs = make(name)
    heads = Heads(model, inputs())
    assert len(heads.shape) == 2 and len(heads) == sum(count for _, count in heads.shape)
    expected = attention_outputs(heads, inputs())
    for layer, weights, contributions in zip(
        heads.layers, heads.attention(inputs()), heads.outputs(inputs()), strict=True
    ):
        assert weights.shape == (2, layer.num_heads, 7, 7)
        assert torch.allclose(weights.sum(-1), torch.ones(()).double())
        projection = layer.attention.out_proj if layer.kind == "torch" else layer.module
        bias = getattr(projection, "bias", None)
        total = contributions.sum(2) + (0 if bias is None else bias)
        assert torch.allclose(total, expected[layer.name], atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_patching_all_heads_of_all_layers_gives_the_source_attention(name):
    """Every head patched: each attention layer puts out what it puts out on the source."""
    model, inputs = make(name)
    heads = Heads(model, inputs())
    every = [(layer, head) for layer, (_, count) in enumerate(heads.shape) for head in range(count)]
    expected = attention_outputs(heads, inputs(1))
    with heads.ablated(every, mode="patch", source=inputs(1)):
        outputs = heads.outputs(inputs())
    source = heads.outputs(inputs(1))
    assert all(torch.equal(a, b) for a, b in zip(outputs, source, strict=True))
    assert expected


@pytest.mark.parametrize("name", CASES)
def test_patching_with_the_same_inputs_changes_nothing_and_with_others_something(name):
    model, inputs = make(name)
    heads = Heads(model, inputs())
    plain = run(model, inputs())
    with heads.ablated([(0, 1), (1, 0)], mode="patch", source=inputs()):
        same = run(model, inputs())
    with heads.ablated([(0, 1), (1, 0)], mode="patch", source=inputs(1)):
        other = run(model, inputs())
    assert torch.allclose(same, plain, atol=1e-10)
    assert not torch.allclose(other, plain, atol=1e-6)
    assert torch.equal(run(model, inputs()), plain)


@pytest.mark.parametrize("name", ["gpt2", "torch"])
def test_zero_and_mean_ablation(name):
    model, inputs = make(name)
    heads = Heads(model, inputs())
    whole = heads.outputs(inputs())[0]  # [B, T, M, d_model]
    with heads.ablated([(0, 2)]):
        zero = heads.outputs(inputs())[0]
    with heads.ablated([(0, 2)], mode="mean"):
        mean = heads.outputs(inputs())[0]
    assert torch.equal(zero[:, :, 2], torch.zeros_like(zero[:, :, 2]))
    assert torch.allclose(mean[:, :, 2], whole[:, :, 2].mean((0, 1)).expand(2, 7, -1))
    assert torch.equal(zero[:, :, :2], whole[:, :, :2]) and torch.equal(mean[:, :, :2], whole[:, :, :2])


@pytest.mark.parametrize("mode", ["zero", "mean", "patch"])
def test_ablating_no_heads_changes_nothing(mode, recwarn):
    model, inputs = make("gpt2")
    plain = run(model, inputs())
    with Heads(model, inputs()).ablated([], mode=mode, source=None if mode == "zero" else inputs(1)):
        assert torch.equal(run(model, inputs()), plain)
    assert not [warning for warning in recwarn if "ablate" in str(warning.message)]


def test_the_mean_leaves_padding_out():
    model, inputs = make("bert")
    heads = Heads(model, inputs())
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    source = inputs() | {"attention_mask": mask}
    whole = heads.outputs(source)[0]
    with heads.ablated([(0, 1)], mode="mean", source=source):
        mean = heads.outputs(source)[0]
    assert torch.allclose(mean[0, 0, 1], whole[mask.bool()][:, 1].mean(0))


def test_importance_is_the_gradient_with_respect_to_a_factor_on_the_head():
    model, inputs = make("gpt2")
    heads = Heads(model, inputs())
    batch = {"input_ids": inputs()["input_ids"][:1, :2], "labels": inputs()["input_ids"][:1, :2]}
    scores = heads.importance([batch])
    assert scores.shape == (2, 3) and bool((scores > 0).all())
    with pytest.raises(SelectionError, match="no loss"):
        heads.importance([inputs()])


def test_one_head_and_how_it_prints():
    model, inputs = make("llama")
    heads = Heads(model, inputs())
    head = heads[1, 3]
    assert repr(head).startswith("Head 3 of layer 1") and head.name.endswith("[3]")
    assert torch.equal(head.attention(inputs()), heads.attention(inputs())[1][:, 3])
    assert torch.equal(head.output(inputs()), heads.outputs(inputs())[1][:, :, 3])
    with head.ablated():
        assert not heads[1, 3].output(inputs()).any()
    assert [each.index for each in heads] == [0, 1, 2, 3] * 2
    assert repr(heads).startswith("Heads of LlamaForCausalLM: 2 layers, 8 heads (proved)")
    assert "<table>" in heads._repr_html_()
    assert "1 layer, 2 heads" in repr(Heads(nn.MultiheadAttention(8, 2)))


def test_heads_and_similarities_print_on_one_line():
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(4, 5, 8)
    group = find_heads(attention)[0]
    assert repr(group) == "HeadGroup('q', layer=0, part='q', where='encoder', num_heads=2, head_dim=4, proof='table')"
    (layer,) = Heads(attention).similarity([(x, x, x)], twins=0)
    assert repr(layer).startswith("Similarity('', 'logits', num_heads=2, mean=") and len(repr(layer)) < 100


def test_plot_has_one_panel_per_head():
    pytest.importorskip("matplotlib")
    model, inputs = make("gpt2")
    figure = Heads(model).plot(inputs(), layer=1)
    assert [axis.get_title() for axis in figure.axes] == ["head 0", "head 1", "head 2"]


def test_a_layer_that_runs_several_times_has_an_axis_of_runs():
    config = transformers.AlbertConfig(
        vocab_size=40,
        embedding_size=8,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    heads = Heads(transformers.AlbertModel(config).eval())
    assert [tuple(x.shape) for x in heads.attention(tokens())] == [(3, 2, 3, 7, 7)]
    assert [tuple(x.shape) for x in heads.outputs(tokens())] == [(3, 2, 7, 3, 24)]


def test_additive_attention_gives_outputs_without_a_projection():
    torch.manual_seed(0)
    heads = Heads(AdditiveAttention())
    assert heads.layers[0].kind == "result"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h: h[0], "such as heads\\[3, 5\\]"),
        (lambda h: h[5, 0], "2 attention layers"),
        (lambda h: h[0, 9], "0 to 2"),
        (lambda h: h.ablated([(0, 0)], mode="men").__enter__(), "did you mean 'mean'"),
        (lambda h: h.ablated([(0, 0)], mode="patch").__enter__(), "needs source="),
        (lambda h: h.ablated([(0, 0)], source=1).__enter__(), "source is not used"),
        (lambda h: h.ablated((0, 1)).__enter__(), "0 is not a head; expected a list of \\(layer, head\\) pairs"),
        (lambda h: h.similarity([tokens()], "logit"), "did you mean 'logits'"),
        (lambda h: h.similarity(tokens()), "got one mapping; write similarity\\(\\[inputs\\]\\)"),
        (lambda h: h.similarity(tokens()["input_ids"]), "got one tensor; write similarity"),
        (lambda h: h.similarity(None), "expected a list of batches, got NoneType"),
        (lambda h: h.similarity(iter([tokens()])), "got list_iterator; pass some of its batches as a list"),
        (lambda h: h.plot(tokens(), 0, item=9), "item=9: the inputs have items 0 to "),
        (lambda h: h.similarity([]), "the list is empty"),
        (lambda h: h.similarity([tokens()], twins=-1), "twins=-1: must be a whole number, at least 0"),
        (lambda h: h.similarity([tokens() | {"attention_mask": PADDING}], "outputs", twins=0), "no token counts"),
        (lambda h: h.similarity([tokens() | {"attention_mask": PADDING}], "attention", twins=0), "no token counts"),
        (lambda h: h.importance(tokens()), "got one mapping; write importance\\(\\[inputs\\]\\)"),
        (lambda h: h.importance(tokens()["input_ids"]), "got one tensor; write importance"),
        (lambda h: h.importance([tokens()], lambda m, b: m(**b)[0].detach().sum()), "loss has no gradient"),
        (lambda h: h[0, "x"], "has no head 'x'"),
        (lambda h: h.ablated([(0, 1.0)]).__enter__(), "has no head 1.0"),
        (lambda h: h.ablated(3).__enter__(), "3: expected a list of"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(SelectionError, match=message):
        call(Heads(gpt2()))


class Tied(nn.Module):
    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(12, 3, batch_first=True)
        self.second = nn.MultiheadAttention(12, 3, batch_first=True) if copies else self.first
        for name in ("in_proj_weight", "in_proj_bias") if copies else ():
            setattr(self.second, name, getattr(self.first, name))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(*[self.first(x, x, x)[0]] * 3)[0]


def test_layers_with_tied_weights_are_named():
    message = "second is neither measured nor ablated: the weights are tied"
    with pytest.warns(UserWarning, match=message):
        Heads(Tied(copies=True))
    assert any(message in note for note in inspect_heads(Tied(copies=True)).notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads = Heads(Tied(copies=False))
    assert heads.attention(floats(12).float())[0].shape == (2, 2, 3, 7, 7)  # both runs


def test_patching_inputs_of_another_shape_is_refused():
    model, inputs = make("gpt2")
    heads = Heads(model)
    with pytest.raises(SelectionError, match="same shape"), heads.ablated([(0, 0)], mode="patch", source=inputs()):
        run(model, {"input_ids": inputs()["input_ids"][:, :5]})


@pytest.mark.parametrize("settings", [{}, {"mode": "mean"}], ids=["zero", "mean"])
def test_ablation_of_a_padded_batch_in_the_fused_layers_of_torch(settings):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 48, batch_first=True), 2).eval()
    inputs = {"src": torch.randn(2, 6, 24), "src_key_padding_mask": torch.tensor([[0] * 6, [0] * 4 + [1] * 2]).bool()}
    heads, real = Heads(model, inputs), ~inputs["src_key_padding_mask"]
    with heads.ablated([(0, 1)], **settings):
        wanted = model(**inputs)  # with gradients, torch does not fuse layers
    with torch.no_grad():
        before = model(**inputs)
        with heads.ablated([(0, 1)], **settings):
            found = model(**inputs)
    torch.testing.assert_close(found[real], wanted[real])
    assert not torch.allclose(found[real], before[real], atol=1e-3)
    assert torch.backends.mha.get_fastpath_enabled()
