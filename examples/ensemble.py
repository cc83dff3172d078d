"""Train ensembles of four networks with and without repulsion, and compare their uncertainty. Minutes on a CPU.

    python examples/ensemble.py --seeds 10

The task: ten classes of small random pictures, shifted and noisy. Pictures of ten other classes, never trained on, are
"out of distribution": a good ensemble is less certain there. Members repel each other in the space of their weights
(`group_modules` and `repel`) or in the space of their outputs (`function_repulsion`; D'Angelo and Fortuin, 2021).
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from torch import Tensor, nn

from repulsive import SVGD, group_modules, repel
from repulsive.metrics.auc import auc
from repulsive.metrics.student import interval
from repulsive.particles import function_repulsion

MEMBERS, CLASSES, SIDE, NOISE, TRAIN, TEST, WIDTH = 4, 10, 8, 1.0, 300, 2000, 64
SCORES = ("accuracy", "NLL", "AUROC", "disagreement")
# name: (rule between weights or None, weight of the repulsion between outputs, in units of 1 / TRAIN)
METHODS: dict[str, tuple[SVGD | None, float]] = {
    "plain": (None, 0.0),
    "weights, ratio 0.03": (SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0), 0.0),
    "weights, ratio 0.3": (SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0.0), 0.0),
    "outputs, weight 1/N": (None, 1.0),
    "outputs, weight 10/N": (None, 10.0),
}


def prototypes(generator: torch.Generator) -> Tensor:
    """Smooth random pictures, [2 * CLASSES, SIDE, SIDE]: one per class, and as many that are never trained on."""
    rough = torch.randn(2 * CLASSES, 1, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(rough, (SIDE, SIDE), mode="bicubic", align_corners=False).squeeze(1)
    return smooth / smooth.std((1, 2), keepdim=True)


def sample(pictures: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Shifted, noisy pictures [N, SIDE * SIDE], and their classes [N]."""
    labels = torch.randint(len(pictures), (count,), generator=generator)
    rows, columns = torch.randint(-1, 2, (2, count), generator=generator)
    grid = torch.arange(SIDE)
    rows, columns = ((shift[:, None] + grid) % SIDE for shift in (rows, columns))  # [N, SIDE]
    shifted = pictures[labels[:, None, None], rows[:, :, None], columns[:, None, :]]  # [N, SIDE, SIDE]
    return (shifted + NOISE * torch.randn(shifted.shape, generator=generator)).flatten(1), labels


def member() -> nn.Module:
    return nn.Sequential(nn.Linear(SIDE * SIDE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def train(rule: SVGD | None, weight: float, steps: int, seed: int) -> dict[str, float]:
    """Train one ensemble and score it."""
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    pictures = prototypes(data)
    x, y = sample(pictures[:CLASSES], TRAIN, data)
    ensemble = nn.ModuleList(member() for _ in range(MEMBERS))
    optimizer = torch.optim.Adam(ensemble.parameters(), lr=3e-3)
    if rule is not None:
        groups = group_modules(ensemble, part="member", parameters="*", particle="module")
        repel(ensemble, optimizer, rule, groups=groups, verbose=False)
    for _ in range(steps):
        some = torch.randint(TRAIN, (100,), generator=data)
        outputs = torch.stack([net(x[some]) for net in ensemble])  # [M, B, C]
        losses = [nn.functional.cross_entropy(logits, y[some]) for logits in outputs]
        optimizer.zero_grad()
        loss = torch.stack(losses).sum()
        if weight:
            torch.autograd.backward([loss, outputs], [None, weight / TRAIN * function_repulsion(outputs)])
        else:
            loss.backward()
        optimizer.step()
    return score(ensemble, pictures, torch.Generator().manual_seed(seed + 1000))


@torch.no_grad()
def score(ensemble: nn.ModuleList, pictures: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Accuracy and NLL on test pictures; AUROC of the entropy; share of pairs that disagree on unseen classes."""
    points, labels = sample(pictures[:CLASSES], TEST, generator)
    others, _ = sample(pictures[CLASSES:], TEST, generator)
    inside, beyond = (torch.stack([net(z) for net in ensemble]).softmax(-1) for z in (points, others))  # [M, N, C]
    mean = inside.mean(0)
    entropy = torch.cat([_entropy(mean), _entropy(beyond.mean(0))])
    is_outside = torch.arange(len(entropy)) >= len(mean)
    answers = beyond.argmax(-1)  # [M, N]
    pairs = [(answers[i] != answers[j]).float().mean() for i in range(MEMBERS) for j in range(i)]
    return {
        "accuracy": float((mean.argmax(-1) == labels).float().mean()),
        "NLL": float(nn.functional.nll_loss(mean.clamp(min=1e-12).log(), labels)),
        "AUROC": auc(entropy, is_outside),
        "disagreement": float(torch.stack(pairs).mean()),
    }


def _entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are slower on more
    print(f"{'method':22}" + "".join(f"{name:>30}" for name in SCORES))
    plain: dict[str, list[float]] = {}
    for name, (rule, weight) in METHODS.items():
        runs = [train(rule, weight, options.steps, seed) for seed in range(options.seeds)]
        columns = {key: [run[key] for run in runs] for key in SCORES}
        plain = plain or columns
        cells = [_cell(columns[key], plain[key], name == "plain") for key in SCORES]
        print(f"{name:22}" + "".join(f"{cell:>30}" for cell in cells), flush=True)
    print("Mean over seeds; in brackets the 95 % interval of the paired difference from plain (Student's t).")


def _cell(values: list[float], plain: list[float], is_plain: bool) -> str:
    text = f"{fmean(values):.3f}"
    bounds = interval([one - other for one, other in zip(values, plain, strict=True)])
    return text if is_plain or bounds is None else f"{text} [{bounds[0]:+.3f}, {bounds[1]:+.3f}]"


if __name__ == "__main__":
    main()
