"""Graph attention is found by the table and proved at the output of message passing."""

from __future__ import annotations

import pytest
import torch

from repulsive.errors import HeadLayoutError
from repulsive.heads import find_heads, verify_heads

geometric = pytest.importorskip("torch_geometric.nn")
BUILDERS = {
    "GATConv": lambda: geometric.GATConv(10, 5, heads=3),
    "GATConv, heads averaged": lambda: geometric.GATConv(10, 5, heads=3, concat=False),
    "GATv2Conv": lambda: geometric.GATv2Conv(10, 5, heads=3),
    "TransformerConv": lambda: geometric.TransformerConv(10, 5, heads=3),
}


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 10, generator=generator), torch.randint(0, 6, (2, 20), generator=generator)


@pytest.mark.parametrize("name", BUILDERS)
def test_graph_attention_is_found_proved_and_strided_caught(name: str) -> None:
    torch.manual_seed(0)
    model = BUILDERS[name]()
    groups = find_heads(model)
    assert "".join(g.part for g in groups) == ("qkv" if name == "TransformerConv" else "v")
    assert {r.status for r in verify_heads(model, _example())} == {"verified"}
    for group in find_heads(model, layout="strided"):
        with pytest.raises(HeadLayoutError):
            verify_heads(model, _example(), [group])


def test_heads_are_rows_of_the_projection() -> None:
    model = geometric.GATConv((10, 8), 5, heads=3)
    (group,) = find_heads(model)
    torch.testing.assert_close(group.read(), model.lin_src.weight.detach().view(3, 5 * 10), rtol=0, atol=0)
    model = geometric.GATv2Conv(10, 5, heads=3)
    torch.testing.assert_close(find_heads(model)[0].read(), model.lin_l.weight.detach().view(3, 50), rtol=0, atol=0)
