"""Groups called proved have the true rows and pairs, for random layouts and pairings."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive import find_heads, verify_heads

E = 7


class Random(nn.Module):
    """A weight called `qkv` with its rows, and its pairs of q and kv heads, in random order."""

    def __init__(self, seed: int, mode: str) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.mode, self.dim = mode, draw.choice([1, 2, 3])
        self.num_heads = draw.choice([2, 3, 4, 6])
        self.num_kv_heads = draw.choice([n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0])
        self.sizes = [n * self.dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        self.qkv = nn.Linear(E, sum(self.sizes))
        self.order = list(range(sum(self.sizes)))
        self.pairs = [head % self.num_kv_heads for head in range(self.num_heads)]
        draw.shuffle(self.pairs)
        if seed % 2:
            draw.shuffle(self.order)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.dim)).transpose(1, 2) for y in self.qkv(x)[..., self.order].split(self.sizes, -1)
        )
        k, v = k[:, self.pairs], v[:, self.pairs]
        if self.mode == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.mode == "merged":
            q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        return (q @ k.mT).softmax(-1) @ v

    def truth(self) -> list[list[list[int]]]:
        """Rows of each head of q, k and v."""
        parts = torch.tensor(self.order).split(self.sizes)
        return [part.view(-1, self.dim).sort(-1).values.tolist() for part in parts]


@pytest.mark.parametrize("mode", ["sdpa", "eager", "merged"])
@pytest.mark.parametrize("seed", range(16))
def test_proved_rows_and_pairs_are_true(seed: int, mode: str) -> None:
    torch.manual_seed(seed)
    model, x = Random(seed, mode), torch.randn(2, 5, E)
    truth = dict(zip("qkv", model.truth(), strict=True))
    groups = {g.part: g for g in find_heads(model, x)}
    rows = {part: g.slices[0].rows.sort(-1).values.tolist() for part, g in groups.items()}
    assert {g.proof for g in groups.values()} == {"proved"}
    assert rows["q"] == truth["q"]
    for part in "kv":
        assert sorted(rows[part]) == sorted(truth[part])
    if 1 < model.num_kv_heads < model.num_heads:
        assert groups["q"].serves is not None
        assert [rows["k"][n] for n in groups["q"].serves] == [truth["k"][n] for n in model.pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {r.status for r in verify_heads(model, x, find_heads(model, x, particle="head"))} == {"verified"}
