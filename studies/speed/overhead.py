"""Cost of repulsion on one device: step time with repulsion relative to step time without, in one process.

    python -m studies.speed.overhead --rounds 12 --out results/bench/overhead-cpu.json

The model is the paper's Transformer-small (6 + 6 layers, width 512, feed-forward 1024, 4 heads) with a shared
vocabulary of 10,000. Every round times one step of each variant on the same model, optimizer and batch, in random
order. A variant's ratio is 1 + d / p: d is the median over rounds of its time minus that of the plain step of the same
round, p the median time of a plain step. Its interval is a bootstrap. `repulsive bench` measures more.
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
    parser.add_argument("--tokens", type=int, default=2048, help="target tokens per step")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each variant")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    options = Options(
        arguments.device, (arguments.tokens,), ("MA", "first layer", "all layers"), rounds=arguments.rounds
    )
    table = measure_steps(Workload(options), arguments.tokens, options.variants, progress=lambda line: None)
    print(f"{'variant':14}{'seconds':>9}{'ratio':>8}  95 % interval")
    for name, row in table.items():
        print(f"{name:14}{row['seconds']:9.3f}{row['ratio']:8.4f}  {row['low']:.4f} - {row['high']:.4f}")
    if arguments.out:
        machine = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
        facts = {
            "command": f"python -m studies.speed.overhead --tokens {arguments.tokens} --rounds {arguments.rounds} "
            f"--threads {arguments.threads} --device {arguments.device}",
            "machine": f"{machine}, {arguments.threads} threads",
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "variants": table,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
