"""Padding is left out in the same way by `Heads`, the monitor and `space="logits"`, also if only layers get a mask."""

import math

import pytest
import torch
from torch import Tensor, nn

from repulsive import SVGD, HeadMonitor, Heads, repel
from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.hooks.measure_batches import measure_batches
from repulsive.diagnostics.output_ablation import ablate_output
from repulsive.diagnostics.output_change import OutputChange, label_free_loss
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.heads.padding import are_tokens, compact, masks_in, valid_tokens
from tests.repulsion.logits.changed_models import CHANGED

VALID = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.attention = OwnAttention() if own else nn.MultiheadAttention(16, 4, batch_first=True)
        self.own = own

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        if self.own:
            return x + self.attention(x, real)
        return x + self.attention(x, x, x, key_padding_mask=~real, need_weights=False)[0]


class Renamed(nn.Module):
    """The model's mask has a name of its own; only its attention layers get one with a common name."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(own) for _ in range(2))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, valid)
        return x


class Named(Renamed):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(x, attention_mask)


def measure(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    heads = Heads(model, batch)
    numbers = {
        space: torch.stack([layer.cosine.double() for layer in heads.similarity([batch], space, twins=0)])
        for space in ("logits", "ov", "attention", "outputs", "cka")
    }
    layers = find_attention_layers(model, heads.groups)
    loss = label_free_loss(torch.Generator().manual_seed(0), layers)
    numbers["importance"] = heads.importance([batch], loss)
    numbers["exact"] = ablate_output(model, [batch], layers=layers).items
    numbers["complete"] = head_ablation(model, OutputChange(model, [batch], layers), layers=layers).change
    numbers["measured"] = torch.stack(
        [one.cosine for one in measure_batches(model, [batch], layers).diversity["outputs"]]
    )
    with torch.no_grad(), heads.ablated([(0, 1)], mode="mean"):
        numbers["mean"] = model(**batch)
    return numbers


@pytest.mark.parametrize("own", [True, False])
def test_heads_leave_out_padding_that_only_layers_show(own):
    found = measure(Renamed(own), {"x": X, "valid": VALID})
    wanted = measure(Named(own), {"x": X, "attention_mask": VALID})
    everything = measure(Named(own), {"x": X, "attention_mask": torch.ones_like(VALID)})
    for name, numbers in wanted.items():
        torch.testing.assert_close(found[name], numbers, msg=name)
        assert not torch.allclose(everything[name], numbers, atol=1e-6), name


@pytest.mark.parametrize("own", [True, False])
def test_the_monitor_leaves_out_padding_that_only_layers_show(own):
    measured = []
    for model, name in ((Renamed(own), "valid"), (Named(own), "attention_mask")):
        monitor = HeadMonitor(model.train())
        model(x=X, **{name: VALID}).sum().backward()
        measured.append(monitor.history[0])
    assert measured[0] == measured[1]


@pytest.mark.parametrize("own", [True, False])
def test_functions_of_the_caller_alone_decide_which_tokens_count(own):
    model, batch = Renamed(own).eval(), {"x": X, "valid": VALID}
    layers = find_attention_layers(model)
    padded, everything = (
        measure_batches(model, [batch], layers, real=real).diversity["outputs"][0].cosine
        for real in (None, lambda *_: None)
    )
    assert not torch.allclose(padded, everything)


def test_states_of_padding_do_not_change_importance():
    model, other = Named(True).eval(), torch.where(VALID[..., None], X, X + 1)
    layers = find_attention_layers(model)
    first, second = (
        Heads(model, batch).importance([batch], label_free_loss(torch.Generator().manual_seed(0), layers))
        for batch in ({"x": x, "attention_mask": VALID} for x in (X, other))
    )
    torch.testing.assert_close(first, second)


def translator(kind: str) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    if kind == "bart":
        sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
                 (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))}  # fmt: skip
        return BartForConditionalGeneration(BartConfig(vocab_size=50, d_model=8, dropout=0.0, **sizes))
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, dropout_rate=0.0, **sizes))


IDS = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.cat([IDS[:1], torch.tensor([[7, 8, -100, -100, -100, -100]])])
DECODER_MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])  # start, 7, 8


def samples_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[tuple[str, str], int]:
    handle = repel(model.train(), torch.optim.AdamW(model.parameters()), SVGD(space="logits"), verbose=False)
    model(**batch).loss.backward()
    counts = {
        (handle._logits.layers[number].where, part): int(sample.weights.sum())
        for (number, part), sample in handle._logits.sampler.samples.items()
    }
    handle.steps = 1
    handle.remove()
    return counts


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_labels_show_the_padding_of_a_decoder_that_reads_them(kind):
    model = translator(kind)
    batch = {"input_ids": IDS, "labels": LABELS}
    masked = batch | {"decoder_attention_mask": DECODER_MASK}
    real = samples_of(model, batch)
    assert real["decoder", "q"] == real["decoder", "k"] == real["cross", "q"] == 9
    assert real["encoder", "q"] == real["cross", "k"] == 12
    for space in ("logits", "outputs"):
        found, wanted = (Heads(model.eval()).similarity([each], space, twins=0) for each in (batch, masked))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cosine, other.cosine)
    measured = []
    for each in (batch, masked):
        monitor = HeadMonitor(model.train())
        model(**each).loss.backward()
        measured.append(monitor.history[0])
    assert measured[0] == measured[1]


@pytest.mark.slow
def test_labels_of_a_compiled_translator_show_its_padding():
    model = translator("t5")
    compiled = torch.compile(model, backend="eager")
    assert samples_of(compiled, {"input_ids": IDS, "labels": LABELS})["decoder", "q"] == 9


def test_labels_do_not_mark_padding_elsewhere():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = translator("t5")
    given = model.prepare_decoder_input_ids_from_labels(LABELS)  # the caller may also have made other tokens
    assert samples_of(model, {"input_ids": IDS, "labels": LABELS, "decoder_input_ids": given})["decoder", "q"] == 12
    prompt = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    assert samples_of(prompt, {"input_ids": IDS, "labels": LABELS})["decoder", "q"] == 12


class OwnNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Transformer(16, 4, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, real_source: Tensor, real_target: Tensor) -> Tensor:
        masks = {"src_key_padding_mask": ~real_source, "tgt_key_padding_mask": ~real_target}
        return self.inner(source, target, **masks, memory_key_padding_mask=~real_source)


@pytest.mark.filterwarnings("ignore:.*nested.*")
def test_queries_of_cross_attention_are_tokens_of_the_decoder():
    model, batch = OwnNames(), (X, X[:, :4], VALID, VALID[:, 1:5])
    heads = Heads(model.eval(), batch)
    for space in ("logits", "outputs"):
        assert [layer.tokens for layer in heads.similarity([batch], space, twins=0)] == [10, 7, 7]
    handle = repel(model.train(), torch.optim.AdamW(model.parameters()), SVGD(space="logits"), verbose=False)
    model(*batch).sum().backward()
    real = {
        (handle._logits.layers[number].where, part): int(sample.weights.sum())
        for (number, part), sample in handle._logits.sampler.samples.items()
    }
    assert real["cross", "q"] == real["decoder", "q"] == 7 and real["cross", "k"] == real["encoder", "k"] == 10


LARGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[True, False]], [[True, False]]),
        ([[1, 0]], [[True, False]]),
        ([[1.0, 0.0]], [[True, False]]),
        ([[0.0, -LARGE]], [[True, False]]),  # added to logits
        ([[0.0, -math.inf]], [[True, False]]),
        ([[0.0, 0.0]], [[True, True]]),  # added to logits, without padding
        ([[LARGE, 0.0]], [[True, True]]),  # the same, with global attention of the first token, as in Longformer
        ([[LARGE, -LARGE]], [[True, False]]),
        ([[2.0, 0.0]], [[True, False]]),  # Longformer's own mask: 2 is a token with global attention
    ],
)
def test_masks_of_numbers_may_be_added_to_logits(mask, expected):
    assert are_tokens(torch.tensor(mask)).tolist() == expected


PER_QUERY = VALID[:, None, None].expand(2, 1, 6, 6)
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("mask", VALID[:, None, None]),
        ("mask", PER_QUERY.long()),  # DeBERTa
        ("mask", VALID[:, None].to(torch.uint8)),
        ("mask", PER_QUERY.double()),
        ("mask", PER_QUERY & CAUSAL),
        ("mask", (PER_QUERY & CAUSAL).float()),
        ("mask", (~PER_QUERY).float() * -10_000),
        ("mask", (~(PER_QUERY & CAUSAL)).half() * -10_000),
        ("mask", (~PER_QUERY).float() * -1e9 - (torch.arange(6.0) - 5).abs()),  # with a bias by position
        ("mask", torch.zeros(PER_QUERY.shape).masked_fill(~PER_QUERY, -math.inf)),
        ("key_padding_mask", ~VALID),
        ("key_padding_mask", ~VALID[:, None, None]),
        ("key_padding_mask", (~PER_QUERY).long()),
        ("key_padding_mask", (~PER_QUERY).float() * -1e9),
    ],
)
def test_masks_of_queries_and_keys_show_padding(name, mask):
    class Attention(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, key_padding_mask: Tensor | None = None) -> None: ...

    masks = masks_in(Attention(), (X,), {name: mask})
    assert torch.equal(valid_tokens(masks, (2, 6), "encoder", "k"), VALID)
    if mask.ndim > 2:  # as compiled models keep it
        assert torch.equal(valid_tokens({name: compact(masks[name])}, (2, 6), "encoder", "k"), VALID)


def test_a_causal_mask_is_not_the_padding_of_as_many_sequences():
    added = torch.zeros(6, 6).masked_fill(~CAUSAL, -math.inf)
    for mask in (CAUSAL, ~CAUSAL, CAUSAL.long(), (~CAUSAL).float() * -1e9, added):
        assert valid_tokens({"mask": mask}, (6, 6), "encoder", "q").all()
    lengths = torch.arange(6) < torch.tensor([[6], [3], [4], [1], [5], [2]])
    assert torch.equal(valid_tokens({"mask": lengths}, (6, 6), "encoder", "q"), lengths)


def test_heads_of_deberta_leave_out_padding():
    from transformers import DebertaConfig, DebertaModel

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = DebertaConfig(vocab_size=50, hidden_size=8, relative_attention=True, pos_att_type=["c2p", "p2c"], **sizes)
    model, mask = DebertaModel(config).eval(), VALID.long()
    heads = Heads(model)
    padded = heads.similarity([{"input_ids": IDS, "attention_mask": mask}], "outputs", twins=0)
    alone = [{"input_ids": IDS[:1]}, {"input_ids": IDS[1:, :4]}]
    torch.testing.assert_close(padded[0].cosine, heads.similarity(alone, "outputs", twins=0)[0].cosine)


def test_a_monitor_reads_masks_that_layers_add_to_logits():
    case = CHANGED["longformer"]()
    with HeadMonitor(case.model.train(), every=1) as monitor:
        case.call().sum().backward()
        monitor.step()
    assert [len(layer.written) for layer in monitor.history[0].layers] == [3, 3]
