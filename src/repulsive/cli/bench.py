"""`repulsive bench`: what repulsion costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from repulsive.cli.say import say


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Measure a model of transformers instead: bert-base, vit-b16, gpt2 or llama, random weights."
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="With --model: paper, sphere, spos, sgld or logits; may be given several times."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --model: sequences or images per step.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="With --model: tokens per sequence.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --model: number of layers.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --model: steps per turn; by default 10 on cuda, 2 on cpu.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --model: write all numbers to this file.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "",
    tokens: Annotated[list[int] | None, typer.Option(help="Target tokens a step; may be given several times.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only these rows of the table; MA is always there.")] = None,
    rounds: Annotated[
        int,
        typer.Option(
            help="Rounds of interleaved steps; by default 300 on cuda, 12 on cpu; with --model 30 and 6.",
            show_default=False,
        ),
    ] = 0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the loss, or the model, with torch.compile.")
    ] = False,
    growth: Annotated[
        bool | None, typer.Option(help="Also measure how cost grows with heads, width and layers; the default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON, Markdown and the plot.")] = None,
) -> None:
    """Time training steps with and without repulsion: of the paper's Transformer-small, or of a --model."""
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r}: choose cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device", param_hint="--device")
    of_model = {"rule": rule, "batch": batch, "length": length, "layers": layers, "steps": steps, "json": json_file}
    of_small = {"tokens": tokens, "variant": variant, "growth": growth or None, "out": out}
    misplaced = [name for name, value in (of_model if model is None else of_small).items() if value is not None]
    if misplaced:
        needs = "needs --model" if model is None else "does not go with --model"
        raise typer.BadParameter(f"this option {needs}", param_hint=f"--{misplaced[0]}")
    if model is not None:
        sizes = {"batch": batch, "length": length, "layers": layers}
        _bench_model(model, rule or [], device, rounds, steps, compiled, json_file, sizes)
    else:
        _bench_small(device, tokens, variant, rounds, compiled, growth is not False, out)


def _bench_model(
    model: str,
    rules: list[str],
    device: str,
    rounds: int,
    steps: int | None,
    compiled: bool,
    path: Path | None,
    sizes: dict[str, Any],
) -> None:
    import json

    from rich.console import Console

    from repulsive.lab.bench.model_cost import CostOptions, measure_model
    from repulsive.lab.bench.model_table import print_costs
    from repulsive.lab.bench.presets import find_preset
    from repulsive.lab.bench.rules import build_rules

    find_preset(model)
    build_rules(rules)
    if rounds < 0 or rounds == 1:
        raise typer.BadParameter("an interval needs at least 2 rounds", param_hint="--rounds")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # before minutes are spent on what cannot be written
    rounds, steps, warm_up = (rounds or 30, steps or 10, 2) if device == "cuda" else (rounds or 6, steps or 2, 1)
    options = CostOptions(model, tuple(rules), device, rounds, steps, warm_up, compiled=compiled, **sizes)
    facts = measure_model(options, progress=say)
    print_costs(facts, Console())
    if path is not None:
        path.write_text(json.dumps(facts, indent=2) + "\n")
        say(f"written to {path}")


def _bench_small(
    device: str,
    tokens: list[int] | None,
    variant: list[str] | None,
    rounds: int,
    compiled: bool,
    growth: bool,
    out: Path | None,
) -> None:
    from repulsive.lab.bench.report import as_table, run
    from repulsive.lab.bench.steps import VARIANTS, Options

    unknown = [name for name in variant or [] if name not in VARIANTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: choose from {', '.join(VARIANTS)}", param_hint="--variant")
    sizes = tuple(tokens or ((4096, 16384) if device == "cuda" else (2048,)))
    if min(sizes) < 32 or rounds < 0:
        raise typer.BadParameter("tokens must be at least 32, rounds at least 1")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before minutes are spent on what cannot be written
    rounds = rounds or (300 if device == "cuda" else 12)
    options = Options(device, sizes, tuple(variant or VARIANTS), compiled, rounds)
    say(as_table(run(options, growth=growth, out=out, progress=say)))
    if out is not None:
        say(f"written to {out}")
