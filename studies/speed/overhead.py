"""What repulsion costs: step time with over step time without, in one process, interleaved.

    python -m studies.speed.overhead --rounds 12 --out results/bench/overhead-cpu.json

The model is the paper's Transformer-small (6 + 6 layers, width 512, feed-forward 1024, 4 heads) with 10,000 shared word
vectors. Every round times one step of each variant on the same model, optimiser and batch, in random order; a variant's
ratio is 1 + the median over rounds of what it takes more than the plain step of the same round, over the median plain
step, with a bootstrap interval.
`repulsive bench` measures more.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path

import torch

from repulsive.lab.bench.steps import Options, Workload, measure_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    options = Options(given.device, (given.tokens,), ("MA", "first layer", "all layers"), rounds=given.rounds)
    table = measure_steps(Workload(options), given.tokens, options.variants, progress=lambda line: None)
    print(f"{'variant':14}{'seconds':>9}{'ratio':>8}  95 % interval")
    for name, row in table.items():
        print(f"{name:14}{row['seconds']:9.3f}{row['ratio']:8.4f}  {row['low']:.4f} - {row['high']:.4f}")
    if given.out:
        machine = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()} CPU"
        facts = {
            "command": f"python -m studies.speed.overhead --tokens {given.tokens} --rounds {given.rounds} "
            f"--threads {given.threads} --device {given.device}",
            "machine": f"{machine}, {given.threads} threads",
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "variants": table,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
