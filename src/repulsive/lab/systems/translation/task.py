"""Machine translation with the Transformer (Vaswani et al., 2017), the paper's second system."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import DataError
from repulsive.lab.engine import assets as run_assets
from repulsive.lab.engine.data import Data
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.reporting import EXAMPLES, Examples, Measured, ReportOptions
from repulsive.lab.engine.task import DeviceTask, Evaluation, Forward, Inputs
from repulsive.lab.layers.packed import Packed
from repulsive.lab.systems.translation import metrics
from repulsive.lab.systems.translation.batches import Pack, TokenBatch, TokenBuckets, TokenPacks
from repulsive.lab.systems.translation.measure import bleu_of, layered_examples, measure_translator
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.lab.systems.translation.pair_tensors import packed_pairs, padded_pairs
from repulsive.lab.systems.translation.prepare import REFERENCES
from repulsive.lab.systems.translation.translate import Search, translate
from repulsive.lab.text.folders import content_errors
from repulsive.lab.text.pieces import FILE as PIECES
from repulsive.lab.text.pieces import Pieces
from repulsive.lab.text.prefetch import Prefetch
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import PAD
from repulsive.regularizers import on_outputs, on_positions, on_subspaces

_PENALTIES: dict[str, Any] = {
    "outputs": ("outputs", on_outputs),
    "subspaces": ("values", on_subspaces),
    "positions": ("weights", on_positions),
}  # tensors that the model collects, and the penalty on them


@dataclass(frozen=True)
class Model:
    """Sizes of the Transformer; the vocabulary comes from the data. The defaults are the paper's for IWSLT14.

    Args:
        width: size of a token's state.
        heads: heads of every attention.
        depth: layers of the encoder and of the decoder.
        feed_forward: hidden units of the feed-forward blocks.
        dropout: dropout probability on embeddings and on the output of every block.
        pre_norm: normalise before a block; false, as in the paper, after it.
    """

    width: int = 512
    heads: int = 4
    depth: tuple[int, int] = (6, 6)
    feed_forward: int = 1024
    dropout: float = 0.3
    pre_norm: bool = False

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.feed_forward, *self.depth) < 1:
            raise ValueError("width, heads, feed_forward and depth must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")
        TransformerConfig(4, self.width, self.heads)  # raises if the heads do not divide the width


@dataclass(frozen=True)
class Loss:
    """Settings of the translation loss.

    Args:
        label_smoothing: probability that is spread over all pieces.
        penalty_on: what `method.penalty` pushes apart: outputs of heads (the paper's "+ R"), subspaces of their values,
            or positions they attend to; the mean over all attentions.
    """

    label_smoothing: float = 0.1
    penalty_on: Literal["outputs", "subspaces", "positions"] = "outputs"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Translation(Recipe):
    """Recipe for training a translator.

    Args:
        data: prepared data.
        packed: pack the sentences of a batch end to end instead of padding them; `training.batch` is then the number of
            rows of the source and of the target. For GPUs; other devices pad internally.
        model: sizes of the model.
        loss: settings of the loss.
        search: beam search settings.
    """

    data: Data
    packed: bool = False
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packed and self.method.penalty > 0 and self.loss.penalty_on == "positions":
            raise ValueError("packed=true: packed sentences have no positions to penalise; set packed=false")
        if self.training.compile and not self.packed:
            raise ValueError("training.compile=true: only packed sentences have one shape; set packed=true")


class TranslationTask(DeviceTask):
    """Translation task: sentences and their translations.

    Args:
        recipe: recipe of the run.
        data: prepared data without data splits, as `restore` makes them; None: read the recipe's folder.
        examples: a few sentence pairs of each data split, if `data` has no splits.
    """

    select_by = "log_likelihood"  # minus the NLL of a token: higher is better
    shown = ("bleu", "nll", "accuracy")
    has_bleu = True

    def __init__(
        self, recipe: Translation, data: Prepared | None = None, examples: Mapping[str, Part] | None = None
    ) -> None:
        self.recipe = recipe
        self.data = Prepared.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.dataset = self.data.task
        self.checksums: Mapping[str, str] = self.data.manifest["files"]
        self.pieces = Pieces.of(self.data)
        self.parts: dict[str, Part] = dict(self.data.parts)
        self.references: dict[str, dict[str, list[str]]] = {}
        self._examples = examples or {}
        if self.has_data:
            metrics.check_installed()  # BLEU is computed at the end; fail before training, not after
            self._can_detokenize = self._has_tokenizer()
            with content_errors(self.data.folder):
                self.references = json.loads(self.data.extra[REFERENCES])
            self.scored_parts = tuple(self.references)  # dev, test and the further test sets
            self._plan_batches()

    def _plan_batches(self) -> None:
        recipe, train = self.recipe, self.parts["train"]
        kept = max(1, round(len(train) * recipe.data.share))
        source, target = (side.lengths[:kept] for side in train.sentences)
        self.num_data = int(target.sum())  # in target tokens, because the loss is a mean over target tokens
        make = TokenPacks if recipe.packed else TokenBuckets
        self._batches = make(source, target, recipe.training.batch, recipe.seed)
        self._longest = int(torch.maximum(source, target).max())
        self._prefetch = Prefetch(lambda epoch: list(self._batches.epoch(epoch)))
        self._cross_entropy = (
            torch.compile(_cross_entropy, dynamic=False) if recipe.training.compile else _cross_entropy
        )

    def model(self) -> Transformer:
        sizes = self.recipe.model
        config = TransformerConfig(
            len(self.data.vocabulary),
            sizes.width,
            sizes.heads,
            sizes.depth,
            sizes.feed_forward,
            sizes.dropout,
            sizes.pre_norm,
            PAD,
        )
        model = Transformer(config)
        if self.recipe.training.compile:
            model.compile_layers()
        return model

    def order(self, epoch: int) -> list[TokenBatch]:
        return self._prefetch(epoch)

    def fetch(self, batch: TokenBatch) -> Inputs:
        inputs = {"indices": batch.indices, "tokens": torch.tensor(batch.tokens)}
        if isinstance(batch, Pack):  # padded, so that all packs have one shape
            inputs["indices"] = F.pad(batch.indices, (0, batch.most - len(batch)))
            inputs["count"] = torch.tensor(len(batch))
        return inputs

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Compute the mean loss per target token, written as a mean over pairs of (sum / mean number of tokens)."""
        train, indices = self.parts["train"], inputs["indices"]
        count = inputs.get("count", len(indices))
        packed: tuple[Packed, Packed] | None = None
        if isinstance(count, Tensor):
            source, before, target, packed = packed_pairs(train, indices, count, length, self._longest)
        else:
            source, before, target = padded_pairs(train, indices, length)
        loss, penalty = self.recipe.loss, self.recipe.method.penalty
        collect, penalise = _PENALTIES[loss.penalty_on]
        output = model(source, before, collect=collect if penalty > 0 else None, packed=packed)
        logits, collected = output if penalty > 0 else (output, [])
        total = self._cross_entropy(logits.flatten(0, -2), target.flatten(), loss.label_smoothing)
        mean = total / (count * inputs["tokens"])
        if penalty > 0:
            masks = source != PAD, target != PAD
            if packed is not None:  # packed sentences are collected as one sentence
                masks = masks[0].unsqueeze(0), masks[1].unsqueeze(0)
            real = _masks(loss.penalty_on, self.recipe.model.depth, *masks)
            terms = [penalise(x.float(), mask) for x, mask in zip(collected, real, strict=True)]
            mean = mean + penalty * torch.stack(terms).mean()
        return mean

    def validate(self, model: nn.Module) -> Evaluation:
        """Evaluate the likelihood of the development set, without translating it."""
        return self._likelihood(model, "dev")

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        likelihood = self._likelihood(model, part)
        if part not in self.references:  # the training set: too large to translate
            return likelihood
        assert isinstance(model, Transformer)
        best = [nbest[0] for nbest in translate(model, self.parts[part].sentences[0], self.recipe.search)]
        words = [self.pieces.words(hypothesis.tokens) for hypothesis in best]
        references, scores = self.references[part], {}
        scores["bleu"] = metrics.paper_bleu(words, references["words"])
        if self.pieces.tokenizer == "none":  # the data were tokenised elsewhere: there are no plain texts
            scores["chrf"] = metrics.chrf(words, references["words"], lowercase=self.pieces.lowercase)
        elif self._can_detokenize:
            texts = [self.pieces.text(line) for line in words]
            for name, score in (("sacrebleu", metrics.sacrebleu), ("chrf", metrics.chrf)):
                scores[name] = score(texts, references["text"], lowercase=self.pieces.lowercase)
        items = {
            "bleu_statistics": metrics.statistics(words, references["words"]),
            "hypotheses": nn.utils.rnn.pad_sequence(
                [torch.tensor(hypothesis.tokens, dtype=torch.int32) for hypothesis in best], True, PAD
            ),
        }
        values = {name: score.value for name, score in scores.items()}
        notes = {name: score.signature for name, score in scores.items()}
        return Evaluation(values | likelihood.metrics, likelihood.items | items, notes)

    def assets(self) -> dict[str, bytes]:
        chosen = {name: self.data.parts[name] for name in self.scored_parts}
        examples = {
            name: run_assets.select(part, run_assets.middle_length(part, EXAMPLES)) for name, part in chosen.items()
        }
        return run_assets.save_prepared(self.data, examples, extra=(PIECES,))

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        return cls(recipe, *run_assets.restore_prepared(assets, recipe.data.folder))

    def facts(self) -> list[tuple[str, str]]:
        return run_assets.data_facts(self.data)

    def measure_heads(self, model: nn.Module, options: ReportOptions) -> Measured:
        if not self.has_data:
            return super().measure_heads(model, options)
        part, bleu = self.parts[options.part], None
        if options.bleu:
            references = self.references[options.part]["words"][: options.most]
            bleu = bleu_of(part.sentences[0], references, self.pieces, self.recipe.search)
        return measure_translator(model, part, most=options.most, bleu=bleu, progress=options.progress)

    def examples(self, part: str, models: Mapping[str, nn.Module]) -> Examples:
        if self.has_data:
            chosen = self.data.parts[part]
            indices = run_assets.middle_length(chosen, EXAMPLES)
        elif part in self._examples:
            chosen = self._examples[part]
            indices = torch.arange(len(chosen))
        else:
            return Examples()
        return Examples(layered=layered_examples(chosen, self.data.vocabulary.words, indices, models))

    def _has_tokenizer(self) -> bool:
        """Whether words can be detokenised; warns before training if not."""
        try:
            self.pieces.split("target")
        except DataError as error:
            warnings.warn(f"no sacreBLEU and chrF, only BLEU of words: {error}", stacklevel=3)
            return False
        return True

    def _likelihood(self, model: nn.Module, part: str) -> Evaluation:
        """Evaluate NLL and accuracy of each piece given the previous ones; items are scaled to give piece means."""
        chosen = self.parts[part]
        source, target = (side.lengths.cpu() for side in chosen.sentences)
        nll = torch.empty(len(chosen), dtype=torch.float64, device=self._device)
        correct = torch.empty_like(nll)
        for batch in TokenBuckets(source, target, self.recipe.search.at_once).in_order():
            indices = batch.indices.to(self._device)
            sources, before, after = padded_pairs(chosen, indices, batch.length)
            logits = model(sources, before).float()  # [B, T, V]
            losses = F.cross_entropy(logits.mT, after, ignore_index=PAD, reduction="none")  # [B, T]
            nll[indices] = losses.double().sum(1)
            correct[indices] = ((logits.argmax(-1) == after) & (after != PAD)).double().sum(1)
        tokens = target.double().mean()
        items = {"nll": nll.cpu() / tokens, "correct": correct.cpu() / tokens, "labels": target}
        mean = float(items["nll"].mean())
        values = {"nll": mean, "accuracy": float(items["correct"].mean()), "log_likelihood": -mean}
        return Evaluation(values | {"perplexity": math.exp(min(mean, 700.0))}, items)


def _cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    """Compute the cross-entropy, summed over tokens: [N, V], [N] -> []."""
    return F.cross_entropy(logits.float(), target, ignore_index=PAD, label_smoothing=label_smoothing, reduction="sum")


def _masks(kind: str, layers: tuple[int, int], source: Tensor, target: Tensor) -> list[Tensor]:
    """Make the padding mask of each collected tensor: of its queries or, for subspaces, of its keys and values."""
    cross = source if kind == "subspaces" else target
    return [source] * layers[0] + [target, cross] * layers[1]
