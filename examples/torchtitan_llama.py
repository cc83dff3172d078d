"""A Llama in the style of torchtitan: FSDP2, activation checkpointing and torch.compile, with repulsion.

    torchrun --nproc-per-node 2 examples/torchtitan_llama.py
    python examples/torchtitan_llama.py --compile aot_eager      # one process; "inductor" is the default of torch

The attention class is our own: `wq`, `wk`, `wv` and `wo`, rotary positions, two query heads for each key-value head.
As in torchtitan, each block is wrapped in this order: activation checkpointing, compilation, FSDP2. `repel` proves the
heads on the plain model, before it is wrapped, and attaches to the sharded one. The model learns to continue sequences
that repeat. Prints loss and mean cosine between heads at the start and at the end.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from repulsive import SVGD, find_heads, repel
from repulsive.repulsion import head_placement

TOKENS, PERIOD, LENGTH, WIDTH, HEADS, KV_HEADS, LAYERS, BATCH = 16, 5, 16, 32, 4, 2, 2, 32


def rotated(x: Tensor) -> Tensor:
    """Rotary positions: turn each pair of features of x [B, T, M, d] by an angle that grows with the position."""
    positions, half = torch.arange(x.shape[1]), x.shape[-1] // 2
    angles = positions[:, None] * 10_000 ** (-torch.arange(half) / half)  # [T, d/2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [T, 1, d/2]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3)


class Attention(nn.Module):
    """Causal attention with grouped key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV_HEADS, WIDTH // HEADS
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = rotated(self.wq(x).view(b, t, self.n_heads, self.head_dim))  # [B, T, M, d]
        k = rotated(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim))
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [B, M, T, d]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    """Attention and a gated MLP, each with an RMS norm before and a residual connection around."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = Attention(), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """Token embeddings, blocks, and logits [B * T, C] of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(TOKENS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x).flatten(0, 1))


def batch(step: int) -> Tensor:
    """Token ids [B, T + 1] of a step that repeat after PERIOD tokens: this rank's share of the global batch."""
    words = torch.randint(TOKENS, (BATCH, PERIOD), generator=torch.Generator().manual_seed(step))
    ids = words.repeat(1, -(-(LENGTH + 1) // PERIOD))[:, : LENGTH + 1]
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups. All ranks call it: it gathers sharded weights."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def parallelised(model: Llama, backend: str) -> nn.Module:
    """Wrap each block: activation checkpointing, compilation, FSDP2; then FSDP2 for what is left."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = head_placement(model, mesh=mesh)
    for name, block in model.layers.items():
        wrapped = checkpoint_wrapper(block)
        if backend != "none":
            wrapped.compile(backend=backend)
        fully_shard(wrapped, mesh=mesh, shard_placement_fn=placement)
        model.layers[name] = wrapped
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", default="aot_eager", help='backend of torch.compile; "none": do not compile')
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Llama()
    groups = find_heads(model, batch(0)[:2, :-1])
    model = parallelised(model, options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Three times the default ratio of 0.01: heads then spread within the few steps of an example.
    rule = SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0)
    handle = repel(model, optimizer, rule, groups=groups)
    before, first = mean_cosine(model), None
    for step in range(options.steps):
        ids = batch(step)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = first or loss.item()
    after = mean_cosine(model)
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()}, steps {handle.steps}, loss {first:.3f} -> {loss.item():.3f}")
        print(f"mean cosine between heads {before:+.3f} -> {after:+.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
