"""A GPT in one file, in the style of nanoGPT, with repulsion added in one line.

    python examples/nanogpt.py

The model learns sums such as "27+58=85" character by character. Its attention class is our own: one projection `c_attn`
for q, k and v of all heads. `repel` does not know the class, so it gets example inputs and proves by autograd which
rows belong to which head. The script trains once plainly and once with repulsion, and prints for each the loss, the
share of correct answers, and the mean cosine between heads before and after.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from repulsive import SVGD, find_heads, repel

CHARACTERS = "0123456789+=\n"
LENGTH, WIDTH, HEADS, LAYERS, BATCH = 10, 64, 4, 2, 64


class Attention(nn.Module):
    """Causal self-attention; q, k and v of all heads are one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.n_head, d // self.n_head).transpose(1, 2) for part in self.c_attn(x).split(d, dim=2)
        )  # [B, M, T, d]
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before and a residual connection around."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and logits [B, T, C] of the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def sums(count: int, generator: torch.Generator) -> Tensor:
    """Lines such as "27+58=85" as ids [N, LENGTH]; the answer is written from its last digit on, which is easier."""
    pairs = torch.randint(10, 100, (count, 2), generator=generator).tolist()
    lines = [f"{a}+{b}={str(a + b)[::-1]}".ljust(LENGTH, "\n") for a, b in pairs]
    return torch.tensor([[CHARACTERS.index(c) for c in line] for line in lines])


def mean_cosine(model: nn.Module, ids: Tensor) -> float:
    """Mean cosine between two different heads, over all groups."""
    values = []
    for group in find_heads(model, ids):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def train(repulsive: bool, steps: int) -> str:
    """Train a model and describe it."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    example = sums(2, data)[:, :-1]
    if repulsive:
        # Three times the default ratio of 0.01: heads then spread within the few steps of an example.
        repel(model, optimizer, SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0), example_inputs=example)
    before = mean_cosine(model, example)
    for _ in range(steps):
        ids = sums(BATCH, data)
        logits = model(ids[:, :-1])[:, 5:]  # the two numbers before "=" are random: predict what follows
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    test = sums(1000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        correct = (model(test[:, :-1])[:, 5:].argmax(-1) == test[:, 6:]).all(1).float().mean()
    heads = f"mean cosine between heads {before:+.3f} -> {mean_cosine(model, example):+.3f}"
    return f"loss {loss.item():.3f}  correct {correct:.3f}  {heads}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    for name in ("plain", "repulsive"):
        print(f"{name:10} {train(name == 'repulsive', steps)}", flush=True)


if __name__ == "__main__":
    main()
