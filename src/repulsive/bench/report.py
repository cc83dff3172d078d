"""Run the whole benchmark and write it down: JSON with every number, and the table people read."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from repulsive._version import __version__
from repulsive.bench.growth import draw_growth, measure_growth
from repulsive.bench.steps import Options, measure_steps, measure_update


def run(
    options: Options, *, growth: bool = True, out: Path | None = None, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """Everything measured, with what it was measured on; written to `out` after each part, so that none is lost."""
    facts: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "repulsive": __version__,
        "date": date.today().isoformat(),
        "options": asdict(options),
        "update": measure_update(options.device),
        "steps": {},
    }
    progress(f"update alone: {1e3 * facts['update']['update_seconds']:.4f} ms")
    if growth:
        facts["growth"] = measure_growth(options.device)
    for tokens in options.tokens:
        facts["steps"][str(tokens)] = measure_steps(options, tokens, progress)
        if out is not None:
            write(facts, out)
    return facts


def as_table(facts: dict[str, Any]) -> str:
    """The step-time ratios and the update, as Markdown."""
    sizes = list(facts["steps"])
    lines = ["| | " + " | ".join(f"{int(size):,} tokens a step" for size in sizes) + " |"]
    lines.append("| --- " * (len(sizes) + 1) + "|")
    for name in facts["steps"][sizes[0]]:
        cells = [_cell(name, facts["steps"][size].get(name)) for size in sizes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    update = facts["update"]
    ms = {name: f"{1e3 * value:.3f} ms" for name, value in update.items() if name.endswith("_seconds")}
    rate = f"{update['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    on_device = f", {ms['update_device_seconds']} on the device" if "update_device_seconds" in ms else ""
    lines += [
        "",
        f"Update alone ({update['groups']} projections, {update['numbers'] / 1e6:.1f}M numbers): "
        f"{ms['update_seconds']} a call{on_device}; floor {ms['floor_seconds']} (four passes at {rate}); "
        f"one projection at a time {ms['one_at_a_time_seconds']}.",
    ]
    if "extra_bytes" in update:
        share = update["extra_bytes"] / update["particle_bytes"]
        lines.append(f"Memory added by the update: {100 * share:.2f} % of the particles' bytes.")
    lines.append(
        f"Measured on {facts['machine']}, {facts['threads']} threads, torch {facts['torch']}, {facts['date']}"
        + (", compiled" if facts["options"]["compiled"] else "")
        + ". Ratios are medians over interleaved rounds, with 95 % bootstrap intervals."
    )
    return "\n".join(lines)


def write(facts: dict[str, Any], folder: Path) -> list[Path]:
    """`bench-DEVICE.json`, `.md` and, where matplotlib is there, the plot of growth."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench-{facts['options']['device']}"
    made = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    made[0].write_text(json.dumps(facts, indent=2) + "\n")
    made[1].write_text(as_table(facts) + "\n")
    if "growth" in facts:
        try:
            draw_growth(facts["growth"], str(stem.with_suffix(".svg")))
            made.append(stem.with_suffix(".svg"))
        except ImportError:
            pass  # the numbers are in the JSON; the plot can be drawn where matplotlib is
    return made


def _cell(name: str, row: dict[str, float] | None) -> str:
    if row is None:
        return ""
    if name == "MA":
        return f"1 ({1e3 * row['seconds']:.1f} ms)"
    return f"{row['ratio']:.4f} ({row['low']:.4f}-{row['high']:.4f})"


def _processor() -> str:
    return f"{platform.processor() or platform.machine()} CPU"
