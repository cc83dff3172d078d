"""Effect of repulsion on a small Vision Transformer: scikit-learn's 1,797 images of handwritten digits.

    python -m studies.logits.images --seeds 10 --out results/logits/images.json
    python -m studies.logits.images --table results/logits/images.json

Needs scikit-learn. Every arm has three learning rates, chosen by the mean loss on a development set over three seeds
of its own; other seeds are then tested.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive import repel
from repulsive.metrics import student
from repulsive.safety.markdown import format_table

RATES = (1e-3, 2e-3, 4e-3)
TUNING_SEEDS = range(100, 103)
DECAY = 0.05
# Arm -> rule and weight decay.
ARMS: dict[str, tuple[str | None, float]] = {
    "plain": (None, DECAY),
    "decay x 10": (None, 10 * DECAY),
    "sphere": ("sphere", DECAY),
    "logits": ("logits", DECAY),
}
SIZES = (1000, 300)  # images for training and development; the other 497 are the test set
STEPS, BATCH = 600, 64

Images = tuple[Tensor, Tensor]


class DigitTransformer(nn.Module):
    """Vision Transformer for images of 8 x 8 pixels: 16 patches, 3 layers of 4 heads, width 64."""

    def __init__(self, width: int = 64, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions  # [B, 16, width]
        return self.head(self.encoder(tokens).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="tested seeds")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--table", type=Path, help="print the table of this JSON file, and train nothing")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    train, dev, test = load_digits()
    runs = []
    for arm in ARMS:
        losses = {rate: [run(arm, rate, s, train, dev)["loss"] for s in TUNING_SEEDS] for rate in RATES}
        best = min(RATES, key=lambda rate: statistics.fmean(losses[rate]))
        print(arm, {rate: round(statistics.fmean(values), 4) for rate, values in losses.items()}, flush=True)
        runs += [run(arm, best, seed, train, test) for seed in range(options.seeds)]
    if options.out:
        options.out.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


def load_digits() -> list[Images]:
    """The digits, with pixels from -1 to 1, as training, development and test set."""
    from sklearn import datasets

    digits = datasets.load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)[order, None]  # [N, 1, 8, 8]
    sizes = [*SIZES, len(order) - sum(SIZES)]
    return list(zip(images.split(sizes), torch.tensor(digits.target)[order].split(sizes), strict=True))


def run(arm: str, rate: float, seed: int, train: Images, held_out: Images) -> dict[str, Any]:
    """Train one model; return its loss, its accuracy and the mean cosine between logits of heads."""
    rule, decay = ARMS[arm]
    torch.manual_seed(seed)
    model = DigitTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=STEPS, pct_start=0.1)
    if rule is not None:
        repel(model, optimizer, rule, verbose=False)
    order = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        chosen = torch.randint(len(train[0]), (BATCH,), generator=order)
        loss = nn.functional.cross_entropy(model(train[0][chosen]), train[1][chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        scores = model(held_out[0])
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "loss": float(nn.functional.cross_entropy(scores, held_out[1])),
        "accuracy": float((scores.argmax(-1) == held_out[1]).float().mean()),
    }


def table(runs: Iterable[dict[str, Any]]) -> str:
    """Loss and accuracy of every arm, with the 95 % interval of the difference to plain training, seed by seed."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for one in runs:
        by_arm.setdefault(one["arm"], {})[one["seed"]] = one
    body = []
    for arm, seeds in by_arm.items():
        cells = [arm, f"{next(iter(seeds.values()))['rate']:g}", str(len(seeds))]
        for key, digits in (("loss", 4), ("accuracy", 4)):
            mean = statistics.fmean(one[key] for one in seeds.values())
            text = f"{mean:.{digits}f}"
            if arm != "plain":
                differences = [one[key] - by_arm["plain"][seed][key] for seed, one in seeds.items()]
                low, high = student.interval(differences) or (float("nan"), float("nan"))
                text += f", {statistics.fmean(differences):+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
            cells.append(text)
        body.append(cells)
    return format_table(["arm", "rate", "seeds", "test loss", "test accuracy"], body)


if __name__ == "__main__":
    main()
