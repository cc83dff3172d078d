"""A small decoder, its batches, and its training with repulsion between logits."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from repulsive import SVGD, repel

RULE = SVGD(alpha=0.05, space="logits", tokens=64, every=2)


class Decoder(nn.Module):
    """A small decoder with two attention layers."""

    def __init__(self, width: int = 16, heads: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(Attention(width, heads) for _ in range(2))
        self.out = nn.Linear(width, 30)
        self.checkpointed = checkpointed

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return self.out(x)


class Attention(nn.Module):
    """Causal attention with separate q, k and v projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = [p(x).unflatten(-1, (self.num_heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (t.transpose(1, 2) for t in projected)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 30, (6, 10), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make(rule: SVGD | None = RULE, **settings):
    torch.manual_seed(0)
    model = Decoder(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    handle = repel(model, optimizer, rule, verbose=False, allow_unproved=True) if rule is not None else None
    return model, optimizer, handle


def train(model, optimizer, steps=range(6), run=None):
    for step in steps:
        loss_of(model if run is None else run, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
