"""What a pass shows about heads, against plain formulas in float64."""

import math

import pytest
import torch
from torch import nn

from repulsive import Heads
from repulsive.diagnostics.circuits import circuit_similarity
from repulsive.diagnostics.hooks.calling import call
from repulsive.monitoring.recording import HeadRecorder, Pass
from tests.heads.zoo import build

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def measured(model, batch, step=0, **settings):
    recorder = HeadRecorder(model, **settings)
    with torch.no_grad(), recorder.recording(batch if isinstance(batch, dict) else {}, step) as result:
        call(model, batch)
    assert recorder.not_measured == {}
    return result.finish()


def entropies(weights, real):
    """Entropy of each head [M] over the real queries of [B, M, T, S], query by query."""
    total = [
        [-sum(float(a * a.log()) for a in weights[b, m, t] if a > 0) for m in range(weights.shape[1])]
        for b in range(len(weights))
        for t in range(weights.shape[2])
        if real[b, t]
    ]
    return torch.tensor(total, dtype=torch.float64).mean(0).tolist()


def bert(implementation):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        vocab_size=64,
        initializer_range=0.6,
        attn_implementation=implementation,
    )
    return BertModel(config).double().eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bert_against_its_own_attention_weights_and_hidden_states(implementation):
    model = bert(implementation)
    batch = {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": MASK}
    result = measured(model, batch)
    oracle = bert("eager")
    with torch.no_grad():
        known = oracle(**batch, output_attentions=True, output_hidden_states=True)
        heads = Heads(oracle, batch).outputs(batch)  # per layer [B, T, M, d_model]
    real = MASK.bool()
    assert [layer.label for layer in result.layers] == ["layer 0", "layer 1"]
    for number, layer in enumerate(result.layers):
        assert layer.entropy == pytest.approx(entropies(known.attentions[number], real), rel=1e-9)
        attention = oracle.encoder.layer[number].attention.self
        with torch.no_grad():
            x = known.hidden_states[number]
            q, k = (project(x).unflatten(-1, (4, 8)) for project in (attention.query, attention.key))  # [B, T, M, d]
        largest = []
        for m in range(4):
            logits = [q[b, t, m] @ k[b, s, m] / math.sqrt(8) for b in range(2) for t in range(7) for s in range(7)
                      if real[b, t] and real[b, s]]  # fmt: skip
            largest.append(float(max(logits)))
        assert layer.largest_logit == pytest.approx(largest, rel=1e-9)
        rows = [(b, t) for b in range(2) for t in range(7) if real[b, t]]
        means = [k[b][real[b]].mean(0) for b in range(2)]  # [M, d]
        functions = torch.stack([
            torch.stack([q[b, t, m] @ (k[c, u, m] - means[c][m]) for b, t in rows for c, u in rows])
            for m in range(4)
        ])  # fmt: skip
        products = functions @ functions.T
        cosine = products / products.diag().sqrt().outer(products.diag().sqrt())
        assert torch.tensor(layer.cosine, dtype=torch.float64) == pytest.approx(cosine, abs=1e-9)
        with torch.no_grad():
            values = attention.value(x)[real].unflatten(-1, (4, 8))  # [N, M, d]
        columns = oracle.encoder.layer[number].attention.output.dense.weight.detach().unflatten(1, (4, 8))
        writes = torch.stack([(values[:, m] @ columns[:, m].T).flatten() for m in range(4)])  # [M, N d_model]
        pairs = [float(torch.cosine_similarity(writes[i], writes[j], dim=0)) for i in range(4) for j in range(i)]
        assert (layer.ov_similarity, layer.ov_largest) == pytest.approx((sum(pairs) / 6, max(pairs)), abs=1e-9)
        written = heads[number][real].square().sum(-1).mean(0)  # [M]
        assert layer.written == pytest.approx((written / written.mean()).sqrt().tolist(), rel=1e-9)
        after, cosines = known.hidden_states[number + 1], []
        for b in range(2):
            tokens = after[b][real[b]]
            pairs = [torch.cosine_similarity(tokens[i], tokens[j], dim=0)
                     for i in range(len(tokens)) for j in range(len(tokens)) if i != j]  # fmt: skip
            cosines.append((len(tokens), float(torch.stack(pairs).mean())))
        assert layer.tokens == pytest.approx(sum(n * c for n, c in cosines) / 11, rel=1e-9)


def test_rotary_positions_and_shared_key_heads_against_the_softmax_input(monkeypatch):
    model, batch = build("qwen2, sdpa")
    model.double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3, generator=torch.Generator().manual_seed(weight.numel()))
    result = measured(model, batch)
    inputs, softmax = [], nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, *a, **k: inputs.append(x) or softmax(x, *a, **k))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        call(model, batch)
    assert len(inputs) == 2
    for layer, scores in zip(result.layers, inputs, strict=True):
        assert layer.largest_logit == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-6)
        real = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool)
        assert layer.entropy == pytest.approx(entropies(scores.softmax(-1), real), rel=1e-6)


