"""Run the whole benchmark, and write a table and JSON with all numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from repulsive._version import __version__
from repulsive.lab.bench.growth import draw_growth, measure_growth
from repulsive.lab.bench.machine import machine_name
from repulsive.lab.bench.steps import COLLECT, VARIANTS, Options, Workload, measure_steps
from repulsive.lab.bench.update import measure_update
from repulsive.safety.files import write_whole
from repulsive.safety.markdown import format_table


def run(
    options: Options, *, growth: bool = True, out: Path | None = None, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure everything; write to `out` after each part, so that an interrupted benchmark keeps its results.

    The most important parts come first: the update alone, steps with and without repulsion, growth, and last the
    regularizers, each of which is compiled separately.
    """
    facts: dict[str, Any] = {
        "machine": machine_name(options.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "repulsive": __version__,
        "date": date.today().isoformat(),
        "options": asdict(options),
    }

    def save(message: str = "") -> None:
        if message:
            progress(message)
        if out is not None:
            write(facts, out)

    facts["update"] = measure_update(options.device)
    save(f"update alone: {1e3 * facts['update']['update_seconds']:.4f} ms")
    work = Workload(options)
    facts["steps"] = {str(tokens): {} for tokens in options.tokens}
    chosen = [name for name in options.variants if name not in COLLECT]
    for tokens in options.tokens:
        facts["steps"][str(tokens)] |= measure_steps(work, tokens, chosen, progress)
        save()
    if growth:
        facts["growth"] = measure_growth(options.device)
        save("growth measured")
    for name in (name for name in options.variants if name in COLLECT):
        for tokens in options.tokens:
            facts["steps"][str(tokens)][name] = measure_steps(work, tokens, [name], progress)[name]
            save()
    return facts


def as_table(facts: dict[str, Any]) -> str:
    """Format step-time ratios and the update as Markdown."""
    sizes = {size: rows for size, rows in facts.get("steps", {}).items() if rows}
    lines = []
    if sizes:
        measured = [name for name in VARIANTS if any(name in rows for rows in sizes.values())]
        cells = [[name, *(_cell(name, rows.get(name)) for rows in sizes.values())] for name in measured]
        head = ["variant", *(f"{int(size):,} tokens a step" for size in sizes)]
        lines += [format_table(head, cells), "", *_inside(sizes)]
    lines += _alone(facts["update"])
    lines.append(
        f"Measured on {facts['machine']}, {facts['threads']} threads, torch {facts['torch']}, {facts['date']}"
        + (", compiled" if facts["options"]["compiled"] else "")
        + ". Ratios are 1 + median difference between steps of one round / median plain step, with 95 % bootstrap "
        "intervals, followed by the ratio of the fastest tenths."
    )
    return "\n".join(lines)


def _cell(name: str, row: dict[str, float] | None) -> str:
    if row is None:
        return ""
    if name == "MA":
        return f"1 ({1e3 * row['seconds']:.1f} ms)"
    quick = f"{row['quick']:.4f} ({row['quick_low']:.4f}-{row['quick_high']:.4f})"
    return f"{row['ratio']:.4f} ({row['low']:.4f}-{row['high']:.4f}); {quick}"


def _inside(sizes: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Write sentences about the time of repulsion inside measured steps."""
    lines = []
    for size, rows in sizes.items():
        for name, row in rows.items():
            if "host_seconds" in row:
                share = 100 * row["host_seconds"] / rows["MA"]["seconds"]
                device = f", {_ms(row['device_seconds'])} on the device" if "device_seconds" in row else ""
                lines.append(
                    f"Inside a step of {int(size):,} tokens, {name}: {_ms(row['host_seconds'])} of host time "
                    f"({share:.2f} % of a plain step){device}.  "
                )
    return lines


def _alone(update: dict[str, Any]) -> list[str]:
    device = f", {_ms(update['update_device_seconds'])} on the device" if "update_device_seconds" in update else ""
    lines = [
        f"Update alone ({update['groups']} projections, {update['numbers'] / 1e6:.1f}M numbers): "
        f"{_ms(update['update_seconds'])} a call{device}, {_ms(update['update_host_seconds'])} of host time; "
        f"floor {_ms(update['floor_seconds'])} (four passes at {update['copy_bytes_per_second'] / 1e12:.2f} TB/s). "
        f"First layer {_ms(update['first_layer_seconds'])}; with measuring {_ms(update['measured_seconds'])}; "
        f"one projection at a time {_ms(update['one_at_a_time_seconds'])}."
    ]
    if "extra_bytes" in update:
        share = update["extra_bytes"] / update["particle_bytes"]
        lines.append(f"Memory added by the update: {100 * share:.2f} % of the particles' bytes.")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def write_json(path: Path, facts: dict[str, Any]) -> None:
    """Replace a file by all numbers; an interrupted benchmark leaves the file as it was."""
    write_whole(path, f"{json.dumps(facts, indent=2)}\n".encode())


def write(facts: dict[str, Any], folder: Path) -> list[Path]:
    """Write `bench-DEVICE.json`, `.md` and, if matplotlib is installed, the plot of growth."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"bench-{facts['options']['device']}"
    paths = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    write_json(paths[0], facts)
    write_whole(paths[1], f"{as_table(facts)}\n".encode())
    if "growth" in facts:
        try:
            draw_growth(facts["growth"], str(stem.with_suffix(".svg")))
            paths.append(stem.with_suffix(".svg"))
        except ImportError:
            pass  # the JSON has the numbers, from which the plot can be drawn elsewhere
    return paths
