"""Pre-training of ELECTRA (Clark et al., 2020), the paper's third system, or of BERT's objective at the same sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from repulsive.errors import ConfigError
from repulsive.lab.engine.assets import DATA, data_json, read_data_json
from repulsive.lab.engine.data import Data as PreparedData
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.task import Evaluation, Forward, Inputs, Task
from repulsive.lab.systems.electra.batches import BlockBatch, BlockBatches
from repulsive.lab.systems.electra.blocks import Blocks, marks_of
from repulsive.lab.systems.electra.loss import draw_masks, losses, means_of, total_loss
from repulsive.lab.systems.electra.masking import Masked, places_of
from repulsive.lab.systems.electra.model import (
    Electra,
    ElectraConfig,
    ElectraSizes,
    MaskedModel,
    keep_narrow,
    make_electra,
    make_masked,
    open_electra,
    open_masked,
)
from repulsive.lab.text.folders import digest
from repulsive.lab.text.wordpiece import FILE as VOCABULARY
from repulsive.lab.text.wordpiece import WordPieces
from repulsive.metrics.auc import auc

_COMPILED = (  # modules to compile, if training.compile
    "ElectraLayer",
    "BertLayer",
    "ElectraGeneratorPredictions",
    "ElectraDiscriminatorPredictions",
    "Sampler",
)
_EVALUATION_BATCH = 128
_EVALUATION_SEED = 20_200_323  # random seed of masks and samples, the same for all runs
_ON_DEVICE = 8 << 30  # maximum bytes of blocks to move to the device; larger data splits stay memory-mapped


@dataclass(frozen=True)
class Data(PreparedData):
    """Prepared data to train on.

    Args:
        folder: what `repulsive prepare pretrain` wrote.
        share: fraction of the training blocks to use, from the first on; for quick trials.
        steps: batches per epoch; 0: one pass over the data.
    """

    steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must not be negative")


@dataclass(frozen=True)
class Model(ElectraSizes):
    """Sizes of the model; the vocabulary comes from the data.

    Args:
        start: folder with initial weights, written by `save_pretrained` or `repulsive export`; its sizes override
            these.
    """

    start: str = ""

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.feed_forward, self.embedding) < 1:
            raise ValueError("layers, width, heads, feed_forward and embedding must be at least 1")
        if not 0 < self.generator <= 1 or not 0 <= self.dropout < 1:
            raise ValueError(f"generator={self.generator} must lie between 0 and 1, and dropout={self.dropout} below 1")
        for share in (1.0, self.generator):
            width, heads = int(self.width * share), max(1, int(self.heads * share))
            if not width or width % heads:
                raise ValueError(f"width={width} does not divide into heads={heads}")


@dataclass(frozen=True)
class Loss:
    """The loss: NLL of the generator + `discriminator` times that of the discriminator.

    Args:
        discriminator: weight of the discriminator's loss.
        masked: fraction of the pieces to predict.
        kept: fraction of the predicted pieces that are left unchanged; the others are masked.
    """

    discriminator: float = 50.0
    masked: float = 0.15
    kept: float = 0.15

    def __post_init__(self) -> None:
        if self.discriminator <= 0 or not 0 < self.masked < 0.9 or not 0 <= self.kept < 1:
            raise ValueError("discriminator must be positive, masked lie between 0 and 0.9, and kept between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Pretraining(Recipe):
    """Recipe for pre-training ELECTRA, or BERT at the same size.

    Args:
        data: prepared data.
        objective: "electra", or "bert": masked language modelling with the discriminator's network.
        model: sizes of the model.
        loss: settings of the loss.
    """

    data: Data
    objective: Literal["electra", "bert"] = "electra"
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method.penalty:
            raise ValueError(f"method.penalty={self.method.penalty}: pre-training has no regularizer; leave it out")


class PretrainingTask(Task):
    """Pre-training task: the generator predicts masked word pieces, and the discriminator detects replaced ones.

    Args:
        recipe: recipe of the run.
        data: blocks without data splits, as `restore` makes them; None: read the recipe's folder.
    """

    select_by = "log_likelihood"

    def __init__(self, recipe: Pretraining, data: Blocks | None = None) -> None:
        self.recipe = recipe
        self.data = Blocks.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.shown = ("accuracy", "auc", "generator_nll") if recipe.objective == "electra" else ("accuracy", "nll")
        self.marks = marks_of(self.data.pieces)
        self.parts: dict[str, Tensor] = dict(self.data.parts)
        self._device = torch.device("cpu")
        if self.has_data:
            self._plan_batches()

    def _plan_batches(self) -> None:
        recipe, train, batch = self.recipe, self.parts["train"], self.recipe.training.batch
        self.blocks = max(1, round(len(train) * recipe.data.share))
        self._on_device = train[: self.blocks].numel() * 2 <= _ON_DEVICE
        ends = train[: self.blocks, -1].clone() if self.data.padded else None  # int16 [N]
        self._batches = BlockBatches(
            self.blocks, self.data.length, batch, recipe.seed, ends, recipe.loss.masked, recipe.data.steps
        )
        # Counted in word pieces, because the loss is a mean over word pieces.
        self.num_data = self.blocks * self.data.length if ends is None else int(ends.sum())
        checksums = dict(self.data.manifest["files"])
        if start := recipe.model.start:
            paths = sorted(path for path in Path(start).rglob("*") if path.is_file())
            checksums |= {f"start/{path.relative_to(start).as_posix()}": digest(path) for path in paths}
        self.checksums = checksums
        compiled = recipe.training.compile  # fuses dozens of small operations
        self._draw_masks: Any = torch.compile(draw_masks, dynamic=False) if compiled else draw_masks
        self._total_loss: Any = torch.compile(total_loss, dynamic=False) if compiled else total_loss

    def model(self) -> Electra | MaskedModel:
        model = self.plain_model()
        keep_narrow(model)
        if self.recipe.training.compile:
            for module in model.modules():
                if type(module).__name__ in _COMPILED:
                    module.compile(dynamic=False)
        return model

    def plain_model(self) -> Electra | MaskedModel:
        """Make the model with unmodified modules of the package transformers."""
        model = self._model()
        first = model.discriminator if isinstance(model, Electra) else model.network
        known, here = first.config, len(self.data.pieces.pieces)  # type: ignore[union-attr]
        if known.vocab_size != here:  # type: ignore[union-attr]
            raise ConfigError(f"model.start: has {known.vocab_size} pieces, and {self.data.folder} {here}")  # type: ignore[union-attr]
        if known.max_position_embeddings < self.data.length:  # type: ignore[union-attr, operator]
            raise ConfigError(f"model.start: has {known.max_position_embeddings} positions; prepare shorter blocks")  # type: ignore[union-attr]
        return model

    def _model(self) -> Electra | MaskedModel:
        settings, electra = self.recipe.model, self.recipe.objective == "electra"
        if start := settings.start:
            return open_electra(Path(start), settings.generator) if electra else open_masked(Path(start))
        sizes = {field.name: getattr(settings, field.name) for field in fields(ElectraSizes)}
        config = ElectraConfig(len(self.data.pieces.pieces), self.marks["PAD"], **sizes)
        return make_electra(config) if electra else make_masked(config)

    def repelled(self, model: nn.Module) -> nn.Module:
        """Return the discriminator, whose heads repel; the generator is discarded after pre-training."""
        return model.discriminator if isinstance(model, Electra) else model

    def to(self, device: torch.device) -> None:
        """Move blocks to the device if they fit, so that a batch copies only its indices there."""
        self._device = device
        self.parts = {name: x if name == "train" else x.to(device) for name, x in self.parts.items()}
        if self.has_data and self._on_device:
            self.parts["train"] = self.parts["train"][: self.blocks].to(device)

    def order(self, epoch: int) -> Sequence[BlockBatch]:
        if self.blocks < (batch := self.recipe.training.batch):  # no error where a model is only evaluated
            folder = self.recipe.data.folder
            raise ConfigError(f"training.batch={batch}: {folder} has {self.blocks} blocks to train on; lower it")
        return self._batches.epoch(epoch)

    def fetch(self, batch: BlockBatch) -> Inputs:
        means = {"means": batch.means} if batch.means is not None else {}
        if self._on_device:
            return {"indices": batch.indices, **means}
        rows = self.parts["train"][batch.indices]
        return {"rows": rows.pin_memory() if self._device.type == "cuda" else rows, **means}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Compute the loss: sums over the batch, divided by its numbers of word pieces and of masked positions.

        Written as a mean over blocks of sum / mean number, so that means over ranks can be weighted by blocks.
        """
        rows = inputs["rows"] if "rows" in inputs else self.parts["train"][inputs["indices"]]
        tokens, types, seen, masked = self._masked(rows, length)
        predictions = self._predict(model, tokens, types, seen, masked)
        pieces, places = self._means(inputs, length)
        loss: Tensor = self._total_loss(
            *predictions,
            tokens,
            masked.answers,
            masked.counts,
            seen,
            len(rows) * places,
            len(rows) * pieces,
            self.recipe.loss.discriminator,
        )
        return loss

    def _means(self, inputs: Inputs, length: int) -> tuple[Any, Any]:
        if "means" in inputs:
            return inputs["means"][0], inputs["means"][1]
        return length, int(places_of(torch.tensor(length), length, self.recipe.loss.masked))

    def _masked(
        self, rows: Tensor, length: int, draw: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Masked]:
        """Return tokens, segment ids, the padding mask (None: no padding), and the masked blocks."""
        loss = self.recipe.loss
        make = self._draw_masks if draw is None else draw_masks  # a compiled function cannot take a generator
        tokens, types, seen, masked = make(rows, length, self.data.padded, self.marks, loss.masked, loss.kept, draw)
        return tokens, types, seen, Masked(*masked)

    def _predict(
        self, model: Forward, tokens: Tensor, types: Tensor, seen: Tensor | None, masked: Masked, draw: Any = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return generator logits, tokens with its samples, and logits of "replaced"; the last two may be None."""
        if self.recipe.objective == "bert":
            return model(masked.tokens, types, masked.places, seen), None, None
        logits, corrupted, replaced = model(tokens, masked.tokens, types, masked.places, masked.first, seen, draw)
        return logits, corrupted, replaced

    def assets(self) -> dict[str, bytes]:
        described = data_json(self.data.manifest, length=self.data.length, padding=self.data.manifest["padding"])
        return {DATA: described, VOCABULARY: self.data.pieces.as_bytes()}

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        facts = read_data_json(assets)
        words = assets[VOCABULARY].decode().removesuffix("\n").split("\n")
        pieces = WordPieces(tuple(words), bool(facts["settings"]["lowercase"]))
        return cls(recipe, Blocks(recipe.data.folder, int(facts["length"]), pieces, {}, facts))

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        """Evaluate with the same masks for all models; the generator's samples differ."""
        # The last batch is smaller, and compiling for its shape is not worthwhile.
        with torch.compiler.set_stance("force_eager") if self.recipe.training.compile else nullcontext():
            return self._evaluate(model, part)

    def _evaluate(self, model: nn.Module, part: str) -> Evaluation:
        draw = torch.Generator(self._device).manual_seed(_EVALUATION_SEED)
        blocks, length = self.parts[part], self.data.length
        sums: dict[str, list[Tensor]] = {}
        scores, labels = [], []
        for start in range(0, len(blocks), _EVALUATION_BATCH):
            rows = blocks[start : start + _EVALUATION_BATCH].to(self._device)
            tokens, types, seen, masked = self._masked(rows, length, draw)
            logits, corrupted, replaced = self._predict(model, tokens, types, seen, masked, draw)
            nll, detection = losses(logits, corrupted, replaced, tokens, masked.answers)
            right = (logits.argmax(-1) == masked.answers) * masked.counts
            values = {"nll": nll * masked.counts, "correct": right, "count": masked.counts}
            if corrupted is not None and replaced is not None and detection is not None:
                real = seen.flatten(1) if seen is not None else torch.ones_like(tokens, dtype=torch.bool)  # [B, T]
                changed = corrupted != tokens
                values = {f"generator_{name}": x for name, x in values.items()}
                values |= {"nll": detection * real, "correct": ((replaced > 0) == changed) & real, "count": real}
                scores.append(replaced[real].float())
                labels.append(changed[real])
            for name, x in values.items():
                sums.setdefault(name, []).append(x.double().sum(1))
        totals = {name: torch.cat(some).cpu() for name, some in sums.items()}  # [N] each
        metrics = means_of(totals)
        metrics["loss"] = metrics["nll"]
        if scores:
            logits, changed = torch.cat(scores), torch.cat(labels)
            metrics["loss"] = metrics["generator_nll"] + self.recipe.loss.discriminator * metrics["nll"]
            metrics["auc"] = auc(logits, changed)
            metrics["replaced"] = float(changed.double().mean())
            metrics["found"] = float((logits[changed] > 0).double().mean())
        metrics["log_likelihood"] = -metrics["loss"]
        mean = totals["count"].mean()
        items = {name: totals[name] / mean for name in ("nll", "correct")} | {"labels": totals["count"].long()}
        return Evaluation(metrics, items)
