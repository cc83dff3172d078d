"""Generator and discriminator: what they share, how tokens are sampled, and who gets which gradient."""

import pytest
import torch

from repulsive.heads import find_heads, verify_heads
from repulsive.lab.systems.electra.model import (
    ElectraConfig,
    keep_narrow,
    make_electra,
    make_masked,
    padded_linear,
    replace_tokens,
    sample,
    states_of,
)

pytest.importorskip("transformers")
SIZES = ElectraConfig(vocabulary=30, layers=2, width=16, heads=4, feed_forward=32, embedding=8, dropout=0.0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return make_electra(SIZES)


def test_the_official_sizes():
    with torch.device("meta"):
        made = make_electra(ElectraConfig(30_522))
    assert sum(p.numel() for p in made.discriminator.parameters()) == 13_549_057
    assert 14e6 < sum(p.numel() for p in made.parameters()) < 14.5e6  # the paper has 14M
    own = made.generator.config
    assert (own.hidden_size, own.num_attention_heads, own.intermediate_size) == (64, 1, 256)
    assert (own.num_hidden_layers, own.embedding_size) == (12, 128)


def test_embeddings_are_shared_and_output_is_tied(model):
    shared = model.discriminator.electra.embeddings
    assert model.generator.electra.embeddings is shared
    assert model.generator.generator_lm_head.weight is shared.word_embeddings.weight
    names = {name for name, p in model.named_parameters() if p is shared.word_embeddings.weight}
    assert len(names) == 1  # an optimizer sees it once
    before = model.state_dict()
    again = make_electra(SIZES)
    again.load_state_dict(before)
    assert again.generator.generator_lm_head.weight is again.discriminator.electra.embeddings.word_embeddings.weight


def test_samples_follow_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -30.0]])
    draw = torch.Generator().manual_seed(0)
    found = sample(logits.expand(40_000, -1), draw).bincount(minlength=4) / 40_000
    assert torch.allclose(found, logits.softmax(-1)[0], atol=0.01)  # standard deviation 0.0025


