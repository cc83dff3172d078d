"""Cost of rules on a CPU: the time inside the hooks of `repel`, over a plain step of 2,048 tokens.

    python -m studies.speed.cpu_hooks --out results/bench

On a CPU the work of a hook delays the step by its whole time, and for most rules it does not depend on the number of
tokens. So plain steps are timed with all tokens, and hooks after steps with few of them, which takes minutes where
`repulsive bench --model bert-base --device cpu` takes an hour. `logits` samples tokens, so its hooks are timed in steps
with all tokens. Writes OUT/cpu-hooks.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.arguments import errors_in_one_line
from studies.output import save

from repulsive.lab.bench.clock import wall_time
from repulsive.lab.bench.hook_cost import measure_hooks
from repulsive.lab.bench.machine import describe
from repulsive.lab.bench.presets import PRESETS, find_preset
from repulsive.lab.bench.rules import build_cases
from repulsive.lab.bench.training_variants import SharedModel, TrainingVariant

RULES = ("sphere", "auto", "schedule", "paper", "sgld", "spos-paper", "spos", "logits")


def measure(model: str, rules: Sequence[str], layers: int | None, steps: int, turns: int) -> dict[str, Any]:
    """Measure plain steps, and the hooks of each rule.

    Args:
        model: name of the preset.
        rules: rules of `repulsive bench`.
        layers: number of layers; None for all.
        steps: plain steps after the first, of which the median counts.
        turns: turns in which hooks are timed.
    """
    preset = find_preset(model)
    batch, length = preset.size("cpu")
    cases = build_cases(rules)  # an unknown rule is an error before anything is measured
    network = preset.build("cpu", layers=layers, length=length)
    whole, few = (SharedModel(network, preset.inputs(network.config, rows, length, "cpu")) for rows in (batch, 1))
    plain = TrainingVariant(whole, steps=1)
    seconds = [wall_time(plain.step, whole.device) for _ in range(steps + 1)][1:]
    step = statistics.median(seconds)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        variant = TrainingVariant(whole if case.rule.reads_tokens else few, case, steps=1)
        with variant.attached():
            variant.take_period()
        cost = measure_hooks(variant, turns)
        results[name] = {"hooks": cost.host, "average": cost.average, "ratio": 1 + cost.average / step}
        print(f"{name:12} {1e3 * cost.average:8.1f} ms, {results[name]['ratio']:.4f}", flush=True)
    settings = {"model": model, "layers": layers, "batch": batch, "length": length}
    return describe("cpu") | {"settings": settings, "plain": seconds, "results": results}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(PRESETS), default="bert-base")
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--layers", type=int, help="number of layers, for a quick trial")
    parser.add_argument("--steps", type=int, default=3, help="plain steps")
    parser.add_argument("--turns", type=int, default=5, help="turns in which hooks are timed")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args(words)
    with errors_in_one_line(parser):
        facts = measure(options.model, options.rules, options.layers, options.steps, options.turns)
    save(options.out / "cpu-hooks.json", facts)
    print(json.dumps({"plain": facts["plain"]}))


if __name__ == "__main__":
    main()
