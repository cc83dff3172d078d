"""Knowledge graphs with texts about them: the common form of AGENDA and WebNLG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Token = str | int  # a word, or the index of an entity that is copied
Relation = tuple[int, str, int]  # head, name, tail; entities are numbered from 0


@dataclass(frozen=True)
class Graph:
    """One graph and the texts about it.

    Args:
        title: words of the title; empty if the dataset has no titles.
        entities: words of each entity.
        types: type of each entity, such as "<method>".
        relations: (head, name, tail) of each relation.
        targets: tokens of each text: words, and entity indices where an entity is mentioned.
        references: the plain texts.
        plan: AGENDA's sentence plan, the nodes of each sentence; empty if there is none.
        written: text that is written where an entity is copied, for each entity; empty: the words of the entity.
        category: category of a WebNLG graph; some occur in the test set only. "" if there is none.
    """

    title: list[str]
    entities: list[list[str]]
    types: list[str]
    relations: list[Relation]
    targets: list[list[Token]]
    references: list[str]
    plan: list[list[int]]
    written: tuple[str, ...] = ()
    category: str = ""

    @property
    def names(self) -> list[str]:
        """Text that is written where an entity is copied, for each entity."""
        return list(self.written) or [" ".join(words) for words in self.entities]


@dataclass(frozen=True)
class Graphs:
    """The graphs of one file.

    Args:
        graphs: the valid graphs.
        skipped: number of lines or entries left out.
    """

    graphs: list[Graph]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.graphs)


def find_problem(graph: Graph) -> str:
    """Return why a graph is invalid; "" if it is valid.

    Example:
        >>> find_problem(Graph([], [["a"]], ["<task>"], [(0, "USED-FOR", 1)], [[0]], ["a"], []))
        "relation 'USED-FOR' has entity 1, but there are 1, numbered from 0"
    """
    count = len(graph.entities)
    if not count:
        return "no entity"
    for i, words in enumerate(graph.entities):
        if not words:
            return f"entity {i} has no words"
    if len(graph.types) != count:
        return f"{count} entities with {len(graph.types)} types"
    for head, name, tail in graph.relations:
        for end in (head, tail):
            if not 0 <= end < count:
                return f"relation {name!r} has entity {end}, but there are {count}, numbered from 0"
    if not graph.targets or not all(graph.targets):
        return "no text, or an empty one"
    if len(graph.targets) != len(graph.references):
        return f"{len(graph.targets)} targets for {len(graph.references)} texts"
    for token in (token for target in graph.targets for token in target):
        if isinstance(token, int) and not 0 <= token < count:
            return f"the text mentions entity {token}, but there are {count}, numbered from 0"
    return ""


def filled(target: Iterable[Token], entities: Sequence[Sequence[str]]) -> str:
    """Return the text of a target, with the words of entities in place of their indices.

    Example:
        >>> filled(["we", "use", 1], [["parsing"], ["beam", "search"]])
        'we use beam search'
    """
    return " ".join(" ".join(entities[token]) if isinstance(token, int) else token for token in target)


def mention_share(graphs: Sequence[Graph]) -> float:
    """Compute the share of entities that a text copies at least once, over all texts; 0 if there are no texts."""
    pairs = [(len(graph.entities), target) for graph in graphs for target in graph.targets]
    mentioned = sum(len({token for token in target if isinstance(token, int)}) for _, target in pairs)
    return mentioned / max(1, sum(count for count, _ in pairs))
