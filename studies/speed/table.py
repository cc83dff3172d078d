"""What was measured of speed as tables: training of any task, and decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TRAINING = ("tokens a side", "training", "target tokens/s", "ms a step", "TFLOP a step", "TFLOP/s", "of the bf16 limit")
COUNTED = "Operations are those of real tokens: 6 x the multiplications of a forward pass, see `operations`.  "
SYSTEMS = {"train": "repulsive", "marian": "transformers"}
SEARCHES = {"decode": "repulsive, `translate`", "generate": "transformers, `generate`"}


def as_markdown(facts: dict[str, Any]) -> str:
    """What is known so far."""
    lines = ["# Speed of translation", "", *training(facts, SYSTEMS, TRAINING, COUNTED), *_decoding(facts)]
    return "\n".join([*lines, *origin(facts, (*SYSTEMS, *SEARCHES), "studies/speed/translation.py")]) + "\n"


def origin(facts: dict[str, Any], names: Sequence[str], script: str) -> list[str]:
    """What went wrong, and where the numbers of some parts are from."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines: list[str] = []
    commands: dict[str, list[str]] = {}
    for part in (name for name in names if name in facts):
        lines += [f"{part}: {line}.  " for line in facts[part].get("notes", [])]
        commands.setdefault(f"`{facts[part]['command']}`, {facts[part]['date']}", []).append(part)
    lines += [f"{', '.join(parts)}: {command}.  " for command, parts in commands.items()]
    machine = f"{facts['machine']}, {facts['threads']} threads; {versions}"
    return [*lines, "", f"{machine}. What is measured, and how: {script}."]


def training(facts: dict[str, Any], systems: Mapping[str, str], titles: Sequence[str], counted: str) -> list[str]:
    """Rates of training, and what repulsion takes.

    Args:
        facts: all that is known; rows of a part are called "SIZE LABEL".
        systems: part -> who trains there.
        titles: of the columns.
        counted: which operations are.
    """
    rows, ratios = [], []
    for part, system in systems.items():
        for name, row in facts.get(part, {}).items():
            tokens, _, label = name.partition(" ")
            if isinstance(row, dict) and "step_seconds" in row:
                rows.append((int(tokens), f"{system}, {label}", row))
            elif isinstance(row, dict) and "ratio" in row:
                told = f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f}, {row['rounds']} stretches of each)"
                ratios.append(f"SVGD over MA, {int(tokens):,} {titles[0]}: {told}.  ")
    if not rows:
        return []
    lines = [line(*titles), line(*["---"] * len(titles))]
    for tokens, label, row in sorted(rows, key=lambda entry: -entry[0]):  # the order of systems stays
        lines.append(
            line(
                f"{tokens:,}",
                label,
                f"{row['tokens_per_second']:,.0f}",
                f"{1e3 * row['step_seconds']:.2f}",
                f"{row['step_operations'] / 1e12:.3g}",
                f"{row['operations_per_second'] / 1e12:.3g}",
                f"{100 * row['share_of_peak']:.1f} %" if "share_of_peak" in row else "",
            )
        )
    return [*lines, "", counted, *ratios, ""]


def _decoding(facts: dict[str, Any]) -> list[str]:
    rows = {system: facts[part]["all"] for part, system in SEARCHES.items() if "all" in facts.get(part, {})}
    if not rows:
        return []
    settings = facts["settings"]
    what = f"{settings['sentences']:,} sentences of {settings['length']} tokens, beam {settings['beam']}"
    head = (what, "sentences at a time", "seconds", "sentences/s", "words/s", "words a translation, end included")
    lines = [line(*head), line(*["---"] * len(head))]
    for system, row in rows.items():
        rates = (f"{row['seconds']:.2f}", f"{row['sentences_per_second']:,.0f}", f"{row['words_per_second']:,.0f}")
        lines.append(line(system, f"{row['batch']:,}", *rates, f"{row['words']:.1f}"))
    return [*lines, ""]


def line(*cells: str) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