@pytest.mark.parametrize("is_batch_first", [True, False])
def test_torch_attention_with_a_causal_mask_and_padding(is_batch_first):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=is_batch_first), 2, enable_nested_tensor=False
    ).double()
    model.eval()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    given = x if is_batch_first else x.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(7).double()
    padding = torch.where(MASK.bool(), 0.0, -math.inf).double()
    batch = {"src": given, "mask": causal, "src_key_padding_mask": padding}
    result = measured(model, batch)
    real = MASK.bool()
    hidden = given
    for number, layer in enumerate(model.layers):
        with torch.no_grad():
            _, weights = layer.self_attn(
                hidden, hidden, hidden, attn_mask=causal, key_padding_mask=padding, average_attn_weights=False
            )
            heads = Heads(layer.self_attn, (hidden,) * 3)
            inputs = {"query": hidden, "key": hidden, "value": hidden, "attn_mask": causal, "key_padding_mask": padding}
            written = heads.outputs(inputs)[0][real].square().sum(-1).mean(0)
            hidden = layer(hidden, src_mask=causal, src_key_padding_mask=padding)
        assert result.layers[number].entropy == pytest.approx(entropies(weights, real), rel=1e-9)
        assert result.layers[number].written == pytest.approx((written / written.mean()).sqrt().tolist(), rel=1e-9)
        after = hidden if is_batch_first else hidden.transpose(0, 1)
        unit = nn.functional.normalize(after, dim=-1)
        both = [unit[b][real[b]] @ unit[b][real[b]].T for b in range(2)]
        cosines = [(float(c.sum()) - len(c)) / (len(c) - 1) for c in both]
        assert result.layers[number].tokens == pytest.approx(sum(cosines) / 11, rel=1e-9)


def causal_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 40, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return model, {
        "src": torch.randn(2, 7, 32),
        "mask": mask,
        "src_key_padding_mask": torch.where(MASK.bool(), 0.0, -math.inf),
    }


