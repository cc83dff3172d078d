"""`Heads.similarity`: equal heads, CKA against its formula, and padding."""

import pytest
import torch
from torch import nn

from repulsive.diagnostics.cka import cka_of_grams, cka_without_groups, token_grams
from repulsive.diagnostics.model_heads import Heads
from tests.diagnostics.small_models import bert, make

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("seed", range(5))
def test_a_head_that_varies_in_one_sequence_only_has_no_cka_without_it(seed):
    outputs = torch.randn(3, 3, 7, 4, generator=torch.Generator().manual_seed(seed)).double()  # [B, M, T, d]
    outputs[1:, 0] = outputs[1, 0, 0]  # head 0
    without = cka_without_groups(*token_grams(outputs), 3)
    assert not without[0, 0].any() and not without[0, :, 0].any()
    assert (without[1:] > 0.01).all() and (without[0, 1:, 1:] > 0.01).all()
