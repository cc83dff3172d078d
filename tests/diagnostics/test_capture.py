"""Captured head outputs and attention weights: against the models' own results, and by changing one head's values."""

import math

import pytest
import torch
from torch import nn

from repulsive.diagnostics.hooks.attention import dot_product_weights
from repulsive.diagnostics.hooks.attention_layers import find_attention_layers, replaced_head_outputs
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.redundancy import ablate
from repulsive.diagnostics.similarity import of_attention, of_outputs
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads import find_heads
from repulsive.heads.module_paths import module_of
from repulsive.lab.systems.classification.model import PairClassifier, SelfAttentiveConfig, SentenceClassifier
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from tests.heads.zoo import TORCH, TRANSFORMERS, build, ids

FAST = [*TORCH, *(name for name in TRANSFORMERS if not name.endswith("eager"))]


class Hidden(nn.Module):
    """Has the projections of attention, but no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.out_proj(self.v_proj(x) + self.q_proj(x) * self.k_proj(x))


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("name", [n for n in FAST if n != "additive"])
def test_changing_the_values_of_one_head_changes_only_its_output(name):
    model, inputs = build(name)
    groups = find_heads(model)
    value = next(g for g in groups if g.part == "v")
    layer = module_of(value)
    serves = next(g for g in groups if module_of(g) == layer and g.part == "q").serves
    before = capture(model, inputs, weights=False).layers[0]
    assert before.name == layer
    head = value.num_heads - 1
    with torch.no_grad():
        for s in value.slices:
            heads = s.take(s.parameter()).clone()  # [M, D]
            heads[head] += torch.randn(heads.shape[1], generator=torch.Generator().manual_seed(1))
            s.put(s.parameter(), heads)
    after = capture(model, inputs, weights=False).layers[0]
    moved = (after.outputs[0] - before.outputs[0]).abs().amax((0, 1, 3))  # [M]
    served = serves or range(before.layer.num_heads)
    mine = torch.tensor([kv == head for kv in served])
    assert (moved[mine] > 1e-2).all()
    assert (moved[~mine] < 1e-6).all()


@pytest.mark.parametrize("name", ["bert", "gpt2 with cross-attention", "llama", "bart", "vit"])
def test_weights_equal_those_the_model_returns(name):
    eager, inputs = build(f"{name}, eager")
    with torch.no_grad(), evaluating(eager):
        result = eager(**inputs, output_attentions=True)
    wanted = [
        w
        for key in ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
        for w in result.get(key) or ()
    ]
    for kind in ("eager", "sdpa"):
        model, inputs = build(f"{name}, {kind}")
        model.load_state_dict(eager.state_dict())
        found = [w for layer in capture(model, inputs).layers for w in layer.weights]
        assert len(found) == len(wanted) > 0
        for mine in found:  # the order of two stacks differs
            differences = [float((mine - w).abs().max()) for w in wanted if w.shape == mine.shape]
            assert min(differences) < 1e-5
            torch.testing.assert_close(mine.sum(-1), torch.ones(mine.shape[:-1]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_weights_are_captured_from_the_flash_kernel(name, device):
    eager, inputs = build(f"{name}, eager")
    model, _ = build(f"{name}, sdpa")
    model.load_state_dict(eager.state_dict())
    half = torch.bfloat16 if device == "cuda" else torch.float32  # the GPU kernel needs half precision
    models = [each.to(device, half) for each in (eager, model)]
    given = {key: x.to(device, half) if x.is_floating_point() else x.to(device) for key, x in inputs.items()}
    wanted = capture(models[0], given)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):  # any other kernel would be an error
        found = capture(models[1], given)
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        difference = (mine.weights[0].float() - theirs.weights[0].float()).abs().max()
        assert float(difference) < (3e-2 if device == "cuda" else 1e-5)


def test_the_remedy_for_attention_over_blocks_works():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BigBirdConfig(vocab_size=70, block_size=4, num_random_blocks=1, **sizes)
    model, ids = transformers.BigBirdModel(config), torch.randint(0, 66, (1, 64))
    with pytest.raises(HeadLayoutError, match='with attention_type="original_full"'):
        capture(model, ids)
    model.set_attention_type("original_full")
    assert capture(model, ids).layers[0].weights[0].shape == (1, 2, 64, 64)


def test_without_strict_a_layer_may_have_no_attention_weights():
    both = nn.Sequential(Hidden(), nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    found = capture(both, torch.randn(1, 3, 8), strict=False)
    assert [len(layer.weights) for layer in found.layers] == [0, 1] and len(found.hidden) == 1
    assert 'attn_implementation="eager"' in found.hidden[0]


@pytest.mark.parametrize("settings", [{}, {"attn_mask": True}, {"is_causal": True}, {"scale": 0.2}, {"gqa": True}])
def test_dot_product_weights_equal_those_of_torchs_kernel(settings):
    make = torch.Generator().manual_seed(0)
    heads = 2 if settings.get("gqa") else 4
    q, k, v = (torch.randn(2, m, 5, 6, generator=make, dtype=torch.float64) for m in (4, heads, heads))
    given = {name: value for name, value in settings.items() if name not in ("gqa", "attn_mask")}
    given |= {"enable_gqa": True} if settings.get("gqa") else {}
    given |= {"attn_mask": torch.rand(2, 1, 5, 5, generator=make) > 0.3} if settings.get("attn_mask") else {}
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, **given)
    weights = dot_product_weights(q, k, v, **given)
    torch.testing.assert_close(weights @ v.repeat_interleave(4 // heads, 1), wanted)


def test_bert_heads_equal_explicit_attention():
    model, inputs = build("bert, sdpa")
    model = model.double()
    found = capture(model, inputs)
    with torch.no_grad(), evaluating(model):
        states = model(**inputs, output_hidden_states=True).hidden_states
        for number, layer in enumerate(found.layers):
            block = model.encoder.layer[number].attention.self
            split = [p(states[number]).unflatten(-1, (4, 8)) for p in (block.query, block.key, block.value)]
            for h in range(4):
                q, k, v = (x[:, :, h] for x in split)  # [B, T, d]
                weights = torch.stack([(q[b] @ k[b].T / math.sqrt(8)).softmax(-1) for b in range(2)])
                torch.testing.assert_close(layer.weights[0][:, h], weights)
                torch.testing.assert_close(layer.outputs[0][:, :, h], weights @ v)


def test_torchs_own_attention_with_masks_and_either_order_of_axes():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32)  # tokens first
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(5, 3, 16)  # [T, B, E]
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    inputs = {"src": x, "src_key_padding_mask": padded}
    with torch.no_grad(), evaluating(model):
        plain = call(model, inputs)
    found = capture(model, inputs)
    torch.testing.assert_close(found.result, plain)
    assert model.training and torch.backends.mha.get_fastpath_enabled()
    captured = found.layers[0]
    assert captured.outputs[0].shape == (3, 5, 4, 4) and captured.weights[0].shape == (3, 4, 5, 5)
    assert captured.weights[0][1, :, :, 3:].abs().max() == 0
    attention = model.layers[0].self_attn
    value = nn.functional.linear(x, attention.in_proj_weight[32:], attention.in_proj_bias[32:])  # [T, B, E]
    value = value.transpose(0, 1).unflatten(-1, (4, 4)).transpose(1, 2)  # [B, M, T, d]
    torch.testing.assert_close(captured.outputs[0].transpose(1, 2), captured.weights[0] @ value)


@pytest.mark.parametrize("arguments", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_callers_of_torchs_attention_get_the_result_they_asked_for(arguments):
    model, (q, k, v) = build("torch packed")
    with torch.no_grad(), evaluating(model):
        out, weights = model(q, k, v, **arguments)
    found = capture(model, {"query": q, "key": k, "value": v, **arguments}).result
    torch.testing.assert_close(found[0], out)
    assert (found[1] is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(found[1], weights)


def test_lab_models():
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.tiny(40, width=32))
    source, target = ids(7) % 40, ids(5) % 40
    with torch.no_grad(), evaluating(model):
        _, outputs = model(source, target, collect="outputs")
        _, weights = model(source, target, collect="weights")
    found = capture(model, (source, target)).layers
    assert len(found) == len(outputs) == 6
    for layer, heads, attention in zip(found, outputs, weights, strict=True):
        torch.testing.assert_close(layer.outputs[0].transpose(1, 2), heads)
        torch.testing.assert_close(layer.weights[0], attention)
    for own in (False, True):
        classifier = SentenceClassifier(SelfAttentiveConfig.tiny(40, own_hidden=own))
        with torch.no_grad(), evaluating(classifier):
            _, attention, sentences = classifier(source, collect=True)
        (layer,) = capture(classifier, source).layers
        torch.testing.assert_close(layer.weights[0].squeeze(2), attention)
        torch.testing.assert_close(layer.outputs[0].squeeze(1), sentences)


def test_both_runs_of_a_layer_are_captured_and_averaged():
    model = PairClassifier(SelfAttentiveConfig.tiny(40))
    (layer,) = capture(model, (ids(7) % 40, ids(4) % 40)).layers
    assert [w.shape[-1] for w in layer.weights] == [7, 4]
    both = [of_attention(w).cosine for w in layer.weights]
    torch.testing.assert_close(layer.diversity("attention").cosine, (both[0] + both[1]) / 2)
    mine = of_outputs(layer.outputs[1].transpose(1, 2)).distance + of_outputs(layer.outputs[0].transpose(1, 2)).distance
    torch.testing.assert_close(layer.diversity("outputs").distance, mine / 2)


def test_nested_contexts_combine_and_are_undone():
    model, inputs = build("torch packed")
    layers, projection = find_attention_layers(model), model.out_proj
    with torch.no_grad(), evaluating(model):
        plain = first(call(model, inputs))
        with replaced_head_outputs(layers, lambda _, h: 2 * h), replaced_head_outputs(layers, lambda _, h: h + 1):
            doubled = first(call(model, inputs))
        heads = capture(model, inputs).layers[0].outputs[0]  # [B, T, M, d]
        wanted = projection((2 * heads + 1).flatten(2))
        assert model.out_proj is projection
        assert not model._forward_hooks and not model._forward_pre_hooks
        torch.testing.assert_close(doubled, wanted)
        assert torch.equal(first(call(model, inputs)), plain)
    with pytest.raises(RuntimeError, match="stop"), replaced_head_outputs(layers, lambda *_: None):
        raise RuntimeError("stop")
    assert model.out_proj is projection


@pytest.mark.parametrize("name", ["torch packed", "bert, sdpa", "additive"])
def test_the_captured_output_of_an_ablated_head_is_zero(name):
    model, inputs = build(name)
    with ablate(model, [(0, 1)]):
        outputs = capture(model, inputs, weights=False).layers[0].outputs[0]  # [B, T, M, d]
    assert (outputs[:, :, 1] == 0).all() and (outputs[:, :, 0] != 0).any()


def test_an_unknown_output_projection_can_be_named():
    model, x = build("annotated")
    model.linears.append(nn.Linear(24, 24))  # now it runs the last one, and not the fourth, which the table names
    with pytest.raises(HeadLayoutError, match="is not a projection that takes 4 heads of size 6"):
        find_attention_layers(model, out={"": "linears.7"})
    with pytest.raises(HeadLayoutError, match=r"never called linears\.3"):
        capture(model, x, layers=find_attention_layers(model))
    assert capture(model, x).layers[0].layer.module is model.linears[4]
    named = find_attention_layers(model, out={"": "linears.4"})
    assert named[0].module is model.linears[4]
    assert capture(model, x, layers=named).layers[0].outputs[0].shape == (2, 5, 4, 6)


def test_the_error_for_hidden_weights_names_the_switch():
    with pytest.raises(HeadLayoutError, match='attn_implementation="eager"'):
        capture(Hidden(), torch.randn(1, 3, 8))
    assert len(capture(Hidden(), torch.randn(1, 3, 8), weights=False).layers) == 1


def test_adapters_around_projections_are_supported():
    peft = pytest.importorskip("peft")
    model, inputs = build("bert, sdpa")
    plain = capture(model, inputs).layers[1]
    settings = peft.LoraConfig(target_modules=["query", "value", "attention.output.dense"], r=2)
    wrapped = capture(peft.get_peft_model(model, settings), inputs).layers[1]  # adapters start at zero
    torch.testing.assert_close(wrapped.outputs[0], plain.outputs[0])
    torch.testing.assert_close(wrapped.weights[0], plain.weights[0])


def test_joined_heads_are_refused():
    model, _ = build("llama, sdpa")
    with pytest.raises(SelectionError, match="particle='projection'"):
        find_attention_layers(model, find_heads(model, particle="head"))


def test_half_precision_weights_are_computed_in_float32():
    torch.manual_seed(0)
    q, k = (3 * torch.randn(2, 4, 9, 64).bfloat16() for _ in range(2))
    wanted = (q.double() @ k.double().mT / 8).softmax(-1)
    found = dot_product_weights(q, k)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5)  # the rounding of the result alone


@pytest.mark.parametrize("family", ["GptOss", "GraniteSWA"])
def test_an_attention_sink_is_not_a_token(family):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4} if family == "GptOss" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=16,
        layer_types=["full_attention"],
        attn_implementation="eager",
        **experts,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    given = torch.randint(3, 20, (2, 5))
    captured = capture(model, given).layers[0].weights[0]
    with torch.no_grad():
        own = model(given, output_attentions=True).attentions[0]
    torch.testing.assert_close(captured, own)


def test_existing_hooks_get_the_same_arguments_and_results():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    calls = []
    layer.self_attn.register_forward_hook(lambda _module, args, result: calls.append((args[0], *result)))
    with evaluating(layer):
        layer(x)
    assert capture(layer, x).layers[0].weights[0].shape == (2, 2, 5, 5)
    (given, made, weights), (given_again, made_again, weights_again) = calls
    assert torch.equal(given, given_again) and weights is None is weights_again
    torch.testing.assert_close(made, made_again)
    assert len(layer.self_attn._forward_hooks) == 1 and not layer.self_attn._forward_pre_hooks
