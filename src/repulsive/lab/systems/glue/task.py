"""Fine-tuning of a pre-trained encoder, such as ELECTRA, on a GLUE task, the paper's third system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError, DataError
from repulsive.lab.engine import assets as run_assets
from repulsive.lab.engine.data import Data as PreparedData
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import DeviceTask, Evaluation, Forward, Inputs
from repulsive.lab.systems.glue.data import MOST, PREDICT, task_named
from repulsive.lab.systems.glue.model import FineTuned, depth_of
from repulsive.lab.systems.glue.start import Model, checksums_of, encoder_of, fill_in_seed
from repulsive.lab.text.batches import Batch, Buckets
from repulsive.lab.text.folders import content_errors
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.wordpiece import CLS, FILE, SEP
from repulsive.metrics import classification as metrics
from repulsive.metrics import correlation

_EVALUATION_BATCH = 256
_SHOWN = {"matthews": ("matthews", "accuracy", "nll"), "spearman": ("spearman", "pearson", "mse")}
_OF_TWO_CLASSES = {"matthews": correlation.matthews, "f1": correlation.f1}
_NO_PENALTY = "there is no regularizer for a pre-trained encoder; leave it out"


@dataclass(frozen=True)
class Data(PreparedData):
    """Prepared data to train on.

    Args:
        folder: what `repulsive prepare glue` wrote.
        share: fraction of the training rows to use, from the first on; for quick trials.
        task: name of the GLUE task, such as "cola".
        swapped: train on every pair twice, the second time with its texts swapped.
    """

    task: str = ""
    swapped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            task_named(self.task)
        except DataError as error:
            raise ValueError(f"task={self.task!r}: {error}") from None


@dataclass(frozen=True)
class Rates:
    r"""Learning rates by depth: $\gamma^{e}$ times the recipe's rate for layer $l$ of $n$; embeddings are layer 0.

    Args:
        layer_decay: $\gamma$; 1 for one rate everywhere.
        counted: "paper": $e = n + 1 - l$; "released": $e = n + 2 - l$, a mistake of the official code, with which its
            published numbers were made. The head's factor is 1 in both.
    """

    layer_decay: float = 0.8
    counted: Literal["paper", "released"] = "released"

    def __post_init__(self) -> None:
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay={self.layer_decay} must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Glue(Recipe):
    """Recipe for fine-tuning on a GLUE task.

    Args:
        data: prepared data.
        model: initial weights and head.
        rates: learning rates by depth.
    """

    data: Data
    model: Model = field(default_factory=Model)
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.compile:
            raise ValueError("training.compile=true: batches have many shapes; leave it out")
        if self.method.penalty:
            raise ValueError(f"method.penalty={self.method.penalty}: {_NO_PENALTY}")


class GlueTask(DeviceTask):
    """A GLUE task: texts, or text pairs, and their classes or scores.

    The data split "test" is the benchmark's development set, because the labels of its test set are not public. With
    `training.average = 1`, the default, the last weights are evaluated: nothing is selected on that set.

    Args:
        recipe: recipe of the run.
        data: prepared data without data splits, as `restore` makes them; None: read the recipe's folder.
    """

    def __init__(self, recipe: Glue, data: Prepared | None = None) -> None:
        self.recipe = recipe
        self.task = task_named(recipe.data.task)
        self.data = Prepared.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.dataset = self.data.task
        self._check_data()
        self.select_by = self.task.metric
        self.shown = _SHOWN.get(self.task.metric, ("accuracy", "nll"))
        self.parts: dict[str, Part] = dict(self.data.parts)
        self.scored_parts = ("dev", "test", *(name for name in self.parts if name == "mismatched"))
        pieces = self.data.extra[FILE].decode().split("\n")
        self._marks = pieces.index(CLS), pieces.index(SEP)
        with content_errors(self.data.folder):
            self._longest = int(self.data.manifest["settings"]["longest"])
        self._model = fill_in_seed(recipe.model, recipe.seed)
        if self.has_data:
            self._plan_batches()

    def _plan_batches(self) -> None:
        recipe, train = self.recipe, self.parts["train"]
        self._kept = max(1, round(len(train) * recipe.data.share))
        lengths = joined_lengths(train)[: self._kept]
        if recipe.data.swapped:
            lengths = lengths.repeat(2)
        self.num_data = len(lengths)
        self._buckets = Buckets(lengths, recipe.training.batch, recipe.seed, self._longest)
        start = checksums_of(self._model, self.data.extra[FILE])
        self.checksums = dict(self.data.manifest["files"]) | start

    def _check_data(self) -> None:
        folder, data = self.recipe.data.folder, self.data
        name = data.manifest.get("settings", {}).get("glue_task")
        if name != self.task.name:
            held = f"GLUE task {name!r}" if name else f"task {data.task!r}"
            raise ConfigError(f"{folder}: holds {held}, and the recipe is for GLUE task {self.task.name!r}")
        if self.recipe.data.swapped and len(self.task.texts) == 1:
            raise ConfigError(f"data.swapped=true: GLUE task {self.task.name!r} has single texts, nothing to swap")

    def model(self) -> FineTuned:
        settings = self._model
        encoder = encoder_of(settings, len(self.data.vocabulary))
        places = int(encoder.config.max_position_embeddings)  # type: ignore[union-attr, arg-type]
        if places < self._longest:
            raise ConfigError(f"model.start={settings.start}: has {places} positions; prepare with --longest {places}")
        return FineTuned(encoder, max(1, len(self.task.classes)), settings.head, settings.dropout)

    def rate_factors(self, model: nn.Module) -> dict[str, float]:
        """Return the factor of each parameter's learning rate; see `Rates`."""
        rates = self.recipe.rates
        names = [name for name, _ in model.named_parameters()]
        layers = max(depth_of(name, 0) for name in names if name.startswith("encoder."))
        extra = rates.counted == "released"
        return {
            name: rates.layer_decay ** (layers + 1 - depth + (extra and depth <= layers))
            for name in names
            for depth in (depth_of(name, layers),)
        }

    def order(self, epoch: int) -> list[Batch]:
        return list(self._buckets.epoch(epoch))

    def fetch(self, batch: Batch) -> Inputs:
        return {"rows": batch.indices % self._kept, "swapped": batch.indices >= self._kept}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        part, rows = self.parts["train"], inputs["rows"]
        logits = model(*joined(part, rows, length, self._marks, inputs["swapped"])).float()  # [B, C]
        labels = part.labels[rows]
        if self.task.classes:
            return F.cross_entropy(logits, labels)
        return F.mse_loss(logits.squeeze(-1), labels / MOST)

    def assets(self) -> dict[str, bytes]:
        return run_assets.save_prepared(self.data, extra=(FILE,))

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        data, _ = run_assets.restore_prepared(assets, recipe.data.folder)
        return cls(recipe, data)

    def facts(self) -> list[tuple[str, str]]:
        return run_assets.data_facts(self.data)

    def answers(self, model: nn.Module, part: str) -> Tensor:
        """Compute the predictions of a model in evaluation mode, moved to the CPU: logits [N, C], or scores [N]."""
        chosen = self.parts[part]
        outputs = torch.empty(len(chosen), max(1, len(self.task.classes)), device=self._device)
        for batch in Buckets(joined_lengths(chosen).cpu(), _EVALUATION_BATCH, most=self._longest).in_order():
            rows = batch.indices.to(self._device)
            outputs[rows] = model(*joined(chosen, rows, batch.length, self._marks)).float()
        return outputs.cpu() if self.task.classes else outputs[:, 0].cpu() * MOST

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        if part.startswith(PREDICT):
            raise ConfigError(
                f"part {part!r}: its labels are not public; `evaluate RUN --predict FOLDER` writes answers"
            )
        answers, labels = self.answers(model, part), self.parts[part].labels.cpu()
        notes = {"split": self._split()} if part == "test" else {}
        if not self.task.classes:
            error = (answers.double() - labels).square()
            values = {
                "spearman": correlation.spearman(answers, labels),
                "pearson": correlation.pearson(answers, labels),
                "mse": error.mean(),
            }
            items = {"predictions": answers, "labels": labels, "squared_error": error}
            items["moments"] = correlation.moments(answers, labels)
            return Evaluation({name: float(value) for name, value in values.items()}, items, notes)
        predicted = answers.argmax(-1)
        scores = metrics.scores(answers, labels)
        items = {
            "logits": answers,
            "labels": labels,
            "correct": predicted == labels,
            "nll": F.cross_entropy(answers.double(), labels, reduction="none"),
        }
        for name in {self.task.metric, *self.task.also} & _OF_TWO_CLASSES.keys():
            scores[name] = float(_OF_TWO_CLASSES[name](predicted, labels))
            items["counts"] = correlation.counts(predicted, labels)
        return Evaluation(scores, items, notes)

    def _split(self) -> str:
        """Return a note that says what the split "test" is and how the weights were selected."""
        split = "test is the benchmark's development set"
        if self.recipe.training.average:
            return f"{split}; nothing was selected on it"
        held = self.data.manifest["settings"]["held_out"]
        by = f"{held:g} of the training rows, held out" if held else "it, so this score is optimistic"
        return f"{split}; the best weights were selected on {by}"


