"""PyTorch Geometric's attention in the place of our own: the same outputs, gradients, heads and checkpoints."""

import copy
import sys

import pytest
import torch

from repulsive.errors import ConfigError
from repulsive.heads import find_heads
from repulsive.lab.systems.graphs.attention import GraphSizes
from repulsive.lab.systems.graphs.encoder import GraphTransformer, adjacency
from repulsive.lab.systems.graphs.model import GraphWriter, GraphWriterConfig

NAMED = 3


def drawn(seed, graphs=6, entities=5, relations=7):
    """Random graphs with padding: which entities there are [B, E], and relations [B, R, 3]."""
    draw = torch.Generator().manual_seed(seed)
    real, rows = torch.zeros(graphs, entities, dtype=torch.bool), torch.zeros(graphs, relations, 3, dtype=torch.int64)
    for b in range(graphs):
        count = int(torch.randint(1, entities + 1, (), generator=draw))
        some = int(torch.randint(0, relations + 1, (), generator=draw))
        real[b, :count] = True
        rows[b, :some, ::2] = torch.randint(count, (some, 2), generator=draw)
        rows[b, :some, 1] = torch.randint(1, 3 + NAMED, (some,), generator=draw)
    return real, rows


def pair(**settings):
    """Two encoders of the same seed."""
    pytest.importorskip("torch_geometric")
    made = []
    for attention in ("own", "pyg"):
        torch.manual_seed(4)
        sizes = GraphSizes(width=24, heads=4, layers=3, dropout=0.0, attention=attention, **settings)
        made.append(GraphTransformer(sizes).double())
    return made


@pytest.mark.parametrize("settings", [{}, {"full_scale": True}, {"detached": True}])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_and_gradients_agree(seed, settings):
    own, other = pair(**settings)
    real, relations = drawn(seed)
    mask, found = adjacency(real, relations), []
    draw = torch.Generator().manual_seed(seed)
    nodes = torch.randn(*mask.shape[:2], 24, dtype=torch.float64, generator=draw)
    weights = torch.randn(nodes.shape, dtype=torch.float64, generator=draw)
    for encoder in (own, other):
        given = nodes.clone().requires_grad_()
        out = encoder(given, mask)
        (out * weights).sum().backward()
        found.append({"out": out, "nodes": given.grad, **{name: p.grad for name, p in encoder.named_parameters()}})
    assert found[0].keys() == found[1].keys() and "layers.2.attention.k_proj.weight" in found[0]
    for name, expected in found[0].items():
        assert expected.abs().max() > 1e-6, name
        torch.testing.assert_close(found[1][name], expected, rtol=0, atol=1e-10, msg=name)


def test_checkpoints_fit_both():
    own, other = pair()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter))
    other.load_state_dict(own.state_dict())
    real, relations = drawn(0)
    mask = adjacency(real, relations)
    nodes = torch.randn(*mask.shape[:2], 24, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(other)(nodes, mask), own(nodes, mask), rtol=0, atol=1e-10)


def test_dropout_is_on_in_training_alone():
    pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    sizes = GraphSizes(width=24, heads=4, layers=1, dropout=0.5, attention="pyg")
    attention = GraphTransformer(sizes).layers[0].attention
    nodes, mask = torch.randn(2, 6, 24), torch.ones(2, 6, 6, dtype=torch.bool)
    torch.manual_seed(1)
    found = [attention(nodes, nodes, mask) for _ in range(2)]
    assert not torch.equal(*found)
    attention.eval()
    found = [attention(nodes, nodes, mask) for _ in range(2)]
    assert torch.equal(*found)


def test_heads_of_a_whole_model_are_found():
    pytest.importorskip("torch_geometric")
    sizes = GraphSizes(width=24, heads=4, layers=2, dropout=0.0, attention="pyg")
    model = GraphWriter(GraphWriterConfig(12, 9, 3 + 2 * NAMED, sizes, titles=False)).double().eval()
    real, relations = drawn(1)
    entities = (torch.randint(1, 9, (*real.shape, 3)) * real.unsqueeze(2)).long()
    before = torch.randint(2, 12, (len(real), 4))
    groups = [group for group in find_heads(model) if group.where == "encoder"]
    assert [(group.layer, group.part) for group in groups] == [(layer, part) for layer in (0, 1) for part in "qkv"]
    _, weights = model(None, entities, relations, before, weights=True)
    assert torch.equal(weights[1, 2], groups[5].read())


def test_without_the_package_it_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_geometric.nn", None)
    with pytest.raises(ConfigError, match=r'model\.attention="pyg" needs torch-geometric: python -m pip install'):
        GraphTransformer(GraphSizes(width=24, heads=4, layers=1, attention="pyg"))
    with pytest.raises(ValueError, match="attention='dgl': choose own or pyg"):
        GraphSizes(attention="dgl")
