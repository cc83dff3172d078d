"""Language modelling with a decoder-only Transformer: predict the next byte or word piece."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError
from repulsive.lab.engine.assets import DATA, data_json, read_data_json
from repulsive.lab.engine.data import Data as PreparedData
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.reporting import Measured, ReportOptions, measure_ablations
from repulsive.lab.engine.task import DeviceTask, Evaluation, Forward, Inputs
from repulsive.lab.systems.lm.data import Text, numbers
from repulsive.lab.systems.lm.model import Decoder, DecoderConfig, DecoderSizes
from repulsive.lab.text.batches import Batch, shuffler
from repulsive.lab.text.wordpiece import FILE as VOCABULARY

_EVALUATION_BATCH = 64  # windows
_IGNORED = -100  # ignore_index of cross_entropy


@dataclass(frozen=True)
class Data(PreparedData):
    """Prepared data to train on.

    Args:
        folder: what `repulsive prepare lm` wrote.
        share: fraction of the training text to use, from its beginning; for quick trials.
        length: tokens of a sequence.
        steps: batches per epoch.
    """

    length: int = 512
    steps: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.length, self.steps) < 1:
            raise ValueError("length and steps must be at least 1")


@dataclass(frozen=True)
class Model(DecoderSizes):
    """Sizes of the decoder; the vocabulary comes from the data."""

    def __post_init__(self) -> None:
        self.decoder(vocabulary=1, length=1)  # raises if the sizes do not fit together

    def decoder(self, vocabulary: int, length: int) -> DecoderConfig:
        """Return the configuration of the decoder."""
        return DecoderConfig(vocabulary, length, **asdict(self))


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Recipe):
    """Recipe for training a language model.

    Args:
        data: prepared data.
        model: sizes of the model.
    """

    data: Data
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method.penalty:
            raise ValueError(f"method.penalty={self.method.penalty}: language models have no regularizer; leave it out")


class LanguageModelTask(DeviceTask):
    """Language-modelling task: in windows of a text, predict each token but the first from the tokens before it.

    Args:
        recipe: recipe of the run.
        data: text without data splits, as `restore` makes it; None: read the recipe's folder.
    """

    select_by = "log_likelihood"  # minus nats per byte: higher is better
    shown = ("nats_per_byte", "accuracy")

    def __init__(self, recipe: LanguageModel, data: Text | None = None) -> None:
        self.recipe = recipe
        self.data = Text.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.checksums: Mapping[str, str] = self.data.manifest["files"]
        self.parts: dict[str, Tensor] = dict(self.data.parts)
        compiled = recipe.training.compile
        self._cross_entropy = torch.compile(_cross_entropy, dynamic=False) if compiled else _cross_entropy
        if self.has_data:
            self._plan_windows()

    def _plan_windows(self) -> None:
        recipe = self.recipe
        kept = max(1, round(len(self.parts["train"]) * recipe.data.share))
        self.parts["train"] = self.parts["train"][:kept]
        self.num_data = kept  # in tokens, because the loss is a mean over tokens
        self._windows = kept - recipe.data.length  # number of possible window starts

    def model(self) -> Decoder:
        model = Decoder(self.recipe.model.decoder(self.data.vocabulary, self.recipe.data.length))
        if self.recipe.training.compile:
            model.compile_layers()
        return model

    def order(self, epoch: int) -> list[Batch]:
        if self._windows < 1:  # no error where a model is only evaluated
            what = f"{self.recipe.data.folder} has {self.num_data:,} tokens to train on"
            raise ConfigError(f"data.length={self.recipe.data.length}: {what}; take shorter sequences or more text")
        steps = self.recipe.data.steps
        return [self._batch(step) for step in range(epoch * steps, (epoch + 1) * steps)]

    def _batch(self, step: int) -> Batch:
        """Draw random starts of windows, which depend on the seed and the step only."""
        draw = shuffler(self.recipe.seed, step)
        starts = torch.randint(self._windows, (self.recipe.training.batch,), generator=draw)  # [B]
        return Batch(starts, self.recipe.data.length)

    def fetch(self, batch: Batch) -> Inputs:
        return {"starts": batch.indices}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Compute the mean NLL per token, in nats."""
        places = inputs["starts"][:, None] + torch.arange(length + 1, device=inputs["starts"].device)  # [B, T + 1]
        window = numbers(self.parts["train"][places])
        losses: Tensor = self._cross_entropy(model(window[:, :-1]), window[:, 1:])  # [B, T]
        return losses.mean()

    def assets(self) -> dict[str, bytes]:
        pieces = self.data.pieces
        files = {DATA: data_json(self.data.manifest, vocabulary=self.data.vocabulary)}
        return files if pieces is None else files | {VOCABULARY: pieces.as_bytes()}

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        facts = read_data_json(assets)
        return cls(recipe, Text(recipe.data.folder, int(facts["vocabulary"]), {}, {}, facts))

    def measure_heads(self, model: nn.Module, options: ReportOptions) -> Measured:
        if not self.has_data:
            return super().measure_heads(model, options)
        return measure_ablations(model, lambda it: self.validate(it).items["correct"], options.progress)

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        """Evaluate all tokens of a data split but the first, in consecutive windows; an item is a window."""
        # The last batch is smaller, and compiling for its shape is not worthwhile.
        with torch.compiler.set_stance("force_eager") if self.recipe.training.compile else nullcontext():
            nll, correct, counts = self._sums(model, self.parts[part], self.recipe.data.length)
        mean = counts.double().mean()
        items = {"nll": nll / mean, "correct": correct / mean, "labels": counts}
        per_token = float(items["nll"].mean())
        per_byte = per_token * self.data.tokens_per_byte(part)
        metrics = {"nats_per_byte": per_byte, "nll": per_token, "accuracy": float(items["correct"].mean())}
        return Evaluation(metrics | {"log_likelihood": -per_byte}, items)

    def _sums(self, model: nn.Module, tokens: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute for each window its NLL, the number of correct tokens and the number of tokens, [N] each."""
        batches: list[Tensor] = []
        last = len(tokens) - 1
        for starts in torch.arange(0, last, length, device=self._device).split(_EVALUATION_BATCH):
            places = starts[:, None] + torch.arange(length + 1, device=self._device)  # [B, T + 1]
            window = numbers(tokens[places.clamp(max=last)])
            target = window[:, 1:].masked_fill(places[:, 1:] > last, _IGNORED)  # [B, T]
            logits = model(window[:, :-1]).float()  # [B, T, V]
            sums = _cross_entropy(logits, target), logits.argmax(-1) == target, target != _IGNORED
            batches.append(torch.stack([x.double().sum(1) for x in sums]).cpu())  # [3, B]
        nll, correct, counts = torch.cat(batches, 1)
        return nll, correct, counts.long()


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the NLL of every token, 0 for ignored tokens: [B, T, V], [B, T] -> [B, T]."""
    flat = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=_IGNORED, reduction="none")
    return flat.view_as(target)
