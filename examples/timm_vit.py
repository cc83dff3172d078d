"""A vision Transformer of timm learns the direction of stripes, with and without repulsion between its heads.

    python examples/timm_vit.py

timm's `Attention` is a known family, so `repel` needs nothing but model and optimizer. The pictures are generated:
stripes in one of eight directions under noise, 32 x 32 pixels. Prints for each training the loss, the accuracy, and the
mean cosine between heads before and after. Needs `pip install timm`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math

import timm
import torch
from torch import Tensor, nn

from repulsive import SVGD, find_heads, repel

CLASSES, SIDE, BATCH = 8, 32, 32


def stripes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy pictures [N, 3, SIDE, SIDE] of stripes, and their directions [N]."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles, phases = labels * math.pi / CLASSES, 2 * math.pi * torch.rand(count, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = angles.cos()[:, None, None] * columns + angles.sin()[:, None, None] * rows  # [N, SIDE, SIDE]
    waves = (0.8 * along + phases[:, None, None]).sin()
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return waves[:, None] + noise, labels


def mean_cosine(model: nn.Module) -> float:
    """Mean cosine between two different heads, over all groups."""
    values = []
    for group in find_heads(model):
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        values.append((unit @ unit.T)[~torch.eye(group.num_heads, dtype=torch.bool)].mean())
    return float(torch.stack(values).mean())


def train(repulsive: bool, steps: int) -> str:
    """Train a model and describe it."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=SIDE,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_heads=4,
        num_classes=CLASSES,
        pretrained=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if repulsive:
        # Three times the default ratio of 0.01: heads then spread within the few steps of an example.
        repel(model, optimizer, SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0))
    before = mean_cosine(model)
    for _ in range(steps):
        pictures, labels = stripes(BATCH, data)
        loss = nn.functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    pictures, labels = stripes(500, torch.Generator().manual_seed(2))
    with torch.no_grad():
        accuracy = (model(pictures).argmax(-1) == labels).float().mean()
    heads = f"mean cosine between heads {before:+.3f} -> {mean_cosine(model):+.3f}"
    return f"loss {loss.item():.3f}  accuracy {accuracy:.3f}  {heads}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    for name in ("plain", "repulsive"):
        print(f"{name:10} {train(name == 'repulsive', steps)}", flush=True)


if __name__ == "__main__":
    main()
