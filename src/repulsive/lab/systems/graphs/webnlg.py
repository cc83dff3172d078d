"""Read WebNLG: triples of DBpedia with one or more texts each, as JSON lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.data import Graph, Graphs, Relation, Token, find_problem
from repulsive.lab.systems.graphs.mentions import find_mentions, usual_spelling
from repulsive.lab.text.lines import BadLines, read_json
from repulsive.lab.text.tokens import Tokenizer

TYPE = "<entity>"  # type of every entity: WebNLG has no entity types
_LITERAL = re.compile(r'"(.*)"(?:@[\w-]+|\^\^\S+)?')
_MEASURED = re.compile(r'"([\d.]+)"(\(\w+\))')


def read_webnlg(path: str | Path, split: Tokenizer, *, limit: int = 20) -> Graphs:
    """Read graphs from JSON lines with `triples` (subject, name, object) and `texts`.

    Subjects and objects are the entities. Where a text mentions an entity (`mentions.find_mentions`), its target has
    the index of the entity. A copied entity is written as `mentions.usual_spelling` returns its name.

    Args:
        path: plain, gzip or xz.
        split: tokenizer for texts and names.
        limit: number of bad lines that may be skipped.

    Raises:
        DataError: the file is missing, damaged or empty, or has more bad lines than `limit`.
    """
    graphs = []
    with BadLines(path, limit) as bad:
        for number, entry in read_json(path, bad):
            problem = _find_malformed(entry)
            graph = None if problem else _graph(entry, split)
            problem = problem or (find_problem(graph) if graph is not None else "")
            if problem or graph is None:
                bad.skip(number, problem)
            else:
                graphs.append(graph)
        if not graphs:
            raise DataError(f"{path}: no usable graph" + (f"; {bad.first[0]}" if bad.first else ""))
        return Graphs(graphs, bad.count)


def entity_name(written: str) -> str:
    """Convert an entity's name to plain text.

    Example:
        >>> entity_name("Jacob_Bundsgaard"), entity_name('"VIAG"'), entity_name('"1923-11-18"^^xsd:date')
        ('Jacob Bundsgaard', 'VIAG', '1923-11-18')
    """
    written = _MEASURED.sub(r"\1 \2", written.strip())
    literal = _LITERAL.fullmatch(written)
    return " ".join((literal[1] if literal else written).replace("_", " ").split())


def _find_malformed(entry: dict[str, Any]) -> str:
    triples, texts = entry.get("triples"), entry.get("texts")
    if not isinstance(triples, list) or not isinstance(texts, list):
        return "expected lists of triples and of texts"
    if not triples:
        return "no entity: the list of triples is empty"
    for triple in triples:
        if not isinstance(triple, list) or len(triple) != 3 or not all(isinstance(part, str) for part in triple):
            return f"triple {str(triple)[:60]}: expected three strings: subject, name and object"
        if not triple[1].strip():
            return f"triple {str(triple)[:60]}: the relation has no name"
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        return "no text, or an empty one"
    return ""


def _graph(entry: dict[str, Any], split: Tokenizer) -> Graph:
    numbers: dict[str, int] = {}
    relations: list[Relation] = []
    for subject, name, thing in entry["triples"]:
        head, tail = (numbers.setdefault(entity_name(end), len(numbers)) for end in (subject, thing))
        relations.append((head, name.strip(), tail))
    names, texts = list(numbers), [" ".join(text.split()) for text in entry["texts"]]
    targets = [_target(text, names, split) for text in texts]
    entities, category = [split(name) for name in names], entry.get("category")
    written = tuple(" ".join(split(usual_spelling(name))) for name in names)
    kept = category if isinstance(category, str) else ""
    return Graph([], entities, [TYPE] * len(names), relations, targets, texts, [], written, kept)


def _target(text: str, names: list[str], split: Tokenizer) -> list[Token]:
    target: list[Token] = []
    done = 0
    for start, end, entity in find_mentions(text, names):
        target += [*split(text[done:start].strip()), entity]
        done = end
    return target + list(split(text[done:].strip()))
