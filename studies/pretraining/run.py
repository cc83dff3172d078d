"""Pre-training measured: ELECTRA with and without repulsion for equal tokens, fine-tuned on GLUE from every model.

    python -m studies.pretraining.run --data prepared --tokens 100e6 --dry-run
    python -m studies.pretraining.run --data prepared --tokens 100e6 --jobs 16 --limit 560 --set training.compile=true
    python -m studies.pretraining.run --stage tables --tokens 100e6 --results results/pretraining

Stages: `pretrain` trains every method with the same seeds on the same blocks, and leaves a model after every fifth
(`--points`) of the tokens; `finetune` trains the GLUE tasks from each: `--repeats` from the last models, with RTE after
MNLI, and `--curve-repeats` from those before; `heads` measures the discriminators; `tables` writes what there is.

`--data` has the blocks in `pretrain` and the prepared tasks in `glue/TASK`; studies/pretraining/data.py makes such a
folder. What has been trained is not trained again: the same command goes on where `--limit` stopped it. Fine-tuning
takes the first repeat of everything before the second, so that whatever has ended by then can be compared; with
`--order tasks` all repeats of the longest task come first, which ends sooner where there is time for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from studies.engine import Clock, Study, drop_weights, ended, in_one_line, run
from studies.pretraining.exports import exports_of, make_saving, percent
from studies.pretraining.rows import AFTER_MNLI, BASELINE, LONGEST, METHODS, SEEDS, WARM_UP

from repulsive.errors import ConfigError
from repulsive.lab.engine.launch import Spec
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.start import CONFIG
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.text.folders import read_manifest

STAGES = ("pretrain", "finetune", "heads", "tables")


@dataclass(frozen=True)
class Export:
    """A model that pre-training left.

    Args:
        method: of the pre-training.
        seed: of the pre-training.
        share: of the tokens, in per cent, as its folder has it.
        folder: where it is.
    """

    method: str
    seed: int
    share: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}-{self.share}"

    @property
    def last(self) -> bool:
        return self.share == percent(1, 1)


class Pretrainings(Study):
    """All pre-trainings, and the fine-tunings from their models.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given, self.blocks = arguments, arguments.data / "pretrain"
        self.size, self.tokens = arguments.size, int(arguments.tokens)
        batch = open_recipe(f"electra/{self.size}-{BASELINE}", arguments.set).training.batch
        length = read_manifest(self.blocks)["settings"]["length"]
        self.step_tokens = batch * length
        self.points = arguments.points
        self.seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        steps = max(1, math.ceil(self.tokens / self.step_tokens / self.points))  # of a part
        common = [
            f"data.folder={self.blocks}",
            "optimizer.warmup=0",
            f"optimizer.warmup_share={WARM_UP}",
            *arguments.set,
            f"data.steps={steps}",
            f"training.epochs={self.points}",
            "training.evaluate_every=0",
        ]
        super().__init__("electra", arguments.out, common, arguments.device)
        self.methods = [name for name in METHODS if name in arguments.methods]
        self.tasks = [name for name in TASKS if name in arguments.tasks]
        self.exports = arguments.out / "exports"

    def recipe(self, method: str) -> str:
        return f"electra/{self.size}-{method}"

    def pretrainings(self) -> list[Spec]:
        """The first seed of every method before the second."""
        found = [self.specs(method, (), self.seeds, "pretrain") for method in self.methods]
        return [spec for same in zip(*found, strict=True) for spec in same]

    def models(self, *, all_of_them: bool = False) -> list[Export]:
        """What pre-trainings have left, or will have left."""
        found = []
        for method in self.methods:
            for spec in self.specs(method, (), self.seeds, "pretrain"):
                for part in range(1, self.points + 1):
                    share = percent(part, self.points)
                    folder = exports_of(spec.recipe, self.exports) / share
                    if all_of_them or (folder / CONFIG).is_file():
                        found.append(Export(method, spec.recipe.seed, share, folder))
        return found

    def tokens_at(self, share: str) -> int:
        """How many a model has seen, from the per cent that its folder is called by."""
        return round(self.tokens * round(int(share) * self.points / 100) / self.points)

    def repeats(self, model: Export) -> range:
        """Seeds of the fine-tunings from a model."""
        count = self.given.repeats if model.last else self.given.curve_repeats
        return range(SEEDS * model.seed, SEEDS * model.seed + count)

    def place(self, model: Export, task: str) -> Path:
        """Where the fine-tunings of a task from a model are, all repeats; `Clock` takes those of a task for alike."""
        return self.out / "finetune" / task / model.name

    def fine_tuning(self, model: Export, task: str, seed: int) -> Spec:
        """One of them."""
        start: Path = model.folder
        if task == AFTER_MNLI:
            start = self.place(model, "mnli") / f"seed-{seed}"
        data = self.given.data / "glue" / ("rte" if task == AFTER_MNLI else task)
        changes = [f"data.folder={data}", f"model.start={start}", "training.save_seconds=600", *self.given.set_glue]
        spec = Study("glue", self.out, changes, self.device).specs(task, (), range(seed, seed + 1), "")[0]
        return dataclasses.replace(spec, folder=self.place(model, task) / f"seed-{seed}")

    def fine_tunings(self, models: Sequence[Export]) -> list[Spec]:
        """From some models, last ones before others: repeat after repeat or task after task, the longest first."""
        wanted = [
            (not model.last, repeat, LONGEST.index(task), model, task, seed)
            for model in models
            for task in self.tasks
            for repeat, seed in enumerate(self.repeats(model))
        ]
        wanted.sort(key=itemgetter(0, 1, 2) if self.given.order == "repeats" else itemgetter(0, 2, 1))
        return [self.fine_tuning(model, task, seed) for *_, model, task, seed in wanted]

    def after_mnli(self, models: Sequence[Export], *, planned: bool = False) -> list[Spec]:
        """RTE from the weights of MNLI that are there, repeat after repeat."""
        if not {"rte", "mnli"} <= set(self.tasks):
            return []
        last = [model for model in models if model.last]
        pairs = sorted((seed % SEEDS, seed, model.name, model) for model in last for seed in self.repeats(model))
        found = [self.fine_tuning(model, AFTER_MNLI, seed) for _, seed, _, model in pairs]
        return [spec for spec in found if planned or ended(spec) or (_start(spec) / "best").is_dir()]