@pytest.mark.slow
def test_samples_across_stretches():
    """1,000 classes, more than a stretch has; those of no probability are never drawn."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(1000, dtype=torch.float64)
    logits[::7], logits[400:530] = -torch.inf, -torch.inf
    expected, count = logits.softmax(-1), 400_000
    found = sample(logits.float().expand(count, -1)).bincount(minlength=1000)
    assert found.sum() == count and bool((found[expected == 0] == 0).all())
    likely = expected * count > 5
    surprise = ((found - expected * count) ** 2 / (expected * count))[likely].sum() / likely.sum()
    assert 0.8 < surprise < 1.2  # chi-squared over its degrees of freedom, some 700: 1 +- 0.05


def test_put_leaves_the_first_place_alone():
    tokens = torch.arange(10, 18).view(2, 4)
    found = replace_tokens(tokens, torch.tensor([[1, 1, 0], [3, 0, 2]]), torch.tensor([[5, 5, 6], [7, 8, 9]]))
    assert found.tolist() == [[10, 5, 12, 13], [14, 15, 9, 7]]
    assert tokens.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]


def batch():
    tokens = torch.randint(5, 30, (3, 8))
    places = torch.tensor([[1, 2], [3, 3], [4, 6]])
    first = torch.tensor([[0, 1], [0, 0], [0, 1]])
    return tokens, replace_tokens(tokens, places, torch.full((3, 2), 4)), torch.zeros_like(tokens), places, first


def test_what_comes_out(model):
    tokens, masked, types, places, first = batch()
    logits, corrupted, replaced = model(tokens, masked, types, places, first, None, torch.Generator().manual_seed(1))
    assert logits.shape == (3, 2, 30) and replaced.shape == tokens.shape
    whole = model.generator(masked, token_type_ids=types).logits  # transformers' own, at all places
    assert torch.allclose(logits, whole.gather(1, places.unsqueeze(-1).expand(-1, -1, 30)), atol=1e-6)
    samples = sample(logits, torch.Generator().manual_seed(1))
    for row in range(3):
        for column in range(2):
            assert corrupted[row, places[row, column]] == samples[row, first[row, column]]
    changed = corrupted != tokens
    assert not changed.scatter(1, places, False).any()
    assert torch.allclose(replaced, model.discriminator(corrupted, token_type_ids=types).logits, atol=1e-6)


def test_the_discriminator_does_not_teach_the_generator(model):
    """Sampling passes no gradient on; what both share gets it from both."""
    *_, replaced = model(*batch())
    replaced.sum().backward()
    own = {name: p.grad for name, p in model.generator.named_parameters() if "embeddings." not in name}
    assert all(grad is None for name, grad in own.items() if name != "generator_lm_head.weight")
    assert model.discriminator.electra.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_padding_changes_nothing(model):
    tokens, masked, types, places, first = batch()
    padded = [torch.cat([x, torch.zeros(3, 5, dtype=torch.long)], 1) for x in (tokens, masked, types)]
    seen = (torch.arange(13) < 8).expand(3, 13)[:, None, None]
    short, long = (
        model(*some, places, first, mask, torch.Generator().manual_seed(1))
        for some, mask in (((tokens, masked, types), None), (padded, seen))
    )
    assert torch.allclose(short[0], long[0], atol=1e-5) and torch.equal(short[1], long[1][:, :8])
    assert torch.allclose(short[2], long[2][:, :8], atol=1e-5)


def test_heads_of_the_discriminator(model):
    groups = find_heads(model.discriminator, layers="first")
    assert [(g.part, g.layer, g.num_heads, g.dim) for g in groups] == [(part, 0, 4, 64) for part in "qkv"]
    weight = model.discriminator.electra.encoder.layer[0].attention.self.query.weight
    assert torch.equal(groups[0].read(), weight.view(4, -1))
    verify_heads(model.discriminator, torch.randint(5, 30, (2, 6)))  # raises where a slice is no head
    strided = find_heads(model.discriminator, layers="first", layout="strided")
    assert torch.equal(strided[0].read(), torch.stack([weight[i::4].flatten() for i in range(4)]))


def test_the_same_network_for_masked_language_modelling():
    torch.manual_seed(0)
    model = make_masked(SIZES)
    _, masked, types, places, _ = batch()
    expected = model.network(masked, token_type_ids=types).logits.gather(1, places.unsqueeze(-1).expand(-1, -1, 30))
    assert torch.allclose(model(masked, types, places), expected, atol=1e-6)
    assert model.network.generator_lm_head.weight is model.network.electra.embeddings.word_embeddings.weight


@pytest.mark.parametrize("hidden", [0, 3])
def test_states_are_those_of_transformers_own_forward(model, hidden):
    """With a mask and without; in `states_of` nobody makes another one."""
    network = model.eval().discriminator.electra
    tokens, types = torch.randint(1, 30, (2, 7)), torch.zeros(2, 7, dtype=torch.int64)
    seen = (torch.arange(7) < 7 - hidden).expand(2, 7)
    found = states_of(network, tokens, types, seen[:, None, None] if hidden else None)
    expected = network(tokens, attention_mask=seen.long(), token_type_ids=types)[0]
    assert torch.allclose(found[seen], expected[seen], atol=1e-6)


def test_narrow_states_between_blocks(model):
    """Under autocast alone; without it nothing changes."""
    network, tokens = model.eval().discriminator.electra, torch.randint(1, 30, (2, 7))
    given = tokens, torch.zeros_like(tokens), None
    plain = states_of(network, *given)
    keep_narrow(model)
    assert torch.equal(states_of(network, *given), plain)
    seen = []
    for layer in network.encoder.layer:
        layer.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = states_of(network, *given)
    assert found.dtype == torch.bfloat16 and set(seen) == {torch.bfloat16}
    assert torch.allclose(found.float(), plain, atol=0.1)


def test_padded_words_are_never_seen():
    torch.manual_seed(0)
    linear, x, target = torch.nn.Linear(5, 11).double(), torch.randn(6, 5).double(), torch.randint(11, (6,))
    found = []
    for logits in (linear(x), padded_linear(linear, x)):
        linear.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits, target)
        loss.backward()
        found.append((loss.detach(), linear.weight.grad.clone(), linear.bias.grad.clone()))
    assert logits.shape == (6, 16) and sample(logits).max() < 11
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*found, strict=True))
    assert padded_linear(linear, x, 11).shape == (6, 11)