def joined_lengths(part: Part) -> Tensor:
    """Compute the number of word pieces of each row, with [CLS] and [SEP], int64 [N]."""
    return torch.stack([side.lengths for side in part.sentences]).sum(0) + 1 + len(part.sentences)


def joined(
    part: Part, rows: Tensor, length: int, marks: tuple[int, int], swapped: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Build the model inputs: [CLS] text [SEP], or [CLS] first [SEP] second [SEP].

    Args:
        part: the texts.
        rows: indices of the rows, int64 [B].
        length: padded length, T.
        marks: ids of [CLS] and [SEP].
        swapped: rows whose texts are swapped, bool [B].

    Returns:
        Token ids and segment ids, int64 [B, T], and the padding mask, bool [B, T].
    """
    cls, sep = marks
    tables = [side.padded(rows, length) for side in part.sentences]  # ([B, T], [B]) each
    if len(tables) == 2 and swapped is not None:
        (a, m), (b, n) = tables
        turn = swapped.unsqueeze(1)
        k = torch.where(swapped, n, m)  # [B]
        tables = [(torch.where(turn, b, a), k), (torch.where(turn, a, b), m + n - k)]
    places = torch.arange(length, device=rows.device).expand(len(rows), length)  # [B, T]
    ids = (places == 0).long() * cls  # [B, T]
    segments = torch.zeros_like(ids)
    start = torch.ones_like(rows).unsqueeze(1)  # [B, 1]: where the next text begins
    for number, (table, lengths) in enumerate(tables):
        end = start + lengths.unsqueeze(1)  # where its [SEP] stands
        inside = (places >= start) & (places < end)
        ids = torch.where(inside, table.long().gather(1, (places - start).clamp(min=0)), ids)
        ids = torch.where(places == end, sep, ids)
        segments = torch.where((places >= start) & (places <= end), number, segments)
        start = end + 1
    return ids, segments, places < start