def _start(spec: Spec) -> Path:
    return Path(str(spec.recipe.model.start))  # type: ignore[attr-defined]


def pretrain(study: Pretrainings, clock: Clock) -> None:
    """In one process after the other where there are several jobs: what was compiled for one is there for the next."""
    given = study.given
    run(
        study.pretrainings(),
        "pretrain",
        given.side_by_side,
        clock=clock,
        make=functools.partial(make_saving, out=study.exports),
        here=given.jobs == 1,
        keep_weights=not given.drop_weights,
    )


def finetune(study: Pretrainings, clock: Clock) -> None:
    """All tasks from every model; weights of MNLI stay until RTE has started from them."""
    given, models = study.given, study.models()
    specs = study.fine_tunings(models)
    mnli = {study.place(model, "mnli") for model in models if model.last and "rte" in study.tasks}
    keep = (lambda spec: spec.folder.parent in mnli) if given.drop_weights else True
    run(specs, "finetune", given.jobs, clock=clock, here=given.jobs == 1, keep_weights=keep)
    after = study.after_mnli(models)
    run(after, "RTE after MNLI", given.jobs, clock=clock, here=given.jobs == 1, keep_weights=not given.drop_weights)
    if given.drop_weights:
        used = {_start(spec) for spec in after if ended(spec)}
        for spec in specs:
            if spec.folder in used:
                drop_weights(spec)


