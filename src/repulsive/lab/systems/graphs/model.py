"""GraphWriter (Koncel-Kedziorski et al., 2019): from a title and a knowledge graph to a text with copied entities.

    model = GraphWriter(GraphWriterConfig(words=9_000, entity_words=5_000, relations=17))
    logs = model(titles, entities, relations, before)    # [B, S], [B, E, W], [B, R, 3], [B, T] -> [B, T, V + E]
    memory = model.start(titles, entities, relations)    # encoded once; then word by word
    logs, state = model.step(before, state, memory)      # [B, K] -> [B, K, V + E], K hypotheses of each graph

The distribution is over all words, followed by a copy of each entity. After a copy the decoder reads the word of the
entity's type. 0 is padding everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.lab.layers.lstm import two_way
from repulsive.lab.systems.graphs.attention import GraphAttention, GraphSizes
from repulsive.lab.systems.graphs.encoder import PADDING, GraphTransformer, adjacency, present

UNKNOWN, ROOT, MARKS = 1, 2, 3  # ids of the unknown relation and of the root, and number of reserved ids


@dataclass(frozen=True)
class GraphWriterConfig:
    """Sizes and choices of a GraphWriter.

    Args:
        words: size of the vocabulary of titles and texts.
        entity_words: size of the vocabulary of entities.
        relations: number of relation ids: three reserved ones, the names, and the inverse of each name.
        graph: sizes of the graph Transformer; the decoder has the same width, heads and dropout.
        lstm_layers: LSTM layers of the encoders of titles and entities.
        titles: whether graphs have titles.
    """

    words: int
    entity_words: int
    relations: int
    graph: GraphSizes = field(default_factory=GraphSizes)
    lstm_layers: int = 2
    titles: bool = True

    def __post_init__(self) -> None:
        if self.graph.width % 2:
            raise ValueError(f"width={self.graph.width} must be even: half of it is for each direction of the LSTM")
        if self.lstm_layers < 1:
            raise ValueError(f"lstm_layers={self.lstm_layers} must be at least 1")
        if self.relations < MARKS or (self.relations - MARKS) % 2:
            raise ValueError(f"relations={self.relations} must be {MARKS} marks and pairs of a name and its inverse")


class Memory(NamedTuple):
    """Encoded graphs and titles; keys and values are [B, M, N, d].

    Args:
        root: state of the root node, [B, width].
        entities: vectors before the graph Transformer, [B, E, width].
        real: mask of the entities that exist, bool [B, E].
        graph: keys, values, and mask of the nodes that exist, bool [B, 1, N].
        title: keys, values and mask of the words of the title; None without titles.
    """

    root: Tensor
    entities: Tensor
    real: Tensor
    graph: tuple[Tensor, Tensor, Tensor]
    title: tuple[Tensor, Tensor, Tensor] | None

    def take(self, rows: Tensor) -> Memory:
        """Select the graphs with the given indices, int64 [A]."""
        root, entities, real = (x[rows] for x in self[:3])
        graph = self.graph[0][rows], self.graph[1][rows], self.graph[2][rows]
        title = (self.title[0][rows], self.title[1][rows], self.title[2][rows]) if self.title is not None else None
        return Memory(root, entities, real, graph, title)


class State(NamedTuple):
    """Decoder states of K hypotheses of each graph, [B, K, ...] each.

    Args:
        hidden: hidden state of the LSTM.
        cell: cell state of the LSTM.
        context: output of the attention to graph and title.
    """

    hidden: Tensor
    cell: Tensor
    context: Tensor

    def keep(self, origin: Tensor) -> State:
        """Select for each new hypothesis the one that it extends, given by its index, [B, K]."""
        return State(*(x.gather(1, origin.unsqueeze(2).expand(-1, -1, x.shape[2])) for x in self))

    def take(self, rows: Tensor) -> State:
        """Select the graphs with the given indices, int64 [A]."""
        return State(*(x[rows] for x in self))


class WordEncoder(nn.Module):
    """A bidirectional LSTM over words, with half of the width for each direction."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, PADDING)
        nn.init.xavier_normal_(self.embedding.weight)
        self.forwards, self.backwards = (
            nn.ModuleList(nn.LSTM(width, width // 2, batch_first=True) for _ in range(layers)) for _ in range(2)
        )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Encode words [B, T] as states [B, T, width], and the last states of both directions, joined, [B, width]."""
        lengths = (words != PADDING).sum(1)  # [B]
        states = self.embedding(words)
        for ahead, back in zip(self.forwards, self.backwards, strict=True):
            assert isinstance(ahead, nn.LSTM) and isinstance(back, nn.LSTM)
            states = two_way(states, lengths, ahead, back)  # [B, T, width]
        half = states.shape[-1] // 2
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, half)
        return states, torch.cat([states[..., :half].gather(1, last).squeeze(1), states[:, 0, half:]], dim=-1)


class Decoder(nn.Module):
    """An LSTM that attends to graph and title, and generates words or copies entities."""

    def __init__(self, config: GraphWriterConfig) -> None:
        super().__init__()
        width, seen = config.graph.width, 2 if config.titles else 1
        self.embedding = nn.Embedding(config.words, width)
        self.lstm = nn.LSTMCell((seen + 1) * width, width)
        self.graph_cross_attention = GraphAttention(config.graph)
        self.title_cross_attention = GraphAttention(config.graph) if config.titles else None
        self.words = nn.Linear((seen + 1) * width, config.words)
        self.copies = nn.Linear((seen + 1) * width, width)
        self.switch = nn.Linear((seen + 1) * width, 1)

    def attend(self, hidden: Tensor, memory: Memory) -> Tensor:
        """Attend to graph and title, and add the state to each result: [B, K, width] -> [B, K, width or 2 width]."""
        contexts = [hidden + self.graph_cross_attention.attend(hidden, *memory.graph)]
        if self.title_cross_attention is not None and memory.title is not None:
            contexts.append(hidden + self.title_cross_attention.attend(hidden, *memory.title))
        return torch.cat(contexts, dim=-1)

    def step(self, vectors: Tensor, state: State, memory: Memory) -> State:
        """Update the state with one more word of every hypothesis, given as word vectors [B, K, width]."""
        given = torch.cat([state.context, vectors], dim=-1).flatten(0, 1)  # [B K, ...]
        hidden, cell = self.lstm(given, (state.hidden.flatten(0, 1), state.cell.flatten(0, 1)))
        hidden = hidden.view_as(state.hidden)
        return State(hidden, cell.view_as(state.cell), self.attend(hidden, memory))

    def distribution(self, seen: Tensor, memory: Memory) -> Tensor:
        r"""Join $\log s \, softmax(V o)$ of words and $\log (1 - s) \, softmax(e^T W o)$ of copies: [B, T, V + E]."""
        scores = self.copies(seen) @ memory.entities.mT  # [B, T, E]
        scores = scores.masked_fill(~memory.real.unsqueeze(1), -torch.inf)
        switch = self.switch(seen).float() if seen.dtype in (torch.bfloat16, torch.float16) else self.switch(seen)
        kind = switch.dtype
        words = self.words(seen).log_softmax(-1, dtype=kind) + F.logsigmoid(switch)
        return torch.cat([words, scores.log_softmax(-1, dtype=kind) + F.logsigmoid(-switch)], dim=-1)


class GraphWriter(nn.Module):
    """Encoders of titles, entities and graphs, and the decoder."""

    def __init__(self, config: GraphWriterConfig) -> None:
        super().__init__()
        self.config = config
        width = config.graph.width
        self.title_words = WordEncoder(config.words, width, config.lstm_layers) if config.titles else None
        self.entity_words = WordEncoder(config.entity_words, width, config.lstm_layers)
        self.relations = nn.Embedding(config.relations, width)
        nn.init.xavier_normal_(self.relations.weight)
        self.encoder = GraphTransformer(config.graph)
        self.decoder = Decoder(config)

    def forward(
        self, titles: Tensor | None, entities: Tensor, relations: Tensor, before: Tensor, *, weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the log-probabilities of the word or copy that follows each word.

        Args:
            titles: words, [B, S]; ignored if the model has no titles.
            entities: words of each entity, [B, E, W]; an entity without words is padding.
            relations: (head, relation, tail) ids, [B, R, 3]; relation 0 is padding.
            before: the word before each word to predict, [B, T]; for a copied entity, the word of its type.
            weights: also return the weights of the encoder's heads.

        Returns:
            [B, T, V + E]; with `weights` also [layers, 3, M, D], see `GraphTransformer.weights`.
        """
        memory = self.start(titles, entities, relations)
        states = [self.begin(memory)]
        for vectors in self.decoder.embedding(before).split(1, dim=1):  # [B, 1, width]
            states.append(self.decoder.step(vectors, states[-1], memory))
        hidden, context = (torch.cat([getattr(s, name) for s in states[1:]], 1) for name in ("hidden", "context"))
        logs = self.decoder.distribution(torch.cat([hidden, context], dim=-1), memory)  # [B, T, V + E]
        return (logs, self.encoder.weights()) if weights else logs

    def start(self, titles: Tensor | None, entities: Tensor, relations: Tensor) -> Memory:
        """Encode graphs and titles; arguments as in `forward`."""
        real = entities[..., 0] != PADDING  # [B, E]
        _, ends = self.entity_words(entities.flatten(0, 1))  # [B E, width]
        vectors = ends.unflatten(0, real.shape)
        names = relations[..., 1]  # [B, R]
        named = (self.config.relations - MARKS) // 2
        inverse = torch.where(names < MARKS, names, names + named)  # the inverse of the unknown relation is unknown
        root = torch.full_like(entities[:, :1, 0], ROOT)  # [B, 1]
        nodes = [self.relations(root), vectors, self.relations(names), self.relations(inverse)]
        graph = self.encoder(torch.cat([x.to(vectors.dtype) for x in nodes], 1), adjacency(real, relations))
        k, v = self.decoder.graph_cross_attention.keys_and_values(graph)
        keys = k, v, present(real, relations).unsqueeze(1)
        return Memory(graph[:, 0], vectors, real, keys, self._title(titles))

    def begin(self, memory: Memory) -> State:
        """Return the state before the first word, with one hypothesis per graph: the root's state, and its context."""
        hidden = memory.root.unsqueeze(1)  # [B, 1, width]
        return State(hidden, hidden.detach(), self.decoder.attend(hidden, memory))

    def step(self, before: Tensor, state: State, memory: Memory) -> tuple[Tensor, State]:
        """Add one word to K hypotheses, [B, K]; return log-probabilities [B, K, V + E] and the state after the word."""
        state = self.decoder.step(self.decoder.embedding(before), state, memory)
        return self.decoder.distribution(_seen(state), memory), state

    def _title(self, titles: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        if self.title_words is None:
            return None
        if titles is None:
            raise ValueError("expected titles, got None; config.titles=False makes a model without titles")
        states, _ = self.title_words(titles)
        attention = self.decoder.title_cross_attention
        assert attention is not None
        there = titles != PADDING  # [B, S]
        there[:, 0] = True  # an empty title attends to its first padding token: a softmax over nothing is nan
        return *attention.keys_and_values(states), there.unsqueeze(1)


def _seen(state: State) -> Tensor:
    return torch.cat([state.hidden, state.context], dim=-1)
