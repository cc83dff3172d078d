"""Heads of graph attention: captured outputs and weights, and ablation."""

import pytest
import torch

from repulsive.diagnostics.hooks import returned_weights
from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.importance import first_order_importance
from repulsive.diagnostics.inspection import inspect_heads
from repulsive.diagnostics.prune import prune
from repulsive.diagnostics.redundancy import ablate, head_ablation
from repulsive.errors import HeadLayoutError

geometric = pytest.importorskip("torch_geometric.nn")
NODES, EDGES = 6, 20
KINDS = {
    "GATConv": lambda: geometric.GATConv(10, 5, heads=3),
    "GATConv, heads averaged": lambda: geometric.GATConv(10, 5, heads=3, concat=False),
    "GATv2Conv": lambda: geometric.GATv2Conv(10, 5, heads=3),
    "TransformerConv": lambda: geometric.TransformerConv(10, 5, heads=3),
}


def graph():
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES, (2, EDGES), generator=generator).unique(dim=1)
    return torch.randn(NODES, 10, generator=generator), edges


def layer(name):
    torch.manual_seed(0)
    return KINDS[name]().eval()


@pytest.mark.parametrize("name", KINDS)
def test_weights_equal_those_the_layer_returns_for_each_edge(name):
    model, (x, edges) = layer(name), graph()
    with torch.no_grad():
        plain, (returned_edges, alpha) = model(x, edges, return_attention_weights=True)
    found = capture(model, (x, edges))
    assert torch.equal(found.result, plain)  # the caller gets the result it asked for
    (weights,) = found.layers[0].weights  # [1, M, N, N]
    for (source, target), each in zip(returned_edges.T.tolist(), alpha, strict=True):
        torch.testing.assert_close(weights[0, :, target, source], each)
    assert float(weights.sum()) == pytest.approx(float(alpha.sum()), rel=1e-5)
    requested = capture(model, {"x": x, "edge_index": edges, "return_attention_weights": True}).result
    torch.testing.assert_close(requested[1][1], alpha)


@pytest.mark.parametrize("name", KINDS)
def test_the_result_is_made_of_the_captured_head_outputs(name):
    model, inputs = layer(name), graph()
    found = capture(model, inputs)
    (left,) = found.layers[0].outputs  # [1, N, M, d]
    assert left.shape == (1, NODES, 3, 5)
    joined = left[0].flatten(1) if model.concat else left[0].mean(1)
    if name == "TransformerConv":
        joined = joined + model.lin_skip(inputs[0])
    else:
        joined = joined + model.bias
    torch.testing.assert_close(joined, found.result)
    with ablate(model, [(0, 1)]), torch.no_grad():
        without = model(*inputs)
    moved = (without - found.result).abs()
    if model.concat:
        assert float(moved[:, 5:10].max()) > 1e-3 and float(moved[:, :5].max()) == float(moved[:, 10:].max()) == 0
    else:
        torch.testing.assert_close(found.result - without, left[0, :, 1] / 3)


def test_redundancy_and_inspection_of_a_graph_network():
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = geometric.GATConv(10, 4, heads=3)
            self.second = geometric.TransformerConv(12, 5, heads=2, concat=False)

        def forward(self, x, edges):
            return self.second(self.first(x, edges).relu(), edges)

    torch.manual_seed(0)
    model = Network()
    found = head_ablation(model, lambda m: m(*graph()).square().mean(-1))
    assert found.change.shape == (2, 3) and found.change[1, 2].isnan() and found.items.shape == (2, 3, NODES)
    scores = first_order_importance(model, lambda m, batch: m(*batch).square().mean(), [graph()])
    assert (scores[0] > 0).all() and scores[1, 2].isnan()
    inspection = inspect_heads(model, [graph()], ablation=True)
    assert set(inspection.diversity) == {"weights", "attention", "outputs"}
    note, kinds = inspection.notes
    assert "kinds of heads are not labelled" in kinds
    assert "GATConv (gat) has no queries and keys" in note and "TransformerConv attends along the edges" in note
    with pytest.raises(HeadLayoutError, match="GATConv cannot be pruned"):
        prune(model, [(0, 0)])


def test_two_kinds_of_nodes_and_the_other_direction():
    torch.manual_seed(0)
    model = geometric.GATConv((10, 8), 5, heads=3, add_self_loops=False).eval()
    x = torch.randn(4, 10), torch.randn(6, 8)
    edges = torch.tensor([[0, 1, 3, 3], [5, 5, 0, 2]])
    (weights,) = capture(model, (x, edges)).layers[0].weights
    assert weights.shape == (1, 3, 6, 4)
    torch.testing.assert_close(weights.sum(-1)[0, :, [0, 2, 5]], torch.ones(3, 3))
    assert float(weights[0, :, [1, 3, 4]].abs().max()) == 0
    turned = geometric.GATConv(10, 5, heads=3, add_self_loops=False, flow="target_to_source").eval()
    (weights,) = capture(turned, (x[0], torch.tensor([[0, 1], [2, 2]]))).layers[0].weights
    assert (weights[0, :, 0, 2] == 1).all() and (weights[0, :, 1, 2] == 1).all()


def test_a_graph_too_large_for_attention_maps_has_all_other_measurements(monkeypatch):
    monkeypatch.setattr(returned_weights, "MAX_GRAPH_WEIGHTS", 10)
    model, inputs = layer("GATConv"), graph()
    with pytest.raises(HeadLayoutError, match=r"use a graph with edges .*, or use capture\(\.\.\., weights=False\)"):
        capture(model, inputs)
    found = inspect_heads(model, [inputs])
    assert set(found.diversity) == {"weights", "outputs"} and "attention is not measured" in found.notes[0]


def test_existing_hooks_get_the_same_arguments_and_results():
    model, inputs, calls = layer("GATConv"), graph(), []
    model.register_forward_hook(lambda _module, args, result: calls.append((args[0], result)))
    model(*inputs)
    capture(model, inputs)
    assert torch.equal(calls[0][0], calls[1][0])
    torch.testing.assert_close(calls[0][1], calls[1][1])
