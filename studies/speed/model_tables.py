"""Write the table of `studies.speed.models` from its JSON files.

    python -m studies.speed.model_tables --out results/bench

Reads OUT/models-*.json and, for a second table, OUT/again-*.json; writes OUT/models.md.
"""

from __future__ import annotations

import argparse
import json
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
    "host, µs",
    "device, µs",
    "larger part",
    "bound",
)
INTRODUCTION = """# What a rule costs in a training step of transformers models

`python -m studies.speed.models --device cuda` measures each model with `repulsive bench --model NAME`, eager or with
`--compile`: fused AdamW, bf16 autocast, random weights. All rules train the same model in turns; "plain again" compares
plain turns with plain turns, so its ratio differs from 1 by noise alone.

Times of whole steps are noisy here, because other programs use the same host. Times inside the hooks of `repel` are
precise: *host* and *device* are those of an average step of 10,000. If the host is the bottleneck of a model, the
host's time is the cost of the rule, and otherwise the device's time is. *Larger part* is the larger of the two, over
the plain step; *bound* is their sum over the plain step, which is the most that a rule can cost.

Rows `spos-paper` have noise in the gradient, `spos` after the step of the optimizer, the default. ViT-B/16 was timed
before launches for twelve heads were tuned, and before the host's part of the noise after the step was reduced.

In compiled models the hooks of `logits` do not include the sampling of tokens, which is part of the graph. When the
models of the first table were timed, every step called the operators that sample, also after the end of the rule, where
they do nothing; this made whole steps of models that wait for the host up to 11 % longer.
"""
AGAIN = """## Measured again

Since then a model is compiled twice, and steps that do not sample run a graph without operators. The launches of paper
are those of the first table, tuned, also for ViT-B/16. `--seconds 9 --rules sphere paper logits`. On BERT-base plain
turns differ from plain turns by 7 %, so its whole steps say little.
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


def rows_of(facts: Mapping[str, Any]) -> list[list[str]]:
    """Format the rows of one model."""
    settings, results = facts["settings"], facts["results"]
    kind = ", compiled" if settings["compiled"] else ", eager"
    plain = results[PLAIN]["seconds"]
    rows = []
    for name, row in results.items():
        if name == PLAIN:
            continue
        whole = f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
        cells = ["", "", "", ""]
        parts = parts_of(row)
        if parts is not None:
            larger, total = 1 + max(parts) / plain, 1 + sum(parts) / plain
            cells = [*(f"{1e6 * part:.0f}" for part in parts), f"{larger:.4f}", f"{total:.4f}"]
        rows.append([settings["model"] + kind, f"{1e3 * plain:.1f}", name, whole, *cells])
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
    first, again = _table(folder, "models-*.json"), _table(folder, "again-*.json")
    more = f"An average step is that of a training of {TRAINING:,} steps, in which 200 measure."
    out = folder / "models.md"
    out.write_text(f"{INTRODUCTION}\n{more}\n\n{first}\n" + (f"\n{AGAIN}\n{again}\n" if again else ""))
    return out


def _table(folder: Path, pattern: str) -> str:
    """Format the table of some files and their origins; empty without files."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob(pattern))}
    rows = [row for facts in files.values() for row in rows_of(facts)]
    origins = "\n".join(describe(facts, path) for path, facts in files.items())
    return f"{format_table(HEAD, rows)}\n\n{origins}" if files else ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder of the JSON files")
    print(write_table(parser.parse_args(words).out))


if __name__ == "__main__":
    main()
