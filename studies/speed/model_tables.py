"""Write the table of `studies.speed.models` from its JSON files.

    python -m studies.speed.model_tables --out results/bench

Reads OUT/models-*.json, and writes OUT/models.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repulsive.lab.bench.turns import PLAIN, TRAINING, average, over_training
from repulsive.safety.markdown import format_table

HEAD = (
    "model",
    "plain step, ms",
    "rule",
    "whole step, ratio (95 % interval)",
    "by medians",
    "host, µs",
    "device, µs",
    "larger part",
    "bound",
)
INTRODUCTION = """# What a rule costs in a training step of transformers models

`python -m studies.speed.models --device cuda` measures each model with `repulsive bench --model NAME`: eager, with
`--compile`, or with `--compile --cuda-graphs`; fused AdamW, bf16 autocast, random weights. All rules train the same
model in turns; "plain again" compares plain turns with plain turns, so its ratio differs from 1 by noise alone.
`max-norm` clips, and is compared with plain turns that clip. The whole step is compared turn by turn. *By medians*
compares an average step of medians, one for each kind of step over all turns; it has no interval.

Models compiled to CUDA graphs are limited by the device, and their whole steps are precise. The host limits most of the
other models, and other programs use it, too: steps of BERT-base take 18 to 30 ms there instead of 12. For those the
times inside the hooks of `repel` say more. *Host* and *device* are those of an average step of 10,000. If the host is
the bottleneck of a model, the host's time is the cost of the rule, and otherwise the device's time is. *Larger part* is
the larger of the two, over the plain step; *bound* is their sum over the plain step, which is the most that a rule can
cost. In compiled models the hooks of `logits` do not include the sampling of tokens, which is part of the graph.

Rows `spos-paper` have noise in the gradient, `spos` and `sgld` after the step of the optimizer, the default. In the
files of 2026-11-18 noise after the step was launched with a quarter of the programs it should have with 12 heads. The
files of 2026-11-19 were measured after that was corrected: 0.23 ms of the device instead of 0.44 (BERT-base).

In the files since 2026-11-18 an untimed plain step begins each turn (`--steps 4`). The older ones begin turns with an
idle device, which makes first steps of a turn longer.
"""


def parts_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Compute the seconds of host and device inside the hooks of an average step; None without a rule."""
    hooks = row["hooks"]
    if hooks is None:
        return None

    def mean(seconds: Mapping[str, float]) -> float:
        periods = row["renewals"], row["act_every"], row["active"]
        active = average(seconds["measuring"], seconds["ordinary"], seconds.get("renewing"), *periods)
        return over_training(active, seconds.get("off"), row["active"])

    return mean(hooks["host"]), mean(hooks["device"] or dict.fromkeys(hooks["host"], 0.0))


def average_step(turns: Sequence[Mapping[str, Any]]) -> float:
    """Compute the seconds of an average step from the median of each kind of step over all turns."""

    def median(kind: str) -> float | None:
        seconds = [turn[kind] for turn in turns if turn[kind] is not None]
        return statistics.median(seconds) if seconds else None

    measuring, ordinary, first = median("measuring"), median("ordinary"), turns[0]
    assert measuring is not None and ordinary is not None
    periods = first["renewals"], first["act_every"], first["active"]
    active = average(measuring, ordinary, median("renewing"), *periods)
    return over_training(active, median("off"), first["active"])


def rows_of(facts: Mapping[str, Any]) -> list[list[str]]:
    """Format the rows of one model."""
    settings, results, turns = facts["settings"], facts["results"], facts["turns"]
    kind = ", compiled" if settings["compiled"] else ", eager"
    if settings.get("cuda_graphs"):
        kind += " to CUDA graphs"
    plain = results[PLAIN]["seconds"]
    rows = []
    for name, row in results.items():
        if row["baseline"] is None:
            continue
        whole = f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
        medians = average_step(turns[name]) / average_step(turns[row["baseline"]])
        cells = ["", "", "", ""]
        parts = parts_of(row) if row["baseline"] == PLAIN else None
        if parts is not None:
            larger, total = 1 + max(parts) / plain, 1 + sum(parts) / plain
            cells = [*(f"{1e6 * part:.0f}" for part in parts), f"{larger:.4f}", f"{total:.4f}"]
        rows.append([settings["model"] + kind, f"{1e3 * plain:.1f}", name, whole, f"{medians:.4f}", *cells])
    return rows


def describe(facts: Mapping[str, Any], path: Path) -> str:
    """Describe the origin of one file."""
    versions, rounds = facts["versions"], facts["rounds"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if name in versions)
    left_out = "".join(f"; {name} left out: {why}" for name, why in facts["left_out"].items())
    return (
        f"- [{path.name}]({path.name}): {facts['machine']}, {names}, {facts['date']}, {facts['parameters'] / 1e6:.0f}M "
        f"parameters, batch {facts['settings']['batch']} x {facts['settings']['length']}, {rounds} rounds{left_out}"
    )


def write_table(folder: Path) -> Path:
    """Write models.md from the JSON files of a folder."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob("models-*.json"))}
    rows = [row for facts in files.values() for row in rows_of(facts)]
    origins = "\n".join(describe(facts, path) for path, facts in files.items())
    more = f"An average step is that of a training of {TRAINING:,} steps, in which 200 measure."
    out = folder / "models.md"
    out.write_text(f"{INTRODUCTION}\n{more}\n\n{format_table(HEAD, rows)}\n\n{origins}\n")
    return out


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of the JSON files")
    print(write_table(parser.parse_args(words).out))


if __name__ == "__main__":
    main()
