"""The runs of the pre-training study: pre-trainings, the models they export, and fine-tunings from each model."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from studies.engine import Study, is_finished
from studies.pretraining.exporting_task import export_folder, percent
from studies.pretraining.rows import AFTER_MNLI, BASELINE, LONGEST, METHODS, SEEDS, WARM_UP

from repulsive.lab.engine.launch import Spec
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.start import CONFIG
from repulsive.lab.systems.registry import open_recipe
from repulsive.lab.text.folders import read_manifest


@dataclass(frozen=True)
class Export:
    """A model that a pre-training exported.

    Args:
        method: of the pre-training.
        seed: of the pre-training.
        share: percentage of the tokens, which is also the name of its folder.
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
    def is_last(self) -> bool:
        return self.share == percent(1, 1)


class Pretrainings(Study):
    """All pre-trainings, and the fine-tunings from their models.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.blocks = arguments, arguments.data / "pretrain"
        self.size, self.tokens = arguments.size, int(arguments.tokens)
        batch = open_recipe(f"electra/{self.size}-{BASELINE}", arguments.set).training.batch
        length = read_manifest(self.blocks)["settings"]["length"]
        self.step_tokens = batch * length
        self.points = arguments.points
        self.seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        steps = max(1, math.ceil(self.tokens / self.step_tokens / self.points))  # between two exports
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
        """All pre-trainings, the first seed of every method before the second."""
        by_method = [self.specs(method, (), self.seeds, "pretrain") for method in self.methods]
        return [spec for same_seed in zip(*by_method, strict=True) for spec in same_seed]

    def models(self, *, planned: bool = False) -> list[Export]:
        """Models that exist; if `planned`, all that pre-trainings will export."""
        models = []
        for method in self.methods:
            for spec in self.specs(method, (), self.seeds, "pretrain"):
                for part in range(1, self.points + 1):
                    share = percent(part, self.points)
                    folder = export_folder(spec.recipe, self.exports) / share
                    if planned or (folder / CONFIG).is_file():
                        models.append(Export(method, spec.recipe.seed, share, folder))
        return models

    def tokens_at(self, share: str) -> int:
        """Number of tokens that a model has seen, from the percentage in the name of its folder."""
        return round(self.tokens * round(int(share) * self.points / 100) / self.points)

    def repeats(self, model: Export) -> range:
        """Seeds of the fine-tunings from a model."""
        count = self.arguments.repeats if model.is_last else self.arguments.curve_repeats
        return range(SEEDS * model.seed, SEEDS * model.seed + count)

    def fine_tuning_folder(self, model: Export, task: str) -> Path:
        """Folder of all repeats of a task from a model; `TimeLimit` expects all runs below a task to take as long."""
        return self.out / "finetune" / task / model.name

    def fine_tuning(self, model: Export, task: str, seed: int) -> Spec:
        """One fine-tuning run."""
        start: Path = model.folder
        if task == AFTER_MNLI:
            start = self.fine_tuning_folder(model, "mnli") / f"seed-{seed}"
        data = self.arguments.data / "glue" / ("rte" if task == AFTER_MNLI else task)
        changes = [f"data.folder={data}", f"model.start={start}", "training.save_seconds=600", *self.arguments.set_glue]
        spec = Study("glue", self.out, changes, self.device).specs(task, (), range(seed, seed + 1), "")[0]
        return dataclasses.replace(spec, folder=self.fine_tuning_folder(model, task) / f"seed-{seed}")

    def fine_tunings(self, models: Sequence[Export]) -> list[Spec]:
        """Fine-tunings from some models: last models first, then by repeat or by task, the longest task first."""
        wanted = [
            (not model.is_last, repeat, LONGEST.index(task), model, task, seed)
            for model in models
            for task in self.tasks
            for repeat, seed in enumerate(self.repeats(model))
        ]
        wanted.sort(key=itemgetter(0, 1, 2) if self.arguments.order == "repeats" else itemgetter(0, 2, 1))
        return [self.fine_tuning(model, task, seed) for *_, model, task, seed in wanted]

    def after_mnli(self, models: Sequence[Export], *, planned: bool = False) -> list[Spec]:
        """RTE after MNLI from the last models, by repeat; unless `planned`, only if the weights of MNLI exist."""
        if not {"rte", "mnli"} <= set(self.tasks):
            return []
        last = [model for model in models if model.is_last]
        pairs = sorted((seed % SEEDS, seed, model.name, model) for model in last for seed in self.repeats(model))
        specs = [self.fine_tuning(model, AFTER_MNLI, seed) for _, seed, _, model in pairs]
        return [spec for spec in specs if planned or is_finished(spec) or (start_of(spec) / "best").is_dir()]


def start_of(spec: Spec) -> Path:
    """The model, or the run, that a fine-tuning starts from."""
    return Path(str(spec.recipe.model.start))  # type: ignore[attr-defined]
