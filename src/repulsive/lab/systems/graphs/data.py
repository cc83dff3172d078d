"""Knowledge graphs with texts about them, whatever file they come from: what AGENDA and WebNLG are read into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Token = str | int  # a word, or the number of the entity that is copied there
Relation = tuple[int, str, int]  # head, name, tail; the entities' numbers count from 0


@dataclass(frozen=True)
class Graph:
    """One graph and the texts that tell it.

    Args:
        title: words; none where the data have no titles.
        entities: words of each.
        types: one for each entity, such as "<method>".
        relations: head, name, tail.
        targets: one for each text: words, and numbers where an entity is mentioned.
        references: the texts, plain.
        plan: AGENDA's sentence plan, the nodes of each sentence; empty where there is none.
        written: what a copy of each entity writes, words separated by spaces; empty: the entity's own words.
        category: WebNLG's, some of which only its test part has; "" where there is none.
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
        """What a copy of each entity writes."""
        return list(self.written) or [" ".join(words) for words in self.entities]


@dataclass(frozen=True)
class Graphs:
    """The graphs of one file.

    Args:
        graphs: those that are whole.
        skipped: lines or entries left out in reading.
    """

    graphs: list[Graph]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.graphs)


def what_is_wrong(graph: Graph) -> str:
    """Why a graph cannot be used; "" where it can.

    Example:
        >>> what_is_wrong(Graph([], [["a"]], ["<task>"], [(0, "USED-FOR", 1)], [[0]], ["a"], []))
        "relation 'USED-FOR' has entity 1 of 1, numbered from 0"
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
                return f"relation {name!r} has entity {end} of {count}, numbered from 0"
    if not graph.targets or not all(graph.targets):
        return "no text, or an empty one"
    if len(graph.targets) != len(graph.references):
        return f"{len(graph.targets)} targets for {len(graph.references)} texts"
    for token in (token for target in graph.targets for token in target):
        if isinstance(token, int) and not 0 <= token < count:
            return f"the text mentions entity {token} of {count}, numbered from 0"
    return ""


def filled(target: Iterable[Token], entities: Sequence[Sequence[str]]) -> str:
    """The text of a target, the words of entities in place of their numbers.

    Example:
        >>> filled(["we", "use", 1], [["parsing"], ["beam", "search"]])
        'we use beam search'
    """
    return " ".join(" ".join(entities[token]) if isinstance(token, int) else token for token in target)


def mention_share(graphs: Sequence[Graph]) -> float:
    """Share of the entities, counted for each text, that the text copies at least once; 0 where there are none."""
    pairs = [(len(graph.entities), target) for graph in graphs for target in graph.targets]
    found = sum(len({token for token in target if isinstance(token, int)}) for _, target in pairs)
    return found / max(1, sum(count for count, _ in pairs))
