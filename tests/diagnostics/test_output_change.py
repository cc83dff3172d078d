"""Change of a model's own output, and the loss without labels, against their formulas."""

import math

import pytest
import torch

from repulsive.diagnostics.hooks.calling import evaluating
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.output_change import Output, OutputChange, label_free_loss, output_change, read_output
from repulsive.errors import DataError
from tests.diagnostics.masked_lm import masked_lm, text
from tests.heads.zoo import SMALL, ids

transformers = pytest.importorskip("transformers")


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


def test_an_item_of_padding_only_has_no_change():
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1] = 0
    found = inspect_heads(masked_lm(), [{"input_ids": ids(), "attention_mask": mask}], ablation=True)
    assert found.ablation is not None and found.ablation.change.isfinite().all()
    assert (found.ablation.items[..., 0] > 0).all() and (found.ablation.items[..., 1] == 0).all()
    zeros, ones = Output("states", torch.zeros(1, 2, 3)), Output("states", torch.ones(1, 2, 3))
    assert output_change(zeros, zeros).tolist() == [0] and output_change(zeros, ones).tolist() == [math.inf]
