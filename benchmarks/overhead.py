"""What repulsion costs: step time with over step time without, in one process, interleaved.

    python benchmarks/overhead.py --rounds 12 --out results/bench/overhead-cpu.json

The model is the paper's Transformer-small (6 + 6 layers, width 512, feed-forward 1024, 4 heads) with 10,000 shared
word vectors. Every round times one step of each variant on the same model, optimiser and batch, in random order; a
variant's ratio is the median over rounds of its time over the plain time of the same round, with a bootstrap interval.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from datetime import date
from pathlib import Path

import torch
from torch import nn

from repulsive import SVGD, repel

VOCABULARY = 10_000
VARIANTS = {"plain": None, "all layers": {"layers": "all"}, "first layer": {"layers": "first"}}


class TransformerSmall(nn.Module):
    """The paper's IWSLT14 model; positions are left out, they cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 512)
        self.transformer = nn.Transformer(512, 4, 6, 6, 1024, dropout=0.1, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        states = self.transformer(self.words(source), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        return states @ self.words.weight.T  # [B, T, words]


def step_time(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, variant: dict | None) -> float:
    """Seconds of forward, backward and step; attaching is not part of a step."""
    handle = None if variant is None else repel(model, optimizer, SVGD(), **variant, measure_every=50, verbose=False)
    if handle is not None:
        handle.steps = 1  # a step that is not measured, as 49 of 50 are
    synchronise = torch.cuda.synchronize if batch.is_cuda else lambda: None
    synchronise()
    start = time.perf_counter()
    logits = model(batch, batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    synchronise()
    seconds = time.perf_counter() - start
    if handle is not None:
        handle.remove()
    return seconds


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def measure(tokens: int, rounds: int, device: str, length: int = 32) -> dict[str, dict[str, float]]:
    """Median seconds and ratio of every variant."""
    torch.manual_seed(0)
    model = TransformerSmall().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch = torch.randint(VOCABULARY, (tokens // length, length + 1), device=device)
    order, source = list(VARIANTS), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for round_number in range(rounds + 2):
        source.shuffle(order)
        for name in order:
            taken = step_time(model, optimizer, batch, VARIANTS[name])
            if round_number >= 2:  # the first rounds allocate and warm up
                seconds[name].append(taken)
    table = {}
    for name, times in seconds.items():
        ratios = [mine / plain for mine, plain in zip(times, seconds["plain"], strict=True)]
        low, high = interval(ratios)
        table[name] = {"seconds": statistics.median(times), "ratio": statistics.median(ratios), "low": low, "high": high}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = measure(options.tokens, options.rounds, options.device)
    print(f"{'variant':14}{'seconds':>9}{'ratio':>8}  95 % interval")
    for name, row in table.items():
        print(f"{name:14}{row['seconds']:9.3f}{row['ratio']:8.4f}  {row['low']:.4f} - {row['high']:.4f}")
    if options.out:
        machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
        facts = {
            "command": f"python benchmarks/overhead.py --tokens {options.tokens} --rounds {options.rounds} "
            f"--threads {options.threads} --device {options.device}",
            "machine": f"{machine}, {options.threads} threads",
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "tokens": options.tokens,
            "rounds": options.rounds,
            "variants": table,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
