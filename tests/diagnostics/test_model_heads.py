"""`Heads`: shapes, contributions, ablation in three modes, and similarity, on models of several libraries."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from repulsive import find_heads
from repulsive.diagnostics.cka import cka_of_grams, cka_without_groups, token_grams
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.model_heads import Heads
from repulsive.errors import SelectionError
from tests.heads.zoo import AdditiveAttention, TimmAttention

transformers = pytest.importorskip("transformers")


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=3, n_positions=16)
    )


def llama(**more):
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=16,
    )
    return transformers.BertForMaskedLM(config)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TimmAttention() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def tokens(seed=0):
    return {"input_ids": torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(seed))}


PADDING = torch.zeros(2, 7, dtype=torch.long)


def floats(width, seed=0):
    return torch.randn(2, 7, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "torch": (Encoder, lambda seed=0: floats(24, seed)),
    "timm": (Vision, lambda seed=0: floats(TimmAttention().qkv.in_features, seed)),
}


def make(name):
    torch.manual_seed(0)
    build, inputs = CASES[name]
    return build().double().eval(), inputs


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


@pytest.mark.parametrize("space", ["logits", "ov", "attention", "outputs", "cka"])
def test_equal_heads_are_found_in_every_space(space):
    model, inputs = make("torch")
    attention = model.layers.layers[0].self_attn
    with torch.no_grad():
        for part in range(3):
            rows = attention.in_proj_weight[24 * part : 24 * part + 24]
            rows[8:16] = rows[:8]
        attention.out_proj.weight[:, 8:16] = attention.out_proj.weight[:, :8]
    found = Heads(model, inputs()).similarity([inputs(), inputs(1)], space)
    assert len(found) == 2
    assert found[0].pair[1:3] == (0, 1) and found[0].largest == pytest.approx(1.0)
    assert found[1].largest < 0.99


def test_cka_is_the_formula_and_ignores_rotations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 9, 4, generator=generator, dtype=torch.float64)  # [B, M, T, d]
    flat = x.transpose(0, 1).flatten(1, 2)
    flat = flat - flat.mean(1, keepdim=True)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for i in range(3):
        for j in range(3):
            cross, own, other = flat[i].T @ flat[j], flat[i].T @ flat[i], flat[j].T @ flat[j]
            expected[i, j] = cross.norm() ** 2 / (own.norm() * other.norm())
    assert torch.allclose(cka_of_grams(token_grams(x)[0]), expected, atol=1e-12)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))[0]
    turned = torch.cat([x[:, :1], 2 * x[:, :1] @ rotation], 1)
    assert cka_of_grams(token_grams(turned)[0])[0, 1] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cka_of_a_head_with_constant_output_is_zero(dtype):
    """Attention weights sum to one up to rounding errors, which must not be compared instead."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=True).to(dtype)
    with torch.no_grad():
        attention.in_proj_weight[64:72] = 0  # the values of head 0
        attention.in_proj_bias.normal_()
    x = torch.randn(4, 19, 32, dtype=dtype)
    (found,) = Heads(attention).similarity([(x, x, x)], "cka", twins=0)
    assert not found.cosine[0].any() and not found.cosine[:, 0].any()
    assert (found.cosine[1:, 1:] > 0.01).all() and found.left_out is not None and not found.left_out[:, 0].any()


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_varies_in_one_sequence_only_has_no_cka_without_it(seed):
    outputs = torch.randn(3, 3, 7, 4, generator=torch.Generator().manual_seed(seed)).double()  # [B, M, T, d]
    outputs[1:, 0] = outputs[1, 0, 0]  # head 0
    without = cka_without_groups(*token_grams(outputs), 3)
    assert not without[0, 0].any() and not without[0, :, 0].any()
    assert (without[1:] > 0.01).all() and (without[0, 1:, 1:] > 0.01).all()


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


@pytest.mark.parametrize("space", ["attention", "outputs", "cka", "logits", "ov"])
def test_padding_of_positional_arguments_does_not_count(space):
    torch.manual_seed(0)
    mask, x = torch.tensor([[1] * 6, [1] * 2 + [0] * 4]), torch.randn(2, 6, 24)
    ids = torch.randint(3, 40, (2, 6))
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 3, 48, batch_first=True), 1)
    for model, by_name, by_position in (
        (bert(), {"input_ids": ids, "attention_mask": mask}, (ids, mask)),
        (layers, {"src": x, "src_key_padding_mask": mask == 0}, [x, None, mask == 0]),
    ):
        heads = Heads(model)
        wanted, found = (heads.similarity([batch], space, twins=0)[0] for batch in (by_name, by_position))
        assert found.tokens == wanted.tokens
        torch.testing.assert_close(found.cosine, wanted.cosine)


@pytest.mark.parametrize("space", ["attention", "outputs", "cka", "logits", "ov"])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_padding_of_the_encoder_does_not_apply_to_a_decoder_that_is_called_with_labels(kind, space):
    torch.manual_seed(0)
    if kind == "T5":
        config = transformers.T5Config(
            vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=3, decoder_start_token_id=0
        )
        model = transformers.T5ForConditionalGeneration(config).eval()
    else:
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.BartConfig(vocab_size=40, d_model=16, max_position_embeddings=16, **sizes, **heads)
        config.pad_token_id = config.bos_token_id = config.eos_token_id = config.decoder_start_token_id = 0
        model = transformers.BartForConditionalGeneration(config).eval()
    given, labels = torch.randint(3, 40, (2, 2, 6))
    source = {"input_ids": given, "attention_mask": torch.tensor([[1] * 6, [1] * 2 + [0] * 4])}
    decoder = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :-1]], 1)
    heads = Heads(model, {**source, "decoder_input_ids": decoder})
    found = heads.similarity([{**source, "labels": labels}], space, twins=0)
    wanted = heads.similarity([{**source, "decoder_input_ids": decoder}], space, twins=0)
    assert [each.tokens for each in found] == [each.tokens for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cosine, other.cosine)


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


@pytest.mark.parametrize("space", ["attention", "outputs", "cka", "logits", "ov"])
def test_padding_of_a_decoder_of_torch_does_not_count(space):
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 3, 48, batch_first=True), 1)
    target, memory = torch.randn(1, 4, 24), torch.randn(1, 5, 24)
    longer, mask = torch.cat([target, torch.randn(1, 2, 24)], 1), torch.tensor([[0] * 4 + [1] * 2]).bool()
    heads = Heads(model)
    wanted = heads.similarity([{"tgt": target, "memory": memory}], space, twins=0)
    found = heads.similarity([{"tgt": longer, "memory": memory, "tgt_key_padding_mask": mask}], space, twins=0)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.cosine, other.cosine, atol=1e-5, rtol=1e-5)
