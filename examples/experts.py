"""Train a small mixture of eight experts with and without repulsion between them. A minute on a CPU.

    python examples/experts.py --seeds 8

The task: eight clusters of points, each with a function of its own. A router sends every point to its two best experts.
Experts are separate modules (`group_modules`); one that gets no point in a batch has no gradient in that step.
"Copies" start from one expert plus a little noise, as when a dense model is turned into a mixture.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from torch import Tensor, nn

from repulsive import SVGD, Rule, group_modules, repel
from repulsive.metrics.student import interval

EXPERTS, CLUSTERS, INPUTS, HIDDEN, BATCH = 8, 8, 8, 16, 128
RULES: dict[str, Rule | None] = {
    "plain": None,
    "sphere, ratio 0.03": SVGD(alpha="auto", ratio=0.03, space="sphere", smoothing=0.0),
    "sphere, ratio 0.3": SVGD(alpha="auto", ratio=0.3, space="sphere", smoothing=0.0),
    "published": SVGD(stepsize=0.1, alpha=0.01),
}


class Mixture(nn.Module):
    """Top-2 mixture of experts; `copies` start from one expert plus noise."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.router = nn.Linear(INPUTS, EXPERTS)
        make = lambda: nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))  # noqa: E731
        self.experts = nn.ModuleList(make() for _ in range(EXPERTS))
        if copies:
            with torch.no_grad():
                for expert in self.experts[1:]:
                    for own, first in zip(expert.parameters(), self.experts[0].parameters(), strict=True):
                        own.copy_(first + 0.01 * torch.randn_like(first))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)  # [B, 2]
        weights = weights / weights.sum(-1, keepdim=True)
        out = x.new_zeros(len(x))
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, slot] * expert(x[rows]).squeeze(1))
        return out


class Clusters:
    """Clusters of points, and a random two-layer function for each."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.centres = 2 * torch.randn(CLUSTERS, INPUTS, generator=generator)
        self.first = torch.randn(CLUSTERS, INPUTS, 4, generator=generator) / INPUTS**0.5
        self.second = torch.randn(CLUSTERS, 4, generator=generator)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Points [B, INPUTS] and values [B]."""
        cluster = torch.randint(CLUSTERS, (count,), generator=generator)
        offset = torch.randn(count, INPUTS, generator=generator)
        hidden = torch.einsum("bi,bij->bj", 1.5 * offset, self.first[cluster]).sin()
        return self.centres[cluster] + offset, (hidden * self.second[cluster]).sum(1)


def train(rule: Rule | None, copies: bool, steps: int, seed: int) -> tuple[float, float, float]:
    """Loss on new points, mean cosine between two experts' weights, and the share of steps with an idle expert."""
    torch.manual_seed(seed)
    task, data = Clusters(seed), torch.Generator().manual_seed(seed)
    model = Mixture(copies)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    groups = group_modules(model.experts, part="expert")
    repel(model, optimizer, rule, groups=groups, verbose=False)
    idle = 0
    for _ in range(steps):
        x, y = task.sample(BATCH, data)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        idle += any(expert[0].weight.grad is None for expert in model.experts)
        optimizer.step()
    with torch.no_grad():
        x, y = task.sample(4096, torch.Generator().manual_seed(seed + 1000))
        loss = float(nn.functional.mse_loss(model(x), y))
    cosines = []
    for group in groups:
        unit = nn.functional.normalize(group.read(), dim=1)  # [M, D]
        cosines.append((unit @ unit.T)[~torch.eye(EXPERTS, dtype=torch.bool)].mean())
    return loss, float(torch.stack(cosines).mean()), idle / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are slower on more
    print(f"{'start':12} {'rule':20} {'loss':>26} {'cosine':>8} {'steps with an idle expert':>26}")
    for start in ("independent", "copies"):
        plain: list[float] = []
        for name, rule in RULES.items():
            runs = [train(rule, start == "copies", options.steps, seed) for seed in range(options.seeds)]
            losses, cosines, idle = ([run[i] for run in runs] for i in range(3))
            plain = plain or losses
            bounds = interval([one - other for one, other in zip(losses, plain, strict=True)])
            text = f"{fmean(losses):.4f}"
            text += "" if rule is None or bounds is None else f" [{bounds[0]:+.4f}, {bounds[1]:+.4f}]"
            print(f"{start:12} {name:20} {text:>26} {fmean(cosines):+8.3f} {fmean(idle):26.1%}", flush=True)
    print("Mean over seeds; in brackets the 95 % interval of the paired difference from plain (Student's t).")


if __name__ == "__main__":
    main()
