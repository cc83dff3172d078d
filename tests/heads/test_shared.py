"""Shared key-value heads in classes that the table does not list; subclasses of listed classes; tied q and k."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from repulsive import find_heads, repel, verify_heads
from repulsive.errors import NoHeadsFound

X = torch.randn(2, 6, 64)


def _attended(q, k, v, heads, kv):
    b, t, _ = q.shape
    q, k, v = (x.view(b, t, count, -1).transpose(1, 2) for x, count in ((q, heads), (k, kv), (v, kv)))
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)


class OneKey(nn.Module):
    """All query heads share one key-value head, which only the shapes show."""

    def __init__(self):
        super().__init__()
        self.heads = 8
        self.to_q, self.to_kv = nn.Linear(64, 128, bias=False), nn.Linear(64, 32, bias=False)
        self.to_out = nn.Linear(128, 64)

    def forward(self, x):
        return self.to_out(_attended(self.to_q(x), *self.to_kv(x).chunk(2, -1), 8, 1))


class Packed(nn.Module):
    """One `qkv` weight with rows of 8 q heads, then 2 k heads, then 2 v heads."""

    def __init__(self, **declared):
        super().__init__()
        for name, value in declared.items():
            setattr(self, name, value)
        self.qkv, self.proj = nn.Linear(64, (8 + 2 * 2) * 8, bias=False), nn.Linear(64, 64)

    def forward(self, x):
        return self.proj(_attended(*self.qkv(x).split((64, 16, 16), -1), 8, 2))


@pytest.mark.parametrize(
    ("model", "kv"),
    [
        (OneKey(), 1),
        (Packed(num_heads=8, num_kv_heads=2), 2),
        (Packed(config=SimpleNamespace(n_head=8, n_query_groups=2), head_size=8), 2),
    ],
)
def test_shared_key_value_heads_are_found_without_an_example(model, kv):
    assert {g.part: g.num_heads for g in find_heads(model)} == {"q": 8, "k": kv, "v": kv}
    assert all(report.status == "verified" for report in verify_heads(model, X))


@pytest.mark.parametrize("declared", [{}, {"num_kv_heads": 4}])  # no number of kv heads, and a wrong one
def test_inconsistent_shapes_are_a_near_miss_and_an_example_resolves_them(declared):
    model = Packed(num_heads=8, **declared)
    with pytest.raises(NoHeadsFound, match="are there fewer key-value heads"):
        find_heads(model)
    assert {g.part: g.num_heads for g in find_heads(model, X)} == {"q": 8, "k": 2, "v": 2}


class Causal(nn.MultiheadAttention):
    """A subclass that changes nothing."""


def test_a_subclass_of_a_listed_class_is_listed():
    net = nn.ModuleList([nn.MultiheadAttention(16, 4), Causal(16, 4)])
    assert {g.layer for g in find_heads(net)} == {0, 1} and {g.family for g in find_heads(net)} == {"torch"}
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    layer.self_attn = Causal(16, 4, batch_first=True)
    assert len(repel(layer, torch.optim.SGD(layer.parameters(), lr=0.1), verbose=False).groups) == 3
    assert all(report.status == "verified" for report in verify_heads(layer, torch.randn(2, 5, 16)))


class Tied(nn.Module):
    """One weight makes both queries and keys."""

    def __init__(self, listed):
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.k_proj.weight = self.q_proj.weight
        if not listed:
            self.both, self.values = self.q_proj, self.v_proj
            del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x):
        both, values = (self.both, self.values) if hasattr(self, "both") else (self.q_proj, self.v_proj)
        return _attended(both(x), both(x), values(x), 4, 4)


@pytest.mark.parametrize("listed", [True, False])
def test_weights_that_queries_and_keys_share_are_one_group(listed):
    model = Tied(listed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert [g.num_heads for g in repel(model, optimizer, example_inputs=X, verbose=False).groups] == [4, 4]
