"""Write the tables of pruned models' latency: results/pruning/latency.md.

    python -m studies.pruning.latency_tables FILE    # FILE: written by studies.pruning.latency

Intervals are those of the median at 95 % (order statistics, without assumptions about the distribution). Ratios are
taken within each round, against the whole model of the same shape and batch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from repulsive.safety.markdown import format_table

ROOT = Path(__file__).resolve().parents[2]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with the narrowest symmetric pair of order statistics that covers the true median with 95 %.

    The k-th smallest and k-th largest of n values cover it with probability 1 - 2 P(Binomial(n, 1/2) < k). With fewer
    than 6 values no pair reaches 95 %, and the smallest and largest are returned.
    """
    ordered, number, k = sorted(values), len(values), 1
    while 2 * (k + 1) <= number and _binomial_below(k + 1, number) <= 0.025:
        k += 1
    return statistics.median(ordered), ordered[k - 1], ordered[number - k]


def _binomial_below(k: int, n: int) -> float:
    """P(Binomial(n, 1/2) < k)."""
    return sum(math.comb(n, i) for i in range(k)) / 2**n


def block(result: dict[str, Any]) -> str:
    """Tables of sizes and times, with one line that says how they were measured."""
    rounds = ", ".join(f"{shape['rounds']} of {shape['name']}" for shape in result["shapes"])
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if name != "python")
    has_kernels = any(_times(variant, batch)["decode_kernel_ms"] is not None for _, variant, batch in _cases(result))
    sizes = [
        [
            shape["name"],
            f"{variant['keep']}%",
            f"{variant['heads']} of {shape['num_attention_heads']}",
            f"{variant['kv_heads']} of {shape['num_key_value_heads']}",
            f"{variant['parameters']:,}",
            f"{variant['cache_bytes']:,} B",
        ]
        for shape in result["shapes"]
        for variant in shape["variants"]
    ]
    times = []
    for shape, variant, batch in _cases(result):
        mine, whole = _times(variant, batch), _times(shape["variants"][0], batch)
        cells = [shape["name"], batch, f"{variant['keep']}%"]
        for key in ("prefill_ms", "decode_ms"):
            cells.append(_shown(median_interval(mine[key]), " ms"))
            ratios = [a / b for a, b in zip(mine[key], whole[key], strict=True)]
            cells.append("-" if variant is shape["variants"][0] else _shown(median_interval(ratios), ""))
        if has_kernels:
            cells += [
                "-" if mine[key] is None else f"{mine[key]:.2f} ms" for key in ("prefill_kernel_ms", "decode_kernel_ms")
            ]
        times.append(cells)
    head = ["model", "batch", "`--keep`", "prefill", "ratio", "decoded token", "ratio"]
    lines = [
        f"{result['device']}, {result['dtype']}, random weights, prompts of {result['prompt']} tokens, {versions}, "
        f"{result['date']}. Medians with 95 % intervals over rounds ({rounds}; with fewer than 6 rounds the interval "
        "is the whole range); ratios to the whole model are taken within a round.",
        "",
        format_table(["model", "`--keep`", "heads", "key-value heads", "parameters", "KV cache per token"], sizes),
        "",
        format_table([*head, *(["GPU busy, prefill", "GPU busy, token"] if has_kernels else [])], times),
    ]
    if has_kernels:
        lines += [
            "",
            "*GPU busy* is the sum of the times of its operations. The rest of the latency is waiting for Python to "
            "launch them, which pruning heads does not shorten.",
        ]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """The content of results/pruning/latency.md."""
    made = f"`{result['command']}` (python {result['versions']['python']}; {result['seconds']} s)"
    return "\n".join(["# Latency of pruned models", "", block(result), "", made, ""])


def _cases(result: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    return [
        (shape, variant, batch)
        for shape in result["shapes"]
        for batch in shape["variants"][0]["batches"]
        for variant in shape["variants"]
    ]


def _times(variant: dict[str, Any], batch: str) -> dict[str, Any]:
    times: dict[str, Any] = variant["batches"][batch]
    return times


def _shown(values: tuple[float, float, float], unit: str) -> str:
    middle, low, high = (f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in values)
    return f"{middle}{unit} ({low} to {high})"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file of studies.pruning.latency")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "pruning", help="folder of the results")
    arguments = parser.parse_args(words)
    result = json.loads(arguments.file.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "latency.json").write_text(json.dumps(result, indent=1) + "\n")
    (arguments.out / "latency.md").write_text(page(result))
    print(f"written: {arguments.out / 'latency.json'}, {arguments.out / 'latency.md'}")


if __name__ == "__main__":
    main()
