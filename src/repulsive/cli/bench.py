"""`repulsive bench`: measure the cost of repulsion on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.output import print_json, print_progress, print_tables


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="Measure this model of transformers with random weights: bert-base, vit-b16, gpt2 or llama. "
            "Default: the paper's Transformer-small."
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: paper, sphere, spos, spos-paper, sgld, logits, kernel-free, auto, schedule or "
            "max-norm; repeatable. Default: all."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --model: sequences or images per step.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="With --model: tokens per sequence.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --model: number of layers.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --model: ordinary steps of each rule per round; default: 2.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="With --model: take as many rounds as fit in this time, at least 6. Default without --rounds: 120 on "
            "cuda.",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file; - prints them instead of the table.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Show 95 % confidence intervals; with --model also throughput, memory and hooks."),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; default: cuda if available.")] = "",
    tokens: Annotated[
        list[int] | None, typer.Option(help="Without --model: target tokens per step; repeatable.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Without --model: rows of the table; repeatable. MA is always measured.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            help="Number of measurement rounds; default: 300 on cuda, 12 on cpu; with --model as many as fit in "
            "--seconds, and 6 on cpu.",
            show_default=False,
        ),
    ] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option(
            "--cuda-graphs",
            help="With --model and --compile: run the model as CUDA graphs, so that a slow host does not limit it.",
        ),
    ] = None,
    growth: Annotated[
        bool | None,
        typer.Option(
            help="Without --model: also measure how the cost grows with heads, width and layers. Default: on."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Without --model: folder for JSON, Markdown and the plot.")] = None,
) -> None:
    """Measure the time of a training step with and without repulsion."""
    from repulsive.lab.bench.command import bench_model, bench_transformer, choose_device
    from repulsive.lab.bench.terminal_tables import terminal_tables

    device = choose_device(device)
    with_model = {
        "rule": rule,
        "batch": batch,
        "length": length,
        "layers": layers,
        "steps": steps,
        "seconds": seconds,
        "cuda-graphs": cuda_graphs,
    }
    without_model = {"tokens": tokens, "variant": variant, "growth": growth or None, "out": out}
    misplaced = [name for name, value in (with_model if model is None else without_model).items() if value is not None]
    if misplaced:
        reason = "needs --model" if model is None else "cannot be combined with --model"
        raise typer.BadParameter(f"this option {reason}", param_hint=f"--{misplaced[0]}")
    as_json = json_file == Path("-")
    if model is not None:
        facts = bench_model(
            model,
            rule or (),
            device=device,
            rounds=rounds,
            seconds=seconds,
            steps=steps,
            batch=batch,
            length=length,
            layers=layers,
            compiled=compiled,
            cuda_graphs=bool(cuda_graphs),
            json_file=None if as_json else json_file,
            progress=print_progress,
            show=not as_json,
            full=full,
        )
        if as_json:
            print_json(facts)
        return
    facts = bench_transformer(
        device=device,
        tokens=tokens or (),
        variants=variant or (),
        rounds=rounds,
        compiled=compiled,
        growth=growth is not False,
        out=out,
        json_file=None if as_json else json_file,
        progress=print_progress,
    )
    if as_json:
        print_json(facts)
    else:
        print_tables(terminal_tables(facts, full))
