"""`repulsive sweep RECIPE`: choose settings on the development set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repulsive.cli.say import say


def sweep(
    recipe: Annotated[str, typer.Argument(help="TOML file, or a name from `repulsive ls`.")],
    over: Annotated[
        list[str] | None, typer.Option(help="key=value,value,...; several make a grid. The rule has a default.")
    ] = None,
    then: Annotated[
        list[str] | None, typer.Option(help="The same for a second stage, which starts from the first one's best.")
    ] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="key=value for every run.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of every point.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Runs at the same time; 0: as many as there are cores.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the sweep; by default sweeps/RECIPE.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage, such as that of many machines; by default SQLite in --out.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
) -> None:
    """Try settings, epsilon and alpha first, then beta, and write the best as a recipe. The same command resumes."""
    import math
    import socket

    from repulsive.lab.engine import sweep as sweeps
    from repulsive.lab.engine.launch import train_many
    from repulsive.lab.engine.runs import RunFolder
    from repulsive.lab.runs.plan import folder_name, plan
    from repulsive.lab.systems.registry import make_task, open_recipe

    fixed = changes or []
    opened = open_recipe(recipe, fixed)
    stages = [sweeps.parse_stage(words) for words in (over, then) if words] or sweeps.DEFAULTS[opened.method.rule]
    first = {f"{key}={values[0]}" for stage in stages for key, values in stage.items()}
    open_recipe(recipe, [*fixed, *sorted(first)])  # a typo in a key is told before anything is trained
    task = make_task(opened)
    folder = out or Path("sweeps") / folder_name(recipe, fixed)

    def told(value: float) -> str:
        return f"dev {task.select_by} {value:.4f}" if math.isfinite(value) else "diverged"

    with RunFolder(folder).locked():
        trials = sweeps.sweep(
            folder_name(recipe, fixed),
            stages,
            lambda found: plan([recipe], [*fixed, *found], seeds=seeds, out=folder / "runs", device=device),
            lambda specs: train_many(specs, make_task, jobs),
            task.select_by,
            storage or sweeps.storage_in(folder),
            checksums=task.checksums,
            place=f"{socket.gethostname()}:{folder.resolve()}",
            on_trial=lambda trial: say(f"{' '.join(trial.changes)}: {told(trial.value)}"),
        )
    chosen = sweeps.best(trials)
    parent = recipe if not recipe.endswith(".toml") else str(Path(recipe).resolve())
    path = folder / "best.toml"
    comment = f"Chosen of {len(trials)} by {task.select_by} on the development set: {chosen.value:.4f}"
    sweeps.write_recipe(path, parent, [*fixed, *chosen.changes], comment)
    say(f"best: {' '.join(chosen.changes)}, dev {task.select_by} {chosen.value:.4f}; written to {path}")
