"""GraphWriter: attention one graph at a time, one distribution, padding, search against all texts, its heads."""

import itertools
import math

import pytest
import torch

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers, replaced_head_outputs
from repulsive.errors import HeadLayoutError
from repulsive.heads import find_heads, verify_heads
from repulsive.lab.layers.beam_search import Ends
from repulsive.lab.systems.graphs.attention import GraphSizes
from repulsive.lab.systems.graphs.encoder import GraphTransformer, adjacency, present
from repulsive.lab.systems.graphs.model import GraphWriter, GraphWriterConfig
from repulsive.lab.systems.graphs.search import write

GRAPHS = [  # entities, relations
    (3, [(0, 3, 1), (1, 4, 2), (1, 3, 1)]),  # with a relation of an entity to itself
    (1, []),
    (4, [(3, 1, 0), (0, 4, 3)]),  # one unknown
]
NAMED = 2


def sizes(**changes):
    return GraphSizes(**({"width": 16, "heads": 4, "layers": 3, "dropout": 0.0} | changes))


def tables(graphs=GRAPHS, entities=5, relations=4):
    """Which entities there are, and relations: padded."""
    real = torch.tensor([[i < count for i in range(entities)] for count, _ in graphs])
    rows = [[*some, *[(0, 0, 0)] * (relations - len(some))] for _, some in graphs]
    return real, torch.tensor(rows)


def tiny(**changes):
    torch.manual_seed(1)
    graph = sizes(**{name: changes.pop(name) for name in list(changes) if name in GraphSizes.__dataclass_fields__})
    config = GraphWriterConfig(
        **({"words": 12, "entity_words": 9, "relations": 3 + 2 * NAMED, "graph": graph} | changes)
    )
    return GraphWriter(config).double().eval()


def inputs(graphs=GRAPHS, title=4, entities=5, words=3, relations=4, length=6):
    """The same graphs whatever the padding; the second has no title."""
    draw = torch.Generator().manual_seed(3)
    drawn = torch.randint(4, 12, (len(graphs), 3), generator=draw)
    titles = torch.zeros(len(graphs), title, dtype=torch.int64)
    titles[:, :3] = drawn
    titles[1] = 0
    names = torch.zeros(len(graphs), entities, words, dtype=torch.int64)
    for b, (count, _) in enumerate(graphs):
        for e in range(count):
            size = 1 + (b + e) % 3
            names[b, e, :size] = 1 + torch.randint(8, (3,), generator=draw)[:size]
    before = torch.randint(2, 12, (len(graphs), 6), generator=draw)[:, :length]
    return titles, names, tables(graphs, entities, relations)[1], before


# attention


def one_graph(encoder, nodes, count, relations, scale):
    """Layers for a single graph, node by node and head by head: nodes are root, entities, relations, inverses."""
    inverse = 1 + count + len(relations)
    neighbours = [{i} for i in range(len(nodes))]
    for e in range(1, 1 + count):
        neighbours[0].add(e)
        neighbours[e].add(0)
    for r, (a, _, b) in enumerate(relations):
        forth, back = 1 + count + r, inverse + r
        neighbours[1 + a].add(forth)
        neighbours[forth].add(1 + b)
        neighbours[1 + b].add(back)
        neighbours[back].add(1 + a)
    for layer in encoder.layers:
        attention, after = layer.attention, []
        for i, near in enumerate(neighbours):
            heads = []
            for head in range(4):
                rows = slice(4 * head, 4 * head + 4)
                q = attention.q_proj.weight[rows] @ nodes[i]
                keys = {j: attention.k_proj.weight[rows] @ nodes[j] for j in near}
                exponentials = {j: torch.exp(q @ key / scale) for j, key in keys.items()}
                total = sum(exponentials.values())
                heads.append(sum(exponentials[j] / total * (attention.v_proj.weight[rows] @ nodes[j]) for j in near))
            t = layer.norms[0](nodes[i] + torch.cat(heads))
            first, prelu, second, _ = layer.feed_forward
            inner = first(t)
            inner = torch.where(inner > 0, inner, prelu.weight * inner)
            after.append(layer.norms[1](t + second(inner)))
        nodes = after
    return torch.stack(nodes)


@pytest.mark.parametrize(("full", "scale"), [(False, math.sqrt(4)), (True, math.sqrt(16))])
def test_batched_graph_attention_is_that_of_one_graph_at_a_time(full, scale):
    torch.manual_seed(0)
    encoder = GraphTransformer(sizes(full_scale=full)).double().eval()
    for layer in encoder.layers:
        torch.nn.init.normal_(layer.feed_forward[1].weight)
    real, relations = tables()
    mask, there = adjacency(real, relations), present(real, relations)
    nodes = torch.randn(*there.shape, 16, dtype=torch.float64)
    found = encoder(nodes, mask)
    for b, (count, some) in enumerate(GRAPHS):
        assert int(there[b].sum()) == 1 + count + 2 * len(some)
        expected = one_graph(encoder, list(nodes[b, there[b]]), count, some, scale)
        torch.testing.assert_close(found[b, there[b]], expected, rtol=0, atol=1e-10)


