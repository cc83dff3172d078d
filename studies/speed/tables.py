"""Tables of speed measurements: training of any task, and decoding of translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from repulsive.safety.markdown import format_table

TRAINING = ("tokens a side", "training", "target tokens/s", "ms a step", "TFLOP a step", "TFLOP/s", "of the bf16 limit")
COUNTED = "Operations exclude padding: 6 x the multiplications of a forward pass, see `operations`.  "
SYSTEMS = {"train": "repulsive", "marian": "transformers"}
SEARCHES = {"decode": "repulsive, `translate`", "generate": "transformers, `generate`"}


def as_markdown(facts: dict[str, Any]) -> str:
    """Format the measurements of translation so far."""
    lines = ["# Speed of translation", "", *training(facts, SYSTEMS, TRAINING, COUNTED), *_decoding(facts)]
    return "\n".join([*lines, *origin(facts, (*SYSTEMS, *SEARCHES), "studies/speed/translation.py")]) + "\n"


def origin(facts: dict[str, Any], names: Sequence[str], script: str) -> list[str]:
    """Notes of some parts, and their commands, machine and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines: list[str] = []
    commands: dict[str, list[str]] = {}
    for part in (name for name in names if name in facts):
        lines += [f"{part}: {line}.  " for line in facts[part].get("notes", [])]
        commands.setdefault(f"`{facts[part]['command']}`, {facts[part]['date']}", []).append(part)
    lines += [f"{', '.join(parts)}: {command}.  " for command, parts in commands.items()]
    machine = f"{facts['machine']}, {facts['threads']} threads; {versions}"
    return [*lines, "", f"{machine}. Method: {script}."]


def training(facts: dict[str, Any], systems: Mapping[str, str], titles: Sequence[str], counted: str) -> list[str]:
    """Format rates of training and the cost of repulsion.

    Args:
        facts: all measurements; keys of a part are "SIZE LABEL".
        systems: part -> the package that trains in it.
        titles: of the columns.
        counted: which operations are counted, as a sentence.
    """
    rows, ratios = [], []
    for part, system in systems.items():
        for name, row in facts.get(part, {}).items():
            tokens, _, label = name.partition(" ")
            if isinstance(row, dict) and "step_seconds" in row:
                rows.append((int(tokens), f"{system}, {label}", row))
            elif isinstance(row, dict) and "ratio" in row:
                interval = f"{row['low']:.4f} to {row['high']:.4f}, {row['rounds']} stretches of each"
                ratios.append(f"SVGD over MA, {int(tokens):,} {titles[0]}: {row['ratio']:.4f} ({interval}).  ")
    if not rows:
        return []
    cells = [
        [
            f"{tokens:,}",
            label,
            f"{row['tokens_per_second']:,.0f}",
            f"{1e3 * row['step_seconds']:.2f}",
            f"{row['step_operations'] / 1e12:.3g}",
            f"{row['operations_per_second'] / 1e12:.3g}",
            f"{100 * row['share_of_peak']:.1f} %" if "share_of_peak" in row else "",
        ]
        for tokens, label, row in sorted(rows, key=lambda entry: -entry[0])  # keeps the order of systems
    ]
    return [format_table(titles, cells), "", counted, *ratios, ""]


def _decoding(facts: dict[str, Any]) -> list[str]:
    rows = {system: facts[part]["all"] for part, system in SEARCHES.items() if "all" in facts.get(part, {})}
    if not rows:
        return []
    settings = facts["settings"]
    what = f"{settings['sentences']:,} sentences of {settings['length']} tokens, beam {settings['beam']}"
    head = (what, "sentences at a time", "seconds", "sentences/s", "words/s", "words a translation, end included")
    cells = []
    for system, row in rows.items():
        rates = (f"{row['seconds']:.2f}", f"{row['sentences_per_second']:,.0f}", f"{row['words_per_second']:,.0f}")
        cells.append([system, f"{row['batch']:,}", *rates, f"{row['words']:.1f}"])
    return [format_table(head, cells), ""]
