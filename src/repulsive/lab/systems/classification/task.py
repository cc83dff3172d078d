"""Sentence classification: the self-attentive classifier of Lin et al. (2017), the paper's first system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError, DataError
from repulsive.lab.engine.data import Data
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Forward, Inputs
from repulsive.lab.systems.classification.model import PairClassifier, SelfAttentiveConfig, SentenceClassifier
from repulsive.lab.text.batches import Batch, Buckets
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.metrics import classification as metrics
from repulsive.regularizers import frobenius

_EVALUATED_AT_ONCE = 256


@dataclass(frozen=True)
class Model:
    """Sizes of the model; vocabulary and classes come from the data.

    Args:
        embedding: size of a word vector; 0: as the prepared vectors have it, or 300.
        units: LSTM units in each direction.
        hidden: inner units of the attention, d_a.
        heads: attention heads, M.
        own_hidden: an inner layer for every head.
        mlp: units of the ReLU layer.
        dropout: around it.
        gate: of pairs.
    """

    embedding: int = 0
    units: int = 300
    hidden: int = 350
    heads: int = 30
    own_hidden: bool = False
    mlp: int = 2000
    dropout: float = 0.5
    gate: int = 600

    def __post_init__(self) -> None:
        for name in ("units", "hidden", "heads", "mlp", "gate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.embedding < 0:
            raise ValueError(f"embedding={self.embedding} must not be negative")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Classification(Recipe):
    """A recipe for classification.

    Args:
        data: what to train on.
        model: sizes.
    """

    data: Data
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.training.compile:
            raise ValueError("training.compile=true: batches of classification have many shapes; leave it out")


class ClassificationTask:
    """Sentences, or pairs of them, and their classes."""

    select_by = "accuracy"
    shown = ("accuracy", "nll", "relative_dist", "overlap")

    def __init__(self, recipe: Classification) -> None:
        self.recipe = recipe
        self.data = Prepared.load(recipe.data.folder)
        if len(self.data.classes) < 2 or len(self.data.parts["train"].labels.unique()) < 2:
            told = "all training texts are of one class; a classifier needs at least two"
            raise DataError(f"{recipe.data.folder}: {told}")
        width, vectors = recipe.model.embedding, self.data.vectors
        if vectors is not None and width not in (0, vectors.shape[1]):
            raise ConfigError(
                f"model.embedding={width}: the vectors in {recipe.data.folder} have {vectors.shape[1]} numbers each; "
                "leave it out, or prepare the data without vectors"
            )
        self.parts: dict[str, Part] = dict(self.data.parts)
        train = self.parts["train"]
        self.num_data = max(1, round(len(train) * recipe.data.share))
        self._buckets = Buckets(train.lengths[: self.num_data], recipe.training.batch, recipe.seed)
        self._device = torch.device("cpu")

    @property
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 of the prepared files."""
        found: Mapping[str, str] = self.data.manifest["files"]
        return found

    @property
    def is_pairs(self) -> bool:
        return len(self.parts["train"].sentences) == 2

    def model(self) -> nn.Module:
        sizes, vectors = self.recipe.model, self.data.vectors
        config = SelfAttentiveConfig(
            vocabulary=len(self.data.vocabulary),
            classes=len(self.data.classes),
            embedding=sizes.embedding or (300 if vectors is None else vectors.shape[1]),
            units=sizes.units,
            hidden=sizes.hidden,
            heads=sizes.heads,
            own_hidden=sizes.own_hidden,
            mlp=sizes.mlp,
            dropout=sizes.dropout,
            gate=sizes.gate,
        )
        return (PairClassifier if self.is_pairs else SentenceClassifier)(config, vectors)

    def to(self, device: torch.device) -> None:
        """All sentences fit on the device, so a batch travels as its indices."""
        self._device = device
        self.parts = {name: part.to(device) for name, part in self.parts.items()}

    def order(self, epoch: int) -> list[Batch]:
        return list(self._buckets.epoch(epoch))

    def fetch(self, batch: Batch) -> Inputs:
        return {"indices": batch.indices}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        part, indices = self.parts["train"], inputs["indices"]
        penalty = self.recipe.method.penalty
        logits, *seen = _as_tuple(model(*model_inputs(part, indices, length), collect=penalty > 0))
        loss = F.cross_entropy(logits.float(), part.labels[indices])
        if penalty > 0:
            attention = seen[0] if isinstance(seen[0], tuple) else (seen[0],)
            loss = loss + penalty * torch.stack([frobenius(a.float()) for a in attention]).mean()
        return loss

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        chosen = self.parts[part]
        logits = torch.empty(len(chosen), len(self.data.classes), device=self._device)
        heads: dict[str, float] = {}
        for batch in Buckets(chosen.lengths.cpu(), _EVALUATED_AT_ONCE).in_order():
            indices = batch.indices.to(self._device)
            answers, attention, sentences = model(*model_inputs(chosen, indices, batch.length), collect=True)
            logits[indices] = answers.float()
            for name, value in _diversity(chosen, indices, attention, sentences).items():
                heads[name] = heads.get(name, 0.0) + value * len(batch) / len(chosen)
        labels = chosen.labels.cpu()
        logits = logits.cpu()
        found = metrics.scores(logits, labels)
        items = {
            "logits": logits,
            "labels": labels,
            "correct": logits.argmax(-1) == labels,
            "nll": F.cross_entropy(logits.double(), labels, reduction="none"),
        }
        return Evaluation(found | heads, items)


def model_inputs(part: Part, indices: Tensor, length: int) -> list[Tensor]:
    """What the model's forward takes: tables of words, then their lengths."""
    tables = [sentences.padded(indices, length) for sentences in part.sentences]
    return [table for table, _ in tables] + [lengths for _, lengths in tables]


def _diversity(part: Part, indices: Tensor, attention: Any, sentences: Any) -> dict[str, float]:
    """How different the heads are on some items; of pairs, the mean over both sentences."""
    views = list(zip(_as_tuple(attention), _as_tuple(sentences), strict=True))
    found: dict[str, float] = {}
    if views[0][0].shape[1] > 1:
        for seen, rows in views:
            values = {
                "dist": metrics.dist(rows),
                "relative_dist": metrics.relative_dist(rows),
                "overlap": metrics.overlap(seen),
                "overlap_cosine": metrics.overlap(seen, "cosine"),
            }
            for name, value in values.items():
                found[name] = found.get(name, 0.0) + float(value) / len(views)
    if part.evidence is not None:
        seen = views[0][0]
        evidence = part.evidence_mask(indices.cpu(), seen.shape[-1]).to(seen.device)  # [B, K, T]
        found["coverage"] = float(metrics.evidence_coverage(seen, evidence))
    return found


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
