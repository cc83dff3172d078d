"""Effect of repulsion on ELECTRA: pre-train with and without it on equal tokens, then fine-tune every model on GLUE.

    python -m studies.pretraining.run --data prepared --tokens 100e6 --dry-run
    python -m studies.pretraining.run --data prepared --tokens 100e6 --jobs 16 --limit 560 --set training.compile=true
    python -m studies.pretraining.run --stage tables --tokens 100e6 --results results/pretraining

Needs `--data` with blocks in `pretrain` and prepared tasks in `glue/TASK`; `studies.pretraining.data` makes such a
folder. Writes tables and figures to results/pretraining.

Stages:
- `pretrain` trains every method with the same seeds on the same blocks, and exports a model after every fifth
  (`--points`) of the tokens;
- `finetune` trains the GLUE tasks from each model: `--repeats` times from the last ones, with RTE after MNLI, and
  `--curve-repeats` times from the earlier ones;
- `heads` measures the heads of the discriminators;
- `tables` writes the results so far.

Finished runs are not repeated: rerun the same command to resume after `--limit`. Fine-tuning trains the first repeat of
every task before the second, so that the finished runs can be compared at any time. `--order tasks` trains all repeats
of the longest task first, which takes less time in total.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from studies.arguments import errors_in_one_line
from studies.engine import TimeLimit, drop_weights, is_finished, train_missing
from studies.pretraining.exporting_task import make_exporting_task
from studies.pretraining.heads import measure_all
from studies.pretraining.rows import METHODS, SEEDS
from studies.pretraining.study import Pretrainings, start_of
from studies.pretraining.tables import write_tables

from repulsive.errors import ConfigError
from repulsive.lab.engine.launch import Spec
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.text.folders import read_manifest

STAGES = ("pretrain", "finetune", "heads", "tables")


def pretrain(study: Pretrainings, limit: TimeLimit) -> None:
    """Pre-train every method, `--side-by-side` runs at a time; later runs reuse the compiled code of earlier ones."""
    arguments = study.arguments
    train_missing(
        study.pretrainings(),
        "pretrain",
        arguments.side_by_side,
        limit=limit,
        make=functools.partial(make_exporting_task, out=study.exports),
        here=arguments.jobs == 1,
        keep_weights=not arguments.drop_weights,
    )


def finetune(study: Pretrainings, limit: TimeLimit) -> None:
    """Fine-tune every model on all tasks; keep the weights of MNLI until RTE has been trained from them."""
    arguments, models = study.arguments, study.models()
    specs = study.fine_tunings(models)
    mnli = {study.fine_tuning_folder(model, "mnli") for model in models if model.is_last and "rte" in study.tasks}
    keep = (lambda spec: spec.folder.parent in mnli) if arguments.drop_weights else True
    here = arguments.jobs == 1
    train_missing(specs, "finetune", arguments.jobs, limit=limit, here=here, keep_weights=keep)
    after = study.after_mnli(models)
    keep = not arguments.drop_weights
    train_missing(after, "RTE after MNLI", arguments.jobs, limit=limit, here=here, keep_weights=keep)
    if arguments.drop_weights:
        used = {start_of(spec) for spec in after if is_finished(spec)}
        for spec in specs:
            if spec.folder in used:
                drop_weights(spec)


def show_plan(study: Pretrainings) -> None:
    """Print runs, steps and tokens of every stage."""
    first = study.pretrainings()
    steps = first[0].recipe.data.steps * study.points  # type: ignore[attr-defined]
    blocks = read_manifest(study.blocks)["rows"]["train"]
    tokens = steps * study.step_tokens
    passes = tokens / (blocks * study.step_tokens / first[0].recipe.training.batch)
    missing = sum(not is_finished(spec) for spec in first)
    print(
        f"pretrain: {len(first)} runs, {missing} to do, of {steps:,} steps, {tokens:,} tokens, {passes:.1f} passes each"
    )
    models = study.models(planned=True)
    specs = [*study.fine_tunings(models), *study.after_mnli(models, planned=True)]
    counts: dict[str, list[Spec]] = {}
    for spec in specs:
        counts.setdefault(spec.folder.parents[1].name, []).append(spec)
    print(f"{'finetune':10}{'runs':>6}{'to do':>7}{'steps':>8}{'all steps':>11}")
    total = 0
    for task, some in counts.items():
        each, todo = steps_of(some[0]), sum(not is_finished(spec) for spec in some)
        total += each * todo
        print(f"{task:10}{len(some):6}{todo:7}{each:8,}{each * todo:11,}")
    print(f"Fine-tuning needs {total:,} more steps; the stage heads measures {len(models)} models.")


def steps_of(spec: Spec) -> int:
    """Steps of a fine-tuning run, from the size of its prepared data."""
    recipe = spec.recipe
    rows = read_manifest(recipe.data.folder)["rows"]["train"]  # type: ignore[attr-defined]
    rows = max(1, round(rows * recipe.data.share)) * (2 if recipe.data.swapped else 1)  # type: ignore[attr-defined]
    return int(recipe.training.epochs * math.ceil(rows / recipe.training.batch))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", default=list(STAGES), choices=STAGES, help="stages to run")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["ma", "svgd", "strided"],
        choices=list(METHODS),
        help="pre-trainings to compare",
    )
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS), help="tasks of GLUE")
    parser.add_argument("--data", type=Path, default=Path("prepared"), help="folder of prepared data")
    parser.add_argument("--out", type=Path, default=Path("runs/pretraining"), help="folder of runs")
    parser.add_argument("--results", type=Path, default=Path("results/pretraining"), help="folder of tables")
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="size of the pre-training recipes")
    parser.add_argument("--tokens", type=float, default=100e6, help="of each pre-training, rounded up to whole steps")
    parser.add_argument("--points", type=int, default=5, help="models that a pre-training exports, evenly spaced")
    parser.add_argument("--seeds", type=int, default=1, help="number of pre-training seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="first pre-training seed, to extend another study")
    parser.add_argument("--repeats", type=int, default=5, help="fine-tunings of each task from each last model")
    parser.add_argument("--curve-repeats", type=int, default=1, help="the same from earlier models")
    parser.add_argument("--order", choices=("repeats", "tasks"), default="repeats", help="order of fine-tunings")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="fine-tunings in parallel; 0: all cores, 1: train everything in this process",
    )
    parser.add_argument("--side-by-side", type=int, default=1, help="pre-trainings in parallel")
    parser.add_argument("--device", help="cpu or cuda; by default cuda if available")
    parser.add_argument("--limit", type=float, help="seconds; runs that would take longer are not started")
    parser.add_argument("--items", type=int, default=256, help="blocks on which heads are measured")
    parser.add_argument(
        "--drop-weights", action="store_true", help="delete the weights of finished runs, not exported models"
    )
    parser.add_argument("--set", action="append", default=[], help="key=value for every pre-training; repeatable")
    parser.add_argument("--set-glue", action="append", default=[], help="key=value for every fine-tuning; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and train nothing")
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
        if min(arguments.points, arguments.seeds) < 1 or not 1 <= arguments.repeats <= SEEDS:
            raise ConfigError(f"--points and --seeds must be at least 1, --repeats from 1 to {SEEDS}")
        if arguments.first_seed < 0:
            raise ConfigError(f"--first-seed must be at least 0, not {arguments.first_seed}")
        study = Pretrainings(arguments)
        if arguments.dry_run:
            show_plan(study)
            return
        limit = TimeLimit(arguments.limit)
        if "pretrain" in arguments.stage:
            pretrain(study, limit)
        if "finetune" in arguments.stage:
            finetune(study, limit)
        if "heads" in arguments.stage:
            measure_all(study, limit)
        if "tables" in arguments.stage:
            write_tables(study, arguments.results)


if __name__ == "__main__":
    main()
