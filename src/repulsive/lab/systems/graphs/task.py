"""Text generation from graphs with GraphWriter (Koncel-Kedziorski et al., 2019), the paper's fourth system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import DataError
from repulsive.lab.engine.assets import DATA, data_json, read_data_json
from repulsive.lab.engine.data import Data
from repulsive.lab.engine.recipe import Recipe
from repulsive.lab.engine.reporting import Measured, ReportOptions, measure_ablations
from repulsive.lab.engine.task import DeviceTask, Evaluation, Forward, Inputs
from repulsive.lab.layers.beam_search import Ends, SearchSettings
from repulsive.lab.systems.graphs.attention import GraphSizes
from repulsive.lab.systems.graphs.batches import GraphBatch, GraphBuckets, GraphTables, Shape, in_batches
from repulsive.lab.systems.graphs.metrics import bleu_statistics, score_texts
from repulsive.lab.systems.graphs.model import GraphWriter, GraphWriterConfig
from repulsive.lab.systems.graphs.prepared import WORD, GraphVocabularies, PreparedGraphs
from repulsive.lab.systems.graphs.search import write
from repulsive.lab.text.pieces import BOS, EOS, MARKS
from repulsive.lab.text.prefetch import Prefetch
from repulsive.lab.text.tokens import PAD
from repulsive.regularizers import cosine

ENDS = Ends(BOS, EOS)
VOCABULARIES = "vocabularies.json"


@dataclass(frozen=True)
class Model(GraphSizes):
    """Sizes of GraphWriter; vocabularies come from the data. The default sizes are those of the released code.

    In that code `detached` and `full_scale` are true.

    Args:
        attention: implementation of graph attention; "pyg" needs torch-geometric and, on a GPU, training.capture=false.
        lstm_layers: LSTM layers of the encoders of titles and entities.
        titles: read titles; false if the data have none.
    """

    attention: Literal["own", "pyg"] = "own"
    lstm_layers: int = 2
    titles: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config(4, 2, 3)

    def config(self, words: int, entity_words: int, relations: int) -> GraphWriterConfig:
        """Return the configuration of the model, given the sizes of the vocabularies."""
        return GraphWriterConfig(words, entity_words, relations, self, self.lstm_layers, self.titles)


@dataclass(frozen=True)
class Loss:
    """Terms of the loss besides the negative log-likelihood.

    Args:
        coverage: weight of the mean over entities of (1 - largest probability of copying the entity at any position)^2,
            an optional term of the released code.
    """

    coverage: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.coverage < float("inf"):
            raise ValueError(f"coverage={self.coverage} must not be negative")


@dataclass(frozen=True)
class Search(SearchSettings):
    """Beam search settings; `at_once` is the number of graphs in a batch."""

    beam: int = 4


@dataclass(frozen=True, kw_only=True)
class GraphWriting(Recipe):
    """Recipe for training GraphWriter to generate texts from graphs.

    Args:
        data: prepared data.
        model: sizes of the model.
        loss: terms of the loss.
        search: beam search settings.
    """

    data: Data
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    search: Search = field(default_factory=Search)


class GraphWritingTask(DeviceTask):
    """Graph-to-text task. A training item is a text about a graph; an evaluation item is a graph.

    Args:
        recipe: recipe of the run.
        data: graphs without data splits, as `restore` makes them; None: read the recipe's folder.
    """

    select_by = "log_likelihood"  # minus the NLL of a word: higher is better
    shown = ("bleu", "entity coverage", "nll", "accuracy")

    def __init__(self, recipe: GraphWriting, data: PreparedGraphs | None = None) -> None:
        self.recipe = recipe
        self.data = PreparedGraphs.load(recipe.data.folder) if data is None else data
        self.has_data = data is None
        self.checksums: Mapping[str, str] = self.data.manifest["files"]
        self.parts = {name: GraphTables.of(part) for name, part in self.data.parts.items()}
        self._sizes = {name: tables.sizes() for name, tables in self.parts.items()}
        self._graphs = {name: tables.graphs for name, tables in self.parts.items()}  # stay on the CPU
        self._lengths = {name: tables.targets.lengths for name, tables in self.parts.items()}
        if self.has_data:
            self._plan_batches()

    def _plan_batches(self) -> None:
        recipe, train = self.recipe, self.parts["train"]
        if recipe.model.titles and not len(train.titles.values):
            raise DataError(f"{self.data.folder}: its graphs have no titles; set model.titles=false")
        kept = max(1, round(len(train.targets) * recipe.data.share))
        lengths = train.targets.lengths[:kept]
        self.num_data = int(lengths.sum())  # in words, because the loss is a mean over words
        sizes = self._sizes["train"][train.graphs[:kept]]
        self._batches = GraphBuckets(lengths, sizes, recipe.training.batch, recipe.seed)
        self._prefetch = Prefetch(lambda epoch: list(self._batches.epoch(epoch)))

    def model(self) -> GraphWriter:
        known = self.data.vocabularies
        return GraphWriter(self.recipe.model.config(len(known.words), len(known.entities), len(known.relations)))

    def order(self, epoch: int) -> list[GraphBatch]:
        return self._prefetch(epoch)

    def fetch(self, batch: GraphBatch) -> Inputs:
        return {"indices": batch.indices, "tokens": torch.tensor(batch.tokens)}

    def loss(self, model: Forward, inputs: Inputs, length: int) -> Tensor:
        """Compute the mean loss per word, written as a mean over texts of (sum over words / mean number of words)."""
        return self.loss_at(model, inputs, *self._batches.shapes[length])

    def loss_at(self, model: Forward, inputs: Inputs, longest: int, shape: Shape) -> Tensor:
        """Compute `loss` with padded tables of another shape, into which the texts and graphs must fit."""
        train, indices = self.parts["train"], inputs["indices"]
        penalty, coverage = self.recipe.method.penalty, self.recipe.loss.coverage
        given, target, words = self._tables(train, indices, longest, shape)
        output = model(*given, weights=penalty > 0)
        logs, weights = output if penalty > 0 else (output, None)
        total = -(_of_target(logs, target) * (words != PAD)).sum()
        mean = total / (len(indices) * inputs["tokens"])
        if coverage > 0:
            mean = mean + coverage * _uncovered(logs[..., self._words :].exp(), words != PAD, given[1][..., 0] != PAD)
        if weights is not None:
            mean = mean + penalty * cosine(weights)
        return mean

    def validate(self, model: nn.Module) -> Evaluation:
        """Evaluate the likelihood of the development set, without generating texts."""
        return self._likelihood(model, "dev")

    def evaluate(self, model: nn.Module, part: str) -> Evaluation:
        likelihood = self._likelihood(model, part)
        if part == "train":  # too large to generate texts for
            return likelihood
        assert isinstance(model, GraphWriter)
        tokens = self.write(model, part)
        texts, known = self.texts(part, tokens), self.data.parts[part]
        scores = score_texts(texts, known.reference_words, known.names)
        scores["bleu"] = scores["BLEU-4"]  # the name that tables and comparisons use
        rows = [torch.tensor(row, dtype=torch.int32) for row in tokens]
        items = {
            "bleu_statistics": torch.tensor(bleu_statistics(texts, known.reference_words), dtype=torch.int32),
            "hypotheses": nn.utils.rnn.pad_sequence(rows, True, PAD),
        }
        return Evaluation(scores | likelihood.metrics, likelihood.items | items)

    def assets(self) -> dict[str, bytes]:
        return {DATA: data_json(self.data.manifest), VOCABULARIES: self.data.vocabularies.as_bytes()}

    @classmethod
    def restore(cls, recipe: Any, assets: Mapping[str, bytes]) -> Self:
        vocabularies = GraphVocabularies.from_bytes(assets[VOCABULARIES])
        return cls(recipe, PreparedGraphs(recipe.data.folder, vocabularies, {}, read_data_json(assets)))

    def measure_heads(self, model: nn.Module, options: ReportOptions) -> Measured:
        if not self.has_data:
            return super().measure_heads(model, options)
        return measure_ablations(model, lambda it: self.validate(it).items["correct"], options.progress)

    def write(self, model: GraphWriter, part: str) -> list[Sequence[int]]:
        """Generate tokens for each graph of a data split: words, or vocabulary size + index of a copied entity."""
        search, tables = self.recipe.search, self.parts[part]
        tokens: list[Sequence[int]] = [()] * len(self.data.parts[part])
        forbidden = range(
            len(MARKS) + len(self.data.vocabularies.types)
        )  # types are inputs after a copy, never outputs
        for indices, shape in in_batches(self._sizes[part], search.at_once):
            titles, entities, relations, types = tables.inputs(indices.to(self._device), shape)
            texts = write(
                model,
                titles,
                entities,
                relations,
                types,
                ENDS,
                beam=search.beam,
                alpha=search.lenpen,
                longest=search.longest,
                forbidden=forbidden,
            )
            for index, text in zip(indices.tolist(), texts, strict=True):
                tokens[index] = text.tokens
        return tokens

    def texts(self, part: str, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Convert generated tokens to texts; see `texts_of`."""
        return texts_of(self.data, part, tokens)

    @property
    def _words(self) -> int:
        return len(self.data.vocabularies.words)

    def _tables(
        self, tables: GraphTables, texts: Tensor, length: int, shape: Shape
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Return the inputs of the model, its targets and the words of these targets, the last two [B, T] each."""
        titles, entities, relations, _ = tables.inputs(tables.graphs[texts], shape)
        words, copies = tables.texts(texts, length)
        before = F.pad(words[:, :-1], (1, 0), value=BOS)
        return (titles, entities, relations, before), torch.where(copies == WORD, words, self._words + copies), words

    def _likelihood(self, model: nn.Module, part: str) -> Evaluation:
        """Evaluate NLL and accuracy of each word given the previous ones; items are scaled to give word means."""
        tables, lengths, graphs = self.parts[part], self._lengths[part], self._graphs[part]
        nll = torch.empty(len(lengths), dtype=torch.float64, device=self._device)
        correct = torch.empty_like(nll)
        buckets = GraphBuckets(lengths, self._sizes[part][graphs], self.recipe.search.at_once)
        for batch in buckets.in_order():
            indices = batch.indices.to(self._device)
            given, target, words = self._tables(tables, indices, *buckets.shapes[batch.length])
            logs = model(*given)  # [B, T, V + E]
            real = words != PAD
            nll[indices] = -(_of_target(logs, target) * real).double().sum(1)
            correct[indices] = ((logs.argmax(-1) == target) & real).double().sum(1)
        count = len(self.data.parts[part])
        tokens = torch.zeros(count, dtype=torch.float64).index_add(0, graphs, lengths.double())  # [N]
        sums = [torch.zeros(count, dtype=torch.float64).index_add(0, graphs, x.cpu()) for x in (nll, correct)]
        items = {"nll": sums[0] / tokens.mean(), "correct": sums[1] / tokens.mean(), "labels": tokens.long()}
        mean = float(items["nll"].mean())
        metrics = {"nll": mean, "accuracy": float(items["correct"].mean()), "log_likelihood": -mean}
        return Evaluation(metrics | {"perplexity": math.exp(min(mean, 700.0))}, items)


def texts_of(data: PreparedGraphs, part: str, tokens: Sequence[Sequence[int]]) -> list[str]:
    """Convert the tokens that a model generated for the graphs of a data split to texts.

    Args:
        data: the graphs.
        part: name of the data split.
        tokens: for each graph words, or vocabulary size + index of a copied entity, as `GraphWritingTask.write` returns
            them and a run stores them.
    """
    words, texts = len(data.vocabularies.words), []
    for row, names in zip(tokens, data.parts[part].names, strict=True):
        numbers = torch.tensor(row, dtype=torch.int64)
        texts.append(data.text(numbers, torch.where(numbers < words, WORD, numbers - words), names))
    return texts


def _of_target(logs: Tensor, target: Tensor) -> Tensor:
    """Select the log-probability of each target, [B, T]."""
    return logs.gather(2, target.unsqueeze(2)).squeeze(2)


def _uncovered(copies: Tensor, real: Tensor, there: Tensor) -> Tensor:
    r"""Compute $mean_j (1 - max_t p_{tj})^2$ of copies [B, T, E], over real words [B, T] and real entities [B, E]."""
    most = (copies * real.unsqueeze(2)).amax(1)  # [B, E]
    return (((1 - most).square() * there).sum(1) / there.sum(1)).mean()
