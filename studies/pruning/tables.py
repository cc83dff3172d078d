"""Write the results of the pruning study: a Markdown table and a curve."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from studies.dark_figures import follow_color_scheme

from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.pages.figures.write import check_matplotlib


def settings(
    arguments: argparse.Namespace, loaded: LoadedModel, texts: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """Model, text, command, versions, hardware and date of a study."""
    config: Any = loaded.model.config
    counts = [
        {"sentences": sum(len(batch["input_ids"]) for batch in text), "tokens": sum(map(count_tokens, text))}
        for text in texts
    ]
    words = ["--model", "FOLDER", "--text", "FILE", "--keep", *arguments.keep, "--recover", str(arguments.recover)]
    for name in ("score", "test", "length", "border", "seeds", "rounds"):
        words += [f"--{name}", str(getattr(arguments, name))]
    return {
        "model": arguments.name or Path(arguments.model).name,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "dtype": str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        "text": arguments.text.name,
        "scoring_text": counts[0],
        "held_out_text": counts[1],
        "border": arguments.border,
        "recovery_steps": arguments.recover,
        "learning_rate": arguments.learning_rate,
        "command": shlex.join(["python", "-m", "studies.pruning.run", *words]),
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Versions, hardware and date of a study."""
    import transformers

    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": f"CPU, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used",
        "date": datetime.now(UTC).date().isoformat(),
    }


def origin(result: dict[str, Any]) -> str:
    """Format the command, the versions, the hardware and the date of a study."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"`{result['command']}` ({versions}; {result['hardware']}; {result['date']})"


def markdown(result: dict[str, Any]) -> str:
    """The results as a page."""
    whole, steps = result["whole"], result["recovery_steps"]
    score, test = result["scoring_text"], result["held_out_text"]
    border = result["border"]
    exact = f"gradient scores, and exact ablation of {border} heads on each side of the cut"
    lines = [
        f"# Portable pruning of {result['model']}",
        "",
        f"{result['layers']} layers of {result['heads']} query heads and {result['kv_heads']} key-value heads, "
        f"{result['dtype']}. Heads were chosen by {exact if border else 'gradient scores alone (--border 0)'} on "
        f"{score['sentences']} sentences ({score['tokens']} tokens) of {result['text']}. Perplexity was measured on "
        f"{test['sentences']} other sentences ({test['tokens']} tokens). Recovery is {steps} AdamW steps of one batch "
        f"on the scoring text at learning rate {result['learning_rate']:g}; the whole model trained likewise is the "
        "row to compare it with.",
        "",
        "Perplexity on held-out text:",
        "",
        "| heads | `--keep` | pruned | ablated | random heads | least similar heads | recovered |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {result['heads']} (whole) | - | {whole['perplexity']:.1f} | - | - | - | "
        f"{_number(whole.get('recovered'))} |",
    ]
    for row in result["sizes"]:
        seeds = ", ".join(f"{value:.1f}" for value in row["random"])
        lines.append(
            f"| {row['heads']} | {', '.join(row['keep'])} | {row['pruned']:.1f} | {row['ablated']:.1f} | {seeds} | "
            f"{row['least similar']:.1f} | {_number(row.get('recovered'))} |"
        )
    lines += [
        "",
        "Size and speed (a forward pass over one batch of the held-out text, models timed in turns):",
        "",
        "| heads | key-value heads | parameters | KV cache per token | median time | fastest to slowest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    first = {**whole, "heads": result["heads"], "kv_heads": result["kv_heads"]}
    for row in [first, *result["sizes"]]:
        times = row["milliseconds"]
        lines.append(
            f"| {row['heads']} | {row['kv_heads']} | {row['parameters']:,} | {row['cache_bytes']:,} B | "
            f"{statistics.median(times):.0f} ms | {min(times):.0f} to {max(times):.0f} ms |"
        )
    worst = max(row["difference from ablated"] for row in result["sizes"])
    lines += [
        "",
        f"The largest output difference between a pruned model and the ablated one is {worst:.1e} of the largest "
        "output.",
        "",
        f"![perplexity by number of heads]({result['model']}.svg)",
        "",
        origin(result),
        "",
    ]
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw perplexity by number of heads, on a logarithmic axis."""
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole = result["whole"]
    start = (result["heads"], whole["perplexity"])
    rows = sorted(result["sizes"], key=lambda row: -row["heads"])
    numbers = [row["heads"] for row in rows]
    with pyplot.rc_context({"svg.hashsalt": "repulsive", "svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        for label, key, style in (
            ("chosen by scores", "pruned", {"color": "#0b62a8", "marker": "o"}),
            ("least similar heads", "least similar", {"color": "#b5531c", "marker": "s", "linestyle": "--"}),
        ):
            axes.plot([start[0], *numbers], [start[1], *(row[key] for row in rows)], label=label, **style)
        random = [(row["heads"], value) for row in rows for value in row["random"]]
        axes.scatter(*zip(*random, strict=True), color="#777777", marker="x", label="random heads", zorder=3)
        if "recovered" in whole:
            recovered = [whole["recovered"], *(row["recovered"] for row in rows)]
            label = f"chosen by scores, {result['recovery_steps']} training steps"
            axes.plot([start[0], *numbers], recovered, label=label, color="#2a7f3f", marker="^")
        axes.set_yscale("log")
        axes.set_xticks([start[0], *numbers])
        axes.invert_xaxis()
        axes.set_xlabel("query heads per layer")
        axes.set_ylabel("perplexity on held-out text")
        axes.set_title(result["model"], fontsize=11)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    follow_color_scheme(path)


def count_tokens(batch: dict[str, Any]) -> int:
    """Number of tokens of a batch, without padding."""
    mask = batch.get("attention_mask")
    return int(batch["input_ids"].numel() if mask is None else mask.sum())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":  # draw again from the stored numbers
    import json

    for name in sys.argv[1:]:
        stored = json.loads(Path(name).read_text())
        draw(stored, Path(name).with_suffix(".svg"))
        Path(name).with_suffix(".md").write_text(markdown(stored))