def show_plan(study: Pretrainings) -> None:
    """Runs, steps and tokens of every stage."""
    first = study.pretrainings()
    steps = first[0].recipe.data.steps * study.points  # type: ignore[attr-defined]
    blocks = read_manifest(study.blocks)["rows"]["train"]
    tokens = steps * study.step_tokens
    passes = tokens / (blocks * study.step_tokens / first[0].recipe.training.batch)
    left = sum(not ended(spec) for spec in first)
    print(f"pretrain: {len(first)} runs, {left} to do, of {steps:,} steps, {tokens:,} tokens, {passes:.1f} passes each")
    models = study.models(all_of_them=True)
    specs = [*study.fine_tunings(models), *study.after_mnli(models, planned=True)]
    counts: dict[str, list[Spec]] = {}
    for spec in specs:
        counts.setdefault(spec.folder.parents[1].name, []).append(spec)
    print(f"{'finetune':10}{'runs':>6}{'to do':>7}{'steps':>8}{'all steps':>11}")
    total = 0
    for task, some in counts.items():
        each, todo = steps_of(some[0]), sum(not ended(spec) for spec in some)
        total += each * todo
        print(f"{task:10}{len(some):6}{todo:7}{each:8,}{each * todo:11,}")
    print(f"Fine-tuning has {total:,} steps to do; heads are measured in {len(models)} models.")


def steps_of(spec: Spec) -> int:
    """Of a fine-tuning, from the rows that were prepared."""
    recipe = spec.recipe
    rows = read_manifest(recipe.data.folder)["rows"]["train"]  # type: ignore[attr-defined]
    rows = max(1, round(rows * recipe.data.share)) * (2 if recipe.data.swapped else 1)  # type: ignore[attr-defined]
    return int(recipe.training.epochs * math.ceil(rows / recipe.training.batch))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--methods", nargs="+", default=["ma", "svgd", "strided"], choices=list(METHODS))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS), help="of GLUE")
    parser.add_argument("--data", type=Path, default=Path("prepared"))
    parser.add_argument("--out", type=Path, default=Path("runs/pretraining"))
    parser.add_argument("--results", type=Path, default=Path("results/pretraining"))
    parser.add_argument("--size", choices=("small", "tiny"), default="small", help="of the recipes of pre-training")
    parser.add_argument("--tokens", type=float, default=100e6, help="that each pre-training sees, rounded up to steps")
    parser.add_argument("--points", type=int, default=5, help="models of a pre-training, equally far apart")
    parser.add_argument("--seeds", type=int, default=1, help="of pre-training, how many")
    parser.add_argument("--first-seed", type=int, default=0, help="of pre-training; another study had those before")
    parser.add_argument("--repeats", type=int, default=5, help="fine-tunings of a task from each last model")
    parser.add_argument("--curve-repeats", type=int, default=1, help="the same from those before")
    parser.add_argument("--order", choices=("repeats", "tasks"), default="repeats", help="what of fine-tuning is first")
    parser.add_argument("--jobs", type=int, default=0, help="fine-tunings side by side; 1: all in this process")
    parser.add_argument("--side-by-side", type=int, default=1, help="pre-trainings at the same time")
    parser.add_argument("--device")
    parser.add_argument("--limit", type=float, help="seconds; runs that would take longer are not started")
    parser.add_argument("--items", type=int, default=256, help="blocks that heads are measured on")
    parser.add_argument("--drop-weights", action="store_true", help="of runs that have ended; exported models stay")
    parser.add_argument("--set", action="append", default=[], help="key=value, for every pre-training")
    parser.add_argument("--set-glue", action="append", default=[], help="key=value, for every fine-tuning")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, train nothing")
    arguments = parser.parse_args(words)
    with in_one_line(parser):
        if min(arguments.points, arguments.seeds) < 1 or not 1 <= arguments.repeats <= SEEDS:
            raise ConfigError(f"--points and --seeds must be at least 1, --repeats from 1 to {SEEDS}")
        if arguments.first_seed < 0:
            raise ConfigError(f"--first-seed must be at least 0, not {arguments.first_seed}")
        study = Pretrainings(arguments)
        if arguments.dry_run:
            show_plan(study)
            return
        clock = Clock(arguments.limit)
        if "pretrain" in arguments.stage:
            pretrain(study, clock)
        if "finetune" in arguments.stage:
            finetune(study, clock)
        if "heads" in arguments.stage:
            from studies.pretraining.heads import measure_all

            measure_all(study, clock)
        if "tables" in arguments.stage:
            from studies.pretraining.tables import write_tables

            write_tables(study, arguments.results)


if __name__ == "__main__":
    main()
