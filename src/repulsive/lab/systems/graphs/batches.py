"""Batches of graphs and texts in few shapes, and their tables: nothing waits for the device the data are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.prepared import WORD, GraphPart
from repulsive.lab.text.batches import ByLength, bounds
from repulsive.lab.text.tokens import PAD, Ragged

SMALLER = ((104, 1), (232, 2))  # longer texts come in batches of a half, then of a quarter; GraphWriter: 100 and 219
WORDS = (8, 16)  # steps of an entity's words


class Shape(NamedTuple):
    """What tables are padded to: words of a title, entities, words of an entity, relations; each at least 1."""

    title: int
    entities: int
    words: int
    relations: int


@dataclass(frozen=True, eq=False)
class GraphTables:
    """N graphs and T texts of them, to take tables from.

    Args:
        titles: N rows of words.
        types: N rows, the word of each entity's type.
        entities: rows of entity words, all entities of all graphs.
        relations: N rows of head, relation, tail.
        targets: T rows of words.
        copies: T rows, `WORD` or the number of the entity that is copied.
        graphs: which graph each text is of, int64 [T].
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
        """The same on another device."""
        return GraphTables(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def sizes(self) -> Tensor:
        """What each graph needs, int64 [N, 4], as `Shape` has it."""
        words, longest = self.entities.lengths, torch.zeros_like(self.types.lengths)
        graph = torch.repeat_interleave(torch.arange(len(longest)), self.types.lengths)  # [entities]
        longest = longest.scatter_reduce(0, graph, words, "amax")
        return torch.stack([self.titles.lengths, self.types.lengths, longest, self.relations.lengths], 1).clamp(min=1)

    def inputs(self, graphs: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Titles [B, S], entities [B, E, W], relations [B, R, 3] and the entities' types [B, E] of some graphs."""
        titles, _ = _table(self.titles, graphs, shape.title)
        types, real = _table(self.types, graphs, shape.entities)
        rows = self.types.offsets[graphs].unsqueeze(1) + torch.arange(shape.entities, device=graphs.device)  # [B, E]
        rows = torch.where(real, rows, 0).flatten()
        entities, _ = _table(self.entities, rows, shape.words)  # [B E, W]
        entities = torch.where(real.unsqueeze(2), entities.unflatten(0, real.shape), PAD)
        relations, _ = _table(self.relations, graphs, shape.relations)
        return titles, entities, relations, types

    def texts(self, texts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Words and copies of some texts, [B, T] each."""
        return _table(self.targets, texts, length)[0], _table(self.copies, texts, length, WORD)[0]


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """Which texts go together.

    Args:
        indices: int64 [B].
        length: number of their shape in `GraphBuckets.shapes`.
        tokens: words a text has, on average over the whole batch, whoever takes a share of it.
    """

    indices: Tensor
    length: int
    tokens: float

    def __len__(self) -> int:
        return len(self.indices)


class GraphBuckets(ByLength[GraphBatch]):
    """Texts of about the same number of words go together, fewer of long ones.

    `shapes` says how long and how wide tables are, by number: for every bucket of texts what the largest graph needs,
    and, since entities of many words are few, the words of an entity by steps.

    Args:
        lengths: words of each text, int64 [T].
        sizes: what each text's graph needs, int64 [T, 4], as `GraphTables.sizes` has it.
        size: texts in a batch of short ones.
        seed: with the epoch, decides the order.
    """

    def __init__(self, lengths: Tensor, sizes: Tensor, size: int, seed: int = 0) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a batch has at least one text")
        if not len(lengths):
            raise DataError("no texts to make batches of")
        found = bounds(int(lengths.max()))
        super().__init__(lengths, found, [max(1, size // _smaller(bound)) for bound in found], seed)
        self._sizes = sizes
        self.shapes: list[tuple[int, Shape]] = []
        for bound in found:  # those of a bucket that is not full move on to the next: a shape holds all shorter ones
            if bool((here := lengths <= bound).any()):
                most = Shape(*sizes[here].amax(0).tolist())
                steps = (*(words for words in WORDS if words < most.words), most.words)
                self.shapes += [(bound, most._replace(words=words)) for words in steps]

    def batch(self, indices: Tensor, bound: int) -> GraphBatch:
        words = int(self._sizes[indices, 2].max())
        number = next(i for i, (length, shape) in enumerate(self.shapes) if length == bound and words <= shape.words)
        return GraphBatch(indices, number, float(self.lengths[indices].double().mean()))


def in_batches(sizes: Tensor, at_once: int) -> list[tuple[Tensor, Shape]]:
    """Graphs of about the same number of entities together, for search: which, and their shape.

    Args:
        sizes: what each graph needs, int64 [N, 4].
        at_once: graphs in a batch.
    """
    order: Sequence[Tensor] = sizes[:, 1].argsort(stable=True).split(at_once)
    return [(some, Shape(*sizes[some].amax(0).tolist())) for some in order]


def _smaller(bound: int) -> int:
    return next((divisor for longest, divisor in SMALLER if bound <= longest), 4)


def _table(rows: Ragged, indices: Tensor, width: int, fill: int = PAD) -> tuple[Tensor, Tensor]:
    """Some rows as a table int64 [B, width, ...], and which of it is real, bool [B, width]."""
    starts = rows.offsets[indices]  # [B]
    places = torch.arange(width, device=indices.device)
    real = places < (rows.offsets[indices + 1] - starts).unsqueeze(1)  # [B, width]
    shape = (*real.shape, *rows.values.shape[1:])
    if not len(rows.values):
        return torch.full(shape, fill, device=indices.device), real
    found = rows.values[torch.where(real, starts.unsqueeze(1) + places, 0)].long()
    return torch.where(real.view(*real.shape, *[1] * (found.ndim - 2)), found, fill), real
