"""Find masks in the arguments of a call: by name, by position, and inside objects."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from repulsive import SVGD, repel
from repulsive.heads.padding import masks_in, valid_tokens
from repulsive.lab.systems.translation.attention import Mask

MASK = torch.tensor([[True, True, False], [True, False, False]])


class Layer(nn.Module):
    def forward(self, x: Tensor, mask: object = None, *others: Tensor) -> Tensor:
        return x


def test_masks_are_found_by_position_and_by_name():
    x = torch.zeros(2, 3, 4)
    assert masks_in(Layer(), (x, MASK), {})["mask"] is MASK
    assert masks_in(Layer(), (x,), {"mask": MASK})["mask"] is MASK
    assert masks_in(Layer(), (x, MASK, x, x), {"others_too": x}) == {"mask": MASK}
    assert masks_in(Layer(), (x,), {}) == {}


def test_an_object_holds_its_mask_as_the_attribute_attention_mask():
    x = torch.zeros(2, 3, 4)
    assert masks_in(Layer(), (x, SimpleNamespace(attention_mask=MASK)), {})["mask"] is MASK
    for other in (SimpleNamespace(real=MASK), SimpleNamespace(attention_mask=None), 1.0, None):
        assert masks_in(Layer(), (x, other), {}) == {}


def test_the_translation_model_leaves_out_its_padding():
    masks = masks_in(Layer(), (torch.zeros(2, 3, 4), Mask(MASK[:, None, None, :])), {})
    valid = valid_tokens(masks, (2, 3), "encoder", "k")
    assert valid is not None and torch.equal(valid, MASK)


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_a_causal_mask_of_torchs_encoder_is_not_padding(kind):
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    causal = causal if kind == "float" else causal != 0
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = repel(model, optimizer, SVGD(space="logits"), verbose=False)
    model(torch.randn(6, 6, 8), mask=causal).sum().backward()
    samples = handle._logits.sampler.samples
    assert [float(samples[0, part].weights.sum()) for part in "qk"] == [36, 36]


class Wrapper(nn.Module):
    """An encoder whose argument `mask` is True for padding, unlike that of most models."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_padding_mask_of_a_layer_overrules_that_of_the_model(is_compiled):
    model, x = Wrapper(), torch.randn(2, 3, 8)
    handle = repel(model, torch.optim.AdamW(model.parameters()), SVGD(space="logits"), verbose=False)
    (torch.compile(model, backend="aot_eager") if is_compiled else model)(x, ~MASK).sum().backward()
    samples = handle._logits.sampler.samples
    for part in "qk":
        sample = samples[0, part]
        real = sample.weights.bool()
        assert torch.equal(sample.inputs[0][real], x[MASK])


@pytest.mark.parametrize("length", [5, 6])
@pytest.mark.parametrize("match", [None, "*decoder*SelfAttention*"])
def test_padding_of_the_encoder_does_not_apply_to_the_decoder(length, match):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    handle = repel(model, torch.optim.AdamW(model.parameters()), SVGD(space="logits"), match=match, verbose=False)
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[:, 2:] = 0
    ids, labels = torch.randint(3, 50, (3, 6)), torch.randint(3, 50, (3, length))
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    real = {}
    for (number, part), sample in handle._logits.sampler.samples.items():
        real[handle._logits.layers[number].where, part] = int(sample.weights.sum())
    assert real["decoder", "q"] == real["decoder", "k"] == 3 * length
    if match is None:
        assert real["encoder", "q"] == real["encoder", "k"] == real["cross", "k"] == 6
        assert real["cross", "q"] == 3 * length


def test_the_decoders_own_mask_applies_to_the_decoder():
    masks = {"attention_mask": MASK, "decoder_attention_mask": ~MASK}
    valid = valid_tokens(masks, (2, 3), "decoder", "k", of_source=True)
    assert valid is not None and torch.equal(valid, ~MASK)
    assert valid_tokens({"attention_mask": MASK}, (2, 3), "decoder", "k", of_source=True) is None
    decoder_only = valid_tokens({"attention_mask": MASK}, (2, 3), "decoder", "k")
    assert decoder_only is not None and torch.equal(decoder_only, MASK)


@pytest.mark.parametrize(
    ("length", "masked", "cause"), [(3, True, "every token .* is masked"), (1, False, "only one token")]
)
def test_batches_without_two_tokens_to_choose_between_are_named(length, masked, cause):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = repel(model, optimizer, SVGD(alpha="auto", space="logits"), verbose=False, measure_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        padding = torch.full((4, length), masked)
        model(torch.randn(4, length, 8), src_key_padding_mask=padding).nan_to_num().sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    messages = [str(one.message) for one in caught]
    assert [message for message in messages if re.search(cause, message)] == messages
    assert len(messages) == 1
    assert [one.repulsion for one in handle.report()] == [0, 0, 0, 0]