LONG = {
    "bert": lambda: (bert("sdpa").float(), {"input_ids": torch.arange(5, 19).view(2, 7), "attention_mask": MASK}),
    "causal": lambda: build("qwen2, sdpa"),
    "eager": lambda: build("gpt-neox, eager"),
    "torch": causal_encoder,
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_are_measured_on_fewer_items_and_queries(name, monkeypatch):
    model, batch = LONG[name]()
    model.double().eval()
    if name == "torch":
        batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    seen = []
    real = Pass.keep_logits
    monkeypatch.setattr(
        Pass, "keep_logits", lambda self, layer, x, queries=None: seen.append(x) or real(self, layer, x, queries)
    )
    measured(model, batch)
    whole, seen[:] = list(seen), []
    monkeypatch.setattr("repulsive.diagnostics.hooks.attention.MAX_LOGITS", 4 * 7 * 3)  # heads x keys x queries
    result = measured(model, batch)
    rows = [0, 3, 6]
    mask = batch.get("attention_mask", MASK if name == "torch" else torch.ones(2, 7))[:1, rows].bool()
    for layer, full, part in zip(result.layers, whole, seen, strict=True):
        assert part.shape == (1, 4, 3, 7) and torch.allclose(part, full[:1, :, rows], atol=1e-12)
        assert layer.entropy == pytest.approx(entropies(full[:1, :, rows].softmax(-1), mask), rel=1e-9)


def test_a_dead_head_writes_nothing_and_copies_are_equal():
    model = bert("sdpa")
    first, second = (layer.attention for layer in model.encoder.layer)
    with torch.no_grad():
        first.output.dense.weight[:, 8:16] = 0  # head 1
        for projection in (second.self.query, second.self.key):
            projection.weight[24:32], projection.bias[24:32] = projection.weight[:8], projection.bias[:8]
    result = measured(model, {"input_ids": torch.randint(3, 60, (2, 7))})
    assert result.layers[0].written[1] == 0 < min(result.layers[0].written[i] for i in (0, 2, 3))
    assert result.layers[1].cosine[0][3] == pytest.approx(1, abs=1e-12)


def test_permuting_heads_permutes_every_number():
    model, order = bert("sdpa"), [2, 0, 3, 1]
    batch = {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": MASK}
    before = measured(model, batch).layers[0]
    attention = model.encoder.layer[0].attention
    rows = torch.cat([torch.arange(8) + 8 * head for head in order])
    with torch.no_grad():
        for projection in (attention.self.query, attention.self.key, attention.self.value):
            projection.weight.copy_(projection.weight[rows])
            projection.bias.copy_(projection.bias[rows])
        attention.output.dense.weight.copy_(attention.output.dense.weight[:, rows])
    after = measured(model, batch).layers[0]
    for name in ("entropy", "largest_logit", "written"):
        assert getattr(after, name) == pytest.approx([getattr(before, name)[head] for head in order])
    assert after.cosine[0][1] == pytest.approx(before.cosine[2][0]) and after.tokens == pytest.approx(before.tokens)


def test_under_autocast_the_rounded_queries_and_keys_are_compared_in_single_precision():
    model, batch = bert("sdpa").float(), {"input_ids": torch.randint(3, 60, (2, 7))}
    recorder, made = HeadRecorder(model), {}
    attention = model.encoder.layer[0].attention.self
    for name in ("query", "key"):
        getattr(attention, name).register_forward_hook(lambda _m, _a, out, name=name: made.update({name: out.double()}))
    with torch.autocast("cpu", torch.bfloat16), recorder.recording(batch, 0) as result:
        model(**batch)
    q, k = (made[name].unflatten(-1, (4, 8)).transpose(1, 2) for name in ("query", "key"))  # [B, M, T, d]
    logits = q @ k.mT / math.sqrt(8)
    layer = result.finish().layers[0]
    assert layer.largest_logit == pytest.approx(logits.amax((0, 2, 3)).tolist(), rel=1e-6)
    assert layer.entropy == pytest.approx(entropies(logits.softmax(-1).detach(), torch.ones(2, 7)), rel=1e-6)


def test_only_the_first_items_and_a_sample_of_tokens_count():
    model = bert("sdpa")
    ids = torch.randint(3, 60, (6, 7))
    part, first = measured(model, {"input_ids": ids}, items=2), measured(model, {"input_ids": ids[:2]})
    for layer, wanted in zip(part.layers, first.layers, strict=True):
        assert layer.entropy == pytest.approx(wanted.entropy) and layer.tokens == pytest.approx(wanted.tokens)
        assert layer.written == pytest.approx(wanted.written)
    every = measured(model, {"input_ids": ids}).layers[0].cosine
    few = measured(model, {"input_ids": ids}, tokens=10).layers[0].cosine
    assert few != every and few == measured(model, {"input_ids": ids}, tokens=10).layers[0].cosine


@pytest.mark.parametrize("name", ["t5", "bart, sdpa", "olmo2, eager", "albert, sdpa", "additive", "timm"])
def test_other_families_give_finite_numbers(name):
    model, batch = build(name)
    recorder = HeadRecorder(model)
    with torch.no_grad(), recorder.recording(batch if isinstance(batch, dict) else {}, 0) as result:
        call(model.eval(), batch)
    layers = result.finish().layers
    assert len(layers) == len(recorder.layers)
    for layer in layers:
        values = layer.values()
        assert all(map(math.isfinite, values.values()))
        assert {"entropy", "largest_logit", "smallest_write"} <= set(values)
        assert ("similarity" in values) == (name != "additive")


@pytest.mark.parametrize("name", ["qwen2, sdpa", "torch packed", "gpt-neox, sdpa", "bart, sdpa", "nanogpt"])
def test_ov_circuits_are_those_of_the_diagnostics(name):
    model, batch = build(name)
    expected = circuit_similarity(model, [batch]).ov
    layers = measured(model.eval(), batch).layers  # without dropout
    assert len(layers) == len(expected) > 0
    for layer, other in zip(layers, expected, strict=True):
        assert (layer.ov_similarity, layer.ov_largest) == pytest.approx((other.mean, other.largest), abs=1e-5)


def test_layers_without_logits_between_tokens_say_so():
    layer = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True)
    recorder = HeadRecorder(layer)
    assert recorder.not_measured == {("", "entropy"): "bias_k or add_zero_attn adds keys that are not tokens"}
    x = torch.randn(2, 5, 16)
    with recorder.recording({}, 0) as result:
        layer(x, x, x)
    (measured,) = result.finish().layers
    assert measured.entropy == () and len(measured.cosine) == 4 and not math.isnan(measured.tokens)


def test_nothing_is_left_on_the_model():
    model, batch = build("bert, sdpa")
    before = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    measured(model, batch)
    assert before == {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}


def test_attention_with_nan_has_no_entropy():
    model = bert("sdpa")
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[:8] = math.nan  # head 0
    layers = measured(model, {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": MASK}).layers
    assert all(map(math.isfinite, layers[0].entropy))
    assert [math.isnan(entropy) for entropy in layers[1].entropy] == [True, False, False, False]
    assert "entropy" in layers[0].values() and "entropy" not in layers[1].values()


def test_a_decoder_that_is_called_with_labels_is_measured_at_all_its_tokens():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, attn_implementation="eager"
    )
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config).double().eval()
    given, labels = torch.randint(3, 60, (2, 2, 7))
    batch = {"input_ids": given, "attention_mask": MASK, "labels": labels}  # MASK is of the encoder's tokens
    with torch.no_grad():
        known = model(**batch, output_attentions=True)
    layers = {layer.name: layer for layer in measured(model, batch).layers}
    everywhere = torch.ones(2, 7, dtype=torch.bool)
    for name, weights, real in (
        ("encoder.block.0.layer.0.SelfAttention", known.encoder_attentions, MASK.bool()),
        ("decoder.block.0.layer.0.SelfAttention", known.decoder_attentions, everywhere),
        ("decoder.block.0.layer.1.EncDecAttention", known.cross_attentions, everywhere),
    ):
        assert layers[name].entropy == pytest.approx(entropies(weights[0], real), rel=1e-9)
