"""The numbers of translation_speed.py as tables."""

from __future__ import annotations

from typing import Any

TRAINING = ("tokens a side", "training", "target tokens/s", "ms a step", "TFLOP a step", "TFLOP/s", "of the bf16 limit")
SYSTEMS = {"train": "repulsive", "marian": "transformers"}
SEARCHES = {"decode": "repulsive, `translate`", "generate": "transformers, `generate`"}


def as_markdown(facts: dict[str, Any]) -> str:
    """What is known so far."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = ["# Speed of translation", "", *_training(facts), *_decoding(facts)]
    commands: dict[str, list[str]] = {}
    for part in (name for name in (*SYSTEMS, *SEARCHES) if name in facts):
        lines += [f"{part}: {line}.  " for line in facts[part].get("notes", [])]
        commands.setdefault(f"`{facts[part]['command']}`, {facts[part]['date']}", []).append(part)
    lines += [f"{', '.join(parts)}: {command}.  " for command, parts in commands.items()]
    machine = f"{facts['machine']}, {facts['threads']} threads; {versions}"
    return "\n".join([*lines, "", f"{machine}. What is measured, and how: benchmarks/translation_speed.py."]) + "\n"


def _training(facts: dict[str, Any]) -> list[str]:
    rows, ratios = [], []
    for part, system in SYSTEMS.items():
        for name, row in facts.get(part, {}).items():
            tokens, _, label = name.partition(" ")
            if isinstance(row, dict) and "step_seconds" in row:
                rows.append((int(tokens), f"{system}, {label}", row))
            elif isinstance(row, dict) and "ratio" in row:
                told = f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f}, {row['rounds']} epochs of each)"
                ratios.append(f"SVGD over MA, {int(tokens):,} tokens: {told}.  ")
    if not rows:
        return []
    lines = [_line(*TRAINING), _line(*["---"] * len(TRAINING))]
    for tokens, label, row in sorted(rows, key=lambda entry: -entry[0]):  # the order of systems stays
        lines.append(
            _line(
                f"{tokens:,}",
                label,
                f"{row['tokens_per_second']:,.0f}",
                f"{1e3 * row['step_seconds']:.2f}",
                f"{row['step_operations'] / 1e12:.3g}",
                f"{row['operations_per_second'] / 1e12:.3g}",
                f"{100 * row['share_of_peak']:.1f} %" if "share_of_peak" in row else "",
            )
        )
    counted = "Operations are those of real tokens: 6 x the multiplications of a forward pass, see `operations`.  "
    return [*lines, "", counted, *ratios, ""]


def _decoding(facts: dict[str, Any]) -> list[str]:
    rows = {system: facts[part]["all"] for part, system in SEARCHES.items() if "all" in facts.get(part, {})}
    if not rows:
        return []
    settings = facts["settings"]
    what = f"{settings['sentences']:,} sentences of {settings['length']} tokens, beam {settings['beam']}"
    head = (what, "sentences at a time", "seconds", "sentences/s", "words/s", "words a translation, end included")
    lines = [_line(*head), _line(*["---"] * len(head))]
    for system, row in rows.items():
        rates = (f"{row['seconds']:.2f}", f"{row['sentences_per_second']:,.0f}", f"{row['words_per_second']:,.0f}")
        lines.append(_line(system, f"{row['batch']:,}", *rates, f"{row['words']:.1f}"))
    return [*lines, ""]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
