"""Sentence classification: the self-attentive classifier of Lin et al. (2017), the paper's first system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError, DataError
from repulsive.lab.engine import assets as run_assets
from repulsive.lab.engine.data import Data
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.reporting import EXAMPLES, Examples, Measured, ReportOptions
from repulsive.lab.engine.task import DeviceTask, Evaluation, Forward, Inputs
from repulsive.lab.systems.classification.foreign import open_foreign
from repulsive.lab.systems.classification.inputs import model_inputs
from repulsive.lab.systems.classification.measure import measure_classifier, predictions
from repulsive.lab.systems.classification.model import (
    PairClassifier,
    SelfAttentiveConfig,
    SelfAttentiveSizes,
    SentenceClassifier,
)
from repulsive.lab.systems.classification.readings import read_examples, spread
from repulsive.lab.text.batches import Batch, Buckets
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.metrics import classification as metrics
from repulsive.regularizers import frobenius

_EVALUATION_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Model(SelfAttentiveSizes):
    """Sizes of the model; the vocabulary and the classes come from the data.

    Args:
        embedding: size of a word vector; 0: that of the prepared vectors, or 300 without them.
    """

    embedding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embedding < 0:
            raise ValueError(f"embedding={self.embedding} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Classification(Recipe):
    """Recipe for training a sentence classifier.

    Args:
        data: prepared data.
        model: sizes of the model.
    """

    data: Data
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.compile:
            raise ValueError("training.compile=true: batches of classification have many shapes; leave it out")


class ClassificationTask(DeviceTask):
    """Classification task: sentences, or sentence pairs, and their classes.

    Args:
        recipe: recipe of the run.
        data: prepared data without data splits, as `restore` makes them; None: read the recipe's folder.
        examples: a few items of each data split, if `data` has no splits.
    """

    select_by = "accuracy"
    shown = ("accuracy", "nll", "relative_dist", "overlap")
    has_calibration = True

    def __init__(
        self, recipe: Classification, data: Prepared | None = None, examples: Mapping[str, Part] | None = None
    ) -> None:
        self.recipe = recipe
        self.data = Prepared.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.dataset = self.data.task
        self.checksums: Mapping[str, str] = self.data.manifest["files"]
        self.parts: dict[str, Part] = dict(self.data.parts)
        self._examples = examples or {}
        width, vectors = recipe.model.embedding, run_assets.vector_size(self.data)
        if width and vectors and width != vectors:
            raise ConfigError(
                f"model.embedding={width}: the vectors in {recipe.data.folder} have {vectors} numbers each; leave it "
                "out, or prepare the data without vectors"
            )
        if self.has_data:
            self._plan_batches()

    def _plan_batches(self) -> None:
        train = self.parts["train"]
        if not self.data.classes:
            raise DataError(f"{self.recipe.data.folder}: is dataset {self.dataset!r}, which has no classes")
        if len(self.data.classes) < 2 or len(train.labels.unique()) < 2:
            folder = self.recipe.data.folder
            raise DataError(f"{folder}: all training texts are of one class; a classifier needs at least two")
        self.num_data = max(1, round(len(train) * self.recipe.data.share))
        self._buckets = Buckets(train.lengths[: self.num_data], self.recipe.training.batch, self.recipe.seed)

    @property
    def is_pairs(self) -> bool:
        """Whether an item is a pair of sentences."""
        return run_assets.sentences_per_item(self.data) == 2

    def model(self) -> nn.Module:
        sizes = asdict(self.recipe.model)
        sizes["embedding"] = sizes["embedding"] or run_assets.vector_size(self.data) or SelfAttentiveSizes.embedding
        config = SelfAttentiveConfig(len(self.data.vocabulary), len(self.data.classes), **sizes)
        return (PairClassifier if self.is_pairs else SentenceClassifier)(config, self.data.vectors)

    def order(self, epoch: int) -> list[Batch]:
        return list(self._buckets.epoch(epoch))

    def fetch(self, batch: Batch) -> Inputs:
        return {"indices": batch.indices}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        part, indices = self.parts["train"], inputs["indices"]
        penalty = self.recipe.method.penalty
        logits, *collected = _as_tuple(model(*model_inputs(part, indices, length), collect=penalty > 0))
        loss = F.cross_entropy(logits.float(), part.labels[indices])
        if penalty > 0:
            loss = loss + penalty * torch.stack([frobenius(a.float()) for a in _as_tuple(collected[0])]).mean()
        return loss

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        chosen = self.parts[part]
        logits = torch.empty(len(chosen), len(self.data.classes), device=self._device)
        heads: dict[str, float] = {}
        for batch in Buckets(chosen.lengths.cpu(), _EVALUATION_BATCH).in_order():
            indices = batch.indices.to(self._device)
            answers, attention, sentences = model(*model_inputs(chosen, indices, batch.length), collect=True)
            logits[indices] = answers.float()
            for name, value in _diversity(chosen, indices, attention, sentences).items():
                heads[name] = heads.get(name, 0.0) + value * len(batch) / len(chosen)
        labels = chosen.labels.cpu()
        logits = logits.cpu()
        items = {
            "logits": logits,
            "labels": labels,
            "correct": logits.argmax(-1) == labels,
            "nll": F.cross_entropy(logits.double(), labels, reduction="none"),
        }
        return Evaluation(metrics.scores(logits, labels) | heads, items)

    def assets(self) -> dict[str, bytes]:
        chosen = {name: self.data.parts[name] for name in self.scored_parts}
        examples = {name: run_assets.select(part, spread(part, EXAMPLES)) for name, part in chosen.items()}
        return run_assets.save_prepared(self.data, examples)

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        return cls(recipe, *run_assets.restore_prepared(assets, recipe.data.folder))

    def facts(self) -> list[tuple[str, str]]:
        return run_assets.data_facts(self.data)

    def measure_heads(self, model: nn.Module, options: ReportOptions) -> Measured:
        if not self.has_data:
            foreign = None if options.foreign is None else predictions(model, options.foreign)
            return replace(super().measure_heads(model, options), foreign=foreign)
        part = self.parts[options.part]
        return measure_classifier(model, part, most=options.most, seed=options.seed, foreign=options.foreign)

    def examples(self, part: str, models: Mapping[str, nn.Module]) -> Examples:
        if self.has_data:
            chosen = self.data.parts[part]
            indices = spread(chosen, EXAMPLES)
        elif part in self._examples:
            chosen = self._examples[part]
            indices = torch.arange(len(chosen))
        else:
            return Examples()
        return Examples(single=read_examples(self.data, chosen, indices, models))

    def open_foreign(self, folder: Path, part: str) -> Part:
        return open_foreign(folder, self.data, part).to(self._device)


def _diversity(part: Part, indices: Tensor, attention: Any, sentences: Any) -> dict[str, float]:
    """Measure how much the heads differ on some items; for sentence pairs, take the mean over both sentences."""
    views = list(zip(_as_tuple(attention), _as_tuple(sentences), strict=True))
    result: dict[str, float] = {}
    if views[0][0].shape[1] > 1:
        for weights, rows in views:  # [B, M, T], [B, M, D]
            values = {
                "dist": metrics.dist(rows),
                "relative_dist": metrics.relative_dist(rows),
                "overlap": metrics.overlap(weights),
                "overlap_cosine": metrics.overlap(weights, "cosine"),
            }
            for name, value in values.items():
                result[name] = result.get(name, 0.0) + float(value) / len(views)
    if part.evidence is not None:
        weights = views[0][0]
        evidence = part.evidence_mask(indices.cpu(), weights.shape[-1]).to(weights.device)  # [B, K, T]
        result["coverage"] = float(metrics.evidence_coverage(weights, evidence))
    return result


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
