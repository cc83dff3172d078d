"""Batches of graphs and texts, padded to few shapes without synchronising with the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.prepared import WORD, GraphPart
from repulsive.lab.text.batches import Batch, ByLength, bounds
from repulsive.lab.text.tokens import PAD, Ragged

SMALLER = (
    (104, 1),
    (232, 2),
)  # above each bound, batches are half, then a quarter as large; GraphWriter's bounds: 100 and 219
WORDS = (8, 16)  # padded lengths of an entity's words


class Shape(NamedTuple):
    """Padded sizes of a batch: words of a title, entities, words of an entity, relations; each at least 1."""

    title: int
    entities: int
    words: int
    relations: int


@dataclass(frozen=True, eq=False)
class GraphTables:
    """N graphs and T texts about them, as ragged rows from which padded tables are made.

    Args:
        titles: N rows of words.
        types: N rows, the word of each entity's type.
        entities: rows of entity words, all entities of all graphs.
        relations: N rows of head, relation, tail.
        targets: T rows of words.
        copies: T rows, `WORD` or the index of the entity that is copied.
        graphs: index of each text's graph, int64 [T].
    """

    titles: Ragged
    types: Ragged
    entities: Ragged
    relations: Ragged
    targets: Ragged
    copies: Ragged
    graphs: Tensor

    @classmethod
    def of(cls, part: GraphPart) -> GraphTables:
        graphs = torch.repeat_interleave(torch.arange(len(part)), part.texts.diff())
        return cls(part.titles, part.types, part.entities, part.relations, part.targets, part.copies, graphs)

    def to(self, device: torch.device) -> GraphTables:
        """Copy the rows to a device."""
        return GraphTables(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def sizes(self) -> Tensor:
        """Compute the size of each graph, int64 [N, 4], in the order of `Shape`."""
        words, longest = self.entities.lengths, torch.zeros_like(self.types.lengths)
        graph = torch.repeat_interleave(torch.arange(len(longest)), self.types.lengths)  # [entities]
        longest = longest.scatter_reduce(0, graph, words, "amax")
        return torch.stack([self.titles.lengths, self.types.lengths, longest, self.relations.lengths], 1).clamp(min=1)

    def inputs(self, graphs: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pad titles [B, S], entities [B, E, W], relations [B, R, 3] and types of entities [B, E] of some graphs."""
        titles, _ = _table(self.titles, graphs, shape.title)
        types, real = _table(self.types, graphs, shape.entities)
        rows = self.types.offsets[graphs].unsqueeze(1) + torch.arange(shape.entities, device=graphs.device)  # [B, E]
        rows = torch.where(real, rows, 0).flatten()
        entities, _ = _table(self.entities, rows, shape.words)  # [B E, W]
        entities = torch.where(real.unsqueeze(2), entities.unflatten(0, real.shape), PAD)
        relations, _ = _table(self.relations, graphs, shape.relations)
        return titles, entities, relations, types

    def texts(self, texts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Pad words and copies of some texts, [B, T] each."""
        return _table(self.targets, texts, length)[0], _table(self.copies, texts, length, WORD)[0]


@dataclass(frozen=True, eq=False)
class GraphBatch(Batch):
    """A training batch of texts; `length` is the index of their shape in `GraphBuckets.shapes`.

    Args:
        tokens: mean number of words per text over the whole batch, also for a rank that takes a share of it.
    """

    tokens: float


class GraphBuckets(ByLength[GraphBatch]):
    """Batches of texts of similar length; batches of long texts are smaller.

    `shapes` lists the padded sizes. Every bucket of texts is padded to its largest graph. As entities of many words are
    rare, a bucket has several shapes with different numbers of words per entity.

    Args:
        lengths: words of each text, int64 [T].
        sizes: size of the graph of each text, int64 [T, 4]; see `GraphTables.sizes`.
        size: number of short texts in a batch.
        seed: random seed of the order, together with the number of the epoch.
    """

    def __init__(self, lengths: Tensor, sizes: Tensor, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"size={size}: expected at least one text per batch")
        if not len(lengths):
            raise DataError("no texts to make batches of")
        limits = bounds(int(lengths.max()))
        super().__init__(lengths, limits, [max(1, size // _smaller(bound)) for bound in limits], seed)
        self._sizes = sizes
        self.shapes: list[tuple[int, Shape]] = []
        for (
            bound
        ) in limits:  # a shape fits all shorter texts too: those that do not fill a batch move to the next bucket
            if bool((here := lengths <= bound).any()):
                most = Shape(*sizes[here].amax(0).tolist())
                steps = (*(words for words in WORDS if words < most.words), most.words)
                self.shapes += [(bound, most._replace(words=words)) for words in steps]

    def batch(self, indices: Tensor, bound: int) -> GraphBatch:
        words = int(self._sizes[indices, 2].max())
        number = next(i for i, (length, shape) in enumerate(self.shapes) if length == bound and words <= shape.words)
        return GraphBatch(indices, number, float(self.lengths[indices].double().mean()))


def in_batches(sizes: Tensor, at_once: int) -> list[tuple[Tensor, Shape]]:
    """Group graphs with similar numbers of entities for beam search; return the indices and shape of each batch.

    Args:
        sizes: sizes of each graph, int64 [N, 4]; see `GraphTables.sizes`.
        at_once: number of graphs in a batch.
    """
    order: Sequence[Tensor] = sizes[:, 1].argsort(stable=True).split(at_once)
    return [(some, Shape(*sizes[some].amax(0).tolist())) for some in order]


def _smaller(bound: int) -> int:
    return next((divisor for longest, divisor in SMALLER if bound <= longest), 4)


def _table(rows: Ragged, indices: Tensor, width: int, fill: int = PAD) -> tuple[Tensor, Tensor]:
    """Pad some rows to int64 [B, width, ...], and return the padding mask, bool [B, width], True for real values."""
    starts = rows.offsets[indices]  # [B]
    positions = torch.arange(width, device=indices.device)
    real = positions < (rows.offsets[indices + 1] - starts).unsqueeze(1)  # [B, width]
    shape = (*real.shape, *rows.values.shape[1:])
    if not len(rows.values):
        return torch.full(shape, fill, device=indices.device), real
    values = rows.values[torch.where(real, starts.unsqueeze(1) + positions, 0)].long()
    return torch.where(real.view(*real.shape, *[1] * (values.ndim - 2)), values, fill), real
