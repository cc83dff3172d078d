"""`repulsive bench`: what repulsion costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "",
    tokens: Annotated[list[int] | None, typer.Option(help="Target tokens a step; may be given several times.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only these rows of the table; MA is always there.")] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds of interleaved steps; by default 300 on cuda, 12 on cpu.", show_default=False)
    ] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the loss with torch.compile.")] = False,
    growth: Annotated[bool, typer.Option(help="Also measure how cost grows with heads, width and layers.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON, Markdown and the plot.")] = None,
) -> None:
    """Time training steps of the paper's Transformer-small with and without repulsion, in one run."""
    import torch

    from repulsive.bench.report import as_table, run
    from repulsive.bench.steps import VARIANTS, Options

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r}: choose cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device", param_hint="--device")
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
    typer.echo(as_table(run(options, growth=growth, out=out, progress=typer.echo)))
    if out is not None:
        typer.echo(f"written to {out}")