def read(encoder, words):
    """Where each direction ends, of words without padding."""
    states = encoder.embedding(words)
    for ahead, back in zip(encoder.forwards, encoder.backwards, strict=True):
        states = torch.cat([ahead(states)[0], back(states.flip(0))[0].flip(0)], -1)
    return torch.cat([states[-1, :8], states[0, 8:]])


def test_the_encoder_by_hand():
    """Entities from their words, relations and their inverses from their own vectors, an unknown one for both ways."""
    model = tiny(lstm_layers=2)
    titles, entities, relations, _ = inputs()
    memory = model.start(titles, entities, relations)
    for b, (count, some) in enumerate(GRAPHS):
        vectors = [read(model.entity_words, row[row != 0]) for row in entities[b, :count]]
        names = [name for _, name, _ in some]
        numbers = torch.tensor([2, *names, *(name if name == 1 else name + NAMED for name in names)])
        root, *others = model.relations(numbers)
        nodes = one_graph(model.encoder, [root, *vectors, *others], count, some, math.sqrt(4))
        torch.testing.assert_close(memory.root[b], nodes[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(memory.entities[b, :count], torch.stack(vectors), rtol=0, atol=1e-10)
        there = memory.graph[2][b, 0]
        values = model.decoder.graph_cross_attention.v_proj(nodes)
        torch.testing.assert_close(memory.graph[1][b].transpose(0, 1).flatten(1)[there], values, rtol=0, atol=1e-10)


def test_detached_keys_and_values_stop_gradients_to_other_nodes():
    real, relations = tables()
    for detached in (False, True):
        torch.manual_seed(0)
        encoder = GraphTransformer(sizes(detached=detached)).double()
        nodes = torch.randn(3, 14, 16, dtype=torch.float64, requires_grad=True)
        encoder(nodes, adjacency(real, relations))[0, 0].sum().backward()
        others = nodes.grad[0, 1:].abs().sum() + nodes.grad[1:].abs().sum()
        assert (others == 0) == detached
        assert all(layer.attention.k_proj.weight.grad.abs().sum() > 0 for layer in encoder.layers)


def test_dropout_is_for_training_alone():
    model = tiny(dropout=0.5)
    given = inputs()
    torch.testing.assert_close(model(*given), model(*given), rtol=0, atol=0)
    model.train()
    assert not torch.equal(model(*given), model(*given))


# the distribution, and padding


@pytest.mark.parametrize("titles", [True, False])
def test_words_and_copies_share_one_probability(titles):
    logs = tiny(titles=titles)(*inputs())
    assert logs.shape == (3, 6, 12 + 5)
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(3, 6, dtype=torch.float64))
    for b, (count, _) in enumerate(GRAPHS):  # nothing that is not there is copied, all else can be
        assert bool((logs[b, :, 12 + count :] == -math.inf).all()) and bool(logs[b, :, : 12 + count].isfinite().all())


def test_the_mixture_by_hand():
    model = tiny()
    titles, entities, relations, before = inputs()
    logs = model(titles, entities, relations, before)
    memory = model.start(titles, entities, relations)
    state = model.decoder.step(model.decoder.embedding(before[:, :1]), model.begin(memory), memory)
    o = torch.cat([state.hidden, state.context], -1)[2, 0]
    s = torch.sigmoid(model.decoder.switch(o))
    words = s * torch.softmax(model.decoder.words(o), 0)
    copies = (1 - s) * torch.softmax(memory.entities[2, :4] @ model.decoder.copies(o), 0)
    torch.testing.assert_close(logs[2, 0, :16].exp(), torch.cat([words, copies]))


@pytest.mark.parametrize("titles", [True, False])
def test_padding_changes_nothing(titles):
    model = tiny(titles=titles)
    close, wide = model(*inputs(entities=4, relations=3)), model(*inputs(GRAPHS, 7, 9, 6, 8))
    torch.testing.assert_close(close, wide[..., : 12 + 4], rtol=0, atol=1e-10)
    given = inputs()
    for b in range(3):  # nor does company
        alone = model(*(x[b : b + 1] for x in given))
        torch.testing.assert_close(alone[0], model(*given)[b], rtol=0, atol=1e-10)


def test_gradients_are_finite_beside_padding():
    model = tiny().train()
    logs = model(*inputs())
    (logs[..., :12].sum() + logs[..., 12:].exp().square().sum()).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_word_by_word_is_the_same():
    model = tiny()
    titles, entities, relations, before = inputs()
    memory = model.start(titles, entities, relations)
    state, found = model.begin(memory), []
    for word in before.split(1, 1):
        logs, state = model.step(word, state, memory)
        found.append(logs)
    torch.testing.assert_close(torch.cat(found, 1), model(titles, entities, relations, before), rtol=0, atol=1e-12)


# search

ENDS = Ends(2, 3)
TYPES = torch.tensor([[4, 5, 4, 5, 0], [6, 0, 0, 0, 0], [5, 4, 6, 4, 0]])


def score(model, given, types, tokens, words):
    """Log-probability of a text with its end, by the whole forward pass."""
    titles, entities, relations = (x[None] for x in given)
    told = [types[token - words] if token >= words else token for token in tokens]
    logs = model(titles, entities, relations, torch.tensor([[2, *told]]))[0]
    return sum(float(logs[i, token].detach()) for i, token in enumerate([*tokens, 3]))


def decided(seed, words=12):
    """A model whose choices depend on what was chosen before: large weights, and ends that are not too soon."""
    torch.manual_seed(seed)
    model = tiny(words=words)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "decoder" in name or "entity_words" in name:
                weight.copy_(torch.randn_like(weight))
        model.decoder.words.weight.mul_(0.4)
        model.decoder.copies.weight.mul_(0.2)
        model.decoder.words.bias[3] = 2.0
    return model


@pytest.mark.parametrize("alpha", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_wide_beam_finds_what_trying_everything_finds(seed, alpha):
    model = decided(seed, words=7)
    given = [x % 7 if i == 0 else x for i, x in enumerate(inputs()[:3])]
    found = write(model, *given, TYPES, ENDS, beam=300, alpha=alpha, longest=4, forbidden=[1, 4])
    for b, (count, _) in enumerate(GRAPHS):
        allowed = [5, 6, *range(7, 7 + count)]
        texts = [text for size in range(4) for text in itertools.product(allowed, repeat=size)]
        scores = {
            text: score(model, [x[b] for x in given], TYPES[b], text, 7) / (len(text) + 1) ** alpha for text in texts
        }
        best = max(scores, key=scores.get)
        assert found[b].tokens == best and found[b].score == pytest.approx(scores[best])


@pytest.mark.parametrize("beam", [1, 3])
def test_search_is_the_same_in_company(beam):
    lengths = []
    for seed in range(8):
        model, given = decided(seed), inputs()[:3]
        together = write(model, *given, TYPES, ENDS, beam=beam, longest=12)
        for b in range(3):
            (alone,) = write(model, *(x[b : b + 1] for x in given), TYPES[b : b + 1], ENDS, beam=beam, longest=12)
            assert alone.tokens == together[b].tokens and alone.score == pytest.approx(together[b].score)
            assert len(alone.tokens) < 12 and all(token < 12 + GRAPHS[b][0] for token in alone.tokens)
            expected = score(model, [x[b] for x in given], TYPES[b], alone.tokens, 12)
            assert alone.log_probability == pytest.approx(expected)
        lengths.append([len(each.tokens) for each in together])
    assert len({length for each in lengths for length in each}) > 3  # ends come sooner and later
    assert any(len(set(each)) > 1 for each in lengths)  # within a batch too


# heads


def test_heads_are_found_and_proved():
    model = tiny()
    groups = find_heads(model)
    places = {(group.where, group.layer, group.part) for group in groups if group.where == "encoder"}
    assert places == {("encoder", layer, part) for layer in range(3) for part in "qkv"}
    assert sum(group.where == "cross" for group in groups) == 6 and len(groups) == 15
    assert {report.status for report in verify_heads(model, inputs())} == {"verified"}
    wrong = [group for group in find_heads(model, layout="strided") if group.where == "encoder"]
    with pytest.raises(HeadLayoutError):
        verify_heads(model, inputs(), wrong)


def test_weights_are_those_of_the_groups():
    model = tiny()
    _, weights = model(*inputs(), weights=True)
    groups = [group for group in find_heads(model) if group.where == "encoder"]
    for group in groups:
        torch.testing.assert_close(weights[group.layer, "qkv".index(group.part)], group.read(), rtol=0, atol=0)


def test_a_head_that_is_taken_away_is_gone():
    """Heads leave side by side: without one, the result is that of a model whose values of that head are zero."""
    model, given = tiny(), inputs()
    layers = find_attention_layers(model)
    assert [layer.num_heads for layer in layers] == [4] * 5 and layers[1].name == "encoder.layers.1.attention"

    def without(_layer, heads):  # [B, N, M, d]
        return heads * torch.tensor([1, 1, 0, 1]).view(4, 1)

    with replaced_head_outputs(layers[1:2], without):
        found = model(*given)
    with torch.no_grad():
        model.encoder.layers[1].attention.v_proj.weight[8:12] = 0
    torch.testing.assert_close(found, model(*given), rtol=0, atol=1e-12)


# mistakes


def test_mistakes():
    with pytest.raises(ValueError, match="width=16 does not divide into heads=3"):
        sizes(heads=3)
    with pytest.raises(ValueError, match="width=15 must be even"):
        GraphWriterConfig(5, 5, 5, sizes(width=15, heads=3))
    with pytest.raises(ValueError, match="relations=4 must be 3 marks and pairs"):
        GraphWriterConfig(5, 5, 4)
    with pytest.raises(ValueError, match="expected titles, got None"):
        tiny()(None, *inputs()[1:])
    with pytest.raises(ValueError, match="beam=0"):
        write(tiny(), *inputs()[:3], TYPES, ENDS, beam=0)
