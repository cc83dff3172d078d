"""Prepare knowledge graphs and texts about them.

    prepare("graphs", "data/webnlg", "prepared/webnlg")

File names decide the file format: AGENDA's processed TSV, its unprocessed JSON, plain or in its archive, or WebNLG as
JSON lines. The vocabularies are built from the training set, as in GraphWriter's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.data import Graph, Graphs, mention_share
from repulsive.lab.systems.graphs.files import GraphFiles, find_graphs
from repulsive.lab.systems.graphs.prepared import (
    RELATION_MARKS,
    TASK,
    WORD,
    GraphPart,
    GraphVocabularies,
    PreparedGraphs,
)
from repulsive.lab.text.dataset import Plan
from repulsive.lab.text.inputs import checksums
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.prepared import PARTS
from repulsive.lab.text.progress import Progress
from repulsive.lab.text.settings import Settings
from repulsive.lab.text.tokens import RESERVED, UNK, Ragged, Tokenizer, Vocabulary, tokenizer

_UNUSED = ("vectors", "size", "half_vectors", "seed")


def plan_graphs(data: str | Path, out: str | Path, **settings: Any) -> Plan[PreparedGraphs]:
    """Plan the preparation of graphs and texts.

    Args:
        data: the folder with the raw files.
        out: the folder to make.
        settings: fields of `Settings`: `minimum` and `most` for the words of titles and texts, `longest` for the words
            of a text, `tokenizer` and `lowercase` (AGENDA is tokenised: only its titles are lower-cased), `limit`.

    Raises:
        DataError: an option is invalid, or a file is missing.
    """
    shared = Settings(**settings)
    if shared.vectors is not None:
        raise DataError(f"dataset {TASK!r} learns its own vectors; leave out --vectors")
    folder = Path(data)
    files = find_graphs(folder)
    if files.in_words and shared.tokenizer is not None:
        raise DataError(f"{folder}: is tokenised already; leave out --tokenizer {shared.tokenizer}")
    if not files.in_words:
        shared = replace(shared, tokenizer=shared.tokenizer or "spacy")
        tokenizer(str(shared.tokenizer))  # fails here, before a long read, if the tokenizer is not installed
    paths = {*files.parts.values(), *([files.relations] if files.relations else [])}
    stored = {name: value for name, value in shared.stored({}).items() if name not in _UNUSED}
    stored["form"] = files.form
    sums = checksums(list(paths), folder)
    write = partial(_write, shared, files)
    return Plan(TASK, Path(out), stored, sums, write, PreparedGraphs.load, summarize)


def _write(
    settings: Settings, files: GraphFiles, plan: Plan[PreparedGraphs], jobs: int | None, progress: Progress
) -> PreparedGraphs:
    name, longest = settings.tokenizer, settings.longest
    split = str.split if name is None else tokenizer(name, lowercase=settings.lowercase)
    progress("reading", 0, 0)
    read, names = files.read(split, settings.lowercase, settings.limit)
    progress("numbering", 0, 0)
    vocabularies = build_vocabularies(read, names, settings.minimum, settings.most)
    parts = {part: _encode(some.graphs, vocabularies, longest, split) for part, some in read.items()}
    manifest = plan.manifest() | {
        "versions": {"spacy": version("spacy")} if name == "spacy" else {},
        "rows": {part: len(some) for part, some in read.items()},
        "texts": {part: len(some.targets) for part, some in parts.items()},
        "skipped": {part: some.skipped for part, some in read.items()},
        "cut": {
            part: sum(len(target) > longest for graph in some.graphs for target in graph.targets) if longest else 0
            for part, some in read.items()
        },
        "unknown": {part: _share(some.targets.values == UNK) for part, some in parts.items()},
        "unknown entity words": {part: _share(some.entities.values == UNK) for part, some in parts.items()},
        "unknown relations": {part: _share(some.relations.values[:, 1] == UNK) for part, some in parts.items()},
        "unseen categories": {part: _unseen(some.graphs, read["train"].graphs) for part, some in read.items()},
        "mentioned": {part: mention_share(some.graphs) for part, some in read.items()},
    }
    return PreparedGraphs(plan.out, vocabularies, parts, manifest).save()


def build_vocabularies(
    parts: dict[str, Graphs], names: Sequence[str] | None, minimum: int, most: int | None
) -> GraphVocabularies:
    """Build the vocabularies of GraphWriter.

    Words of titles and texts need `minimum` occurrences; all words of entities are kept. Each relation has an inverse.
    The types are words too: after a copied entity, the decoder reads the word of its type.

    Args:
        parts: the graphs of each data split; words are taken from "train".
        names: names of the relations; None: those in "train", sorted by code point.
        minimum: occurrences that a word needs.
        most: maximum size of the vocabulary, marks and types included; None: unlimited.
    """
    train = parts["train"].graphs
    types = tuple(sorted({kind for some in parts.values() for graph in some.graphs for kind in graph.types}))
    if names is None:
        names = sorted({name for graph in train for _, name, _ in graph.relations})
    words = Vocabulary.build(_sentences(train), minimum=minimum).words[len(RESERVED) :]
    marks = (*MARKS, *types)
    return GraphVocabularies(
        Vocabulary((*marks, *(word for word in words if word not in marks))[:most]),
        Vocabulary.build(entity for graph in train for entity in graph.entities),
        types,
        (*RELATION_MARKS, *names, *(f"{name}_inv" for name in names)),
    )


def summarize(prepared: PreparedGraphs) -> str:
    """Describe the prepared data, as a table with one column per data split."""
    manifest, words = prepared.manifest, prepared.vocabularies
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("graphs", "rows", "{:,}".format),
        ("texts", "texts", "{:,}".format),
        ("skipped", "skipped", "{:,}".format),
        ("cut", "cut", "{:,}".format),
        ("entities mentioned", "mentioned", "{:.1%}".format),
        ("unknown words", "unknown", "{:.2%}".format),
        ("unknown entity words", "unknown entity words", "{:.2%}".format),
        ("unknown relations", "unknown relations", "{:.2%}".format),
        ("of unseen categories", "unseen categories", "{:.2%}".format),
    ]
    lines = [" " * 20 + "".join(f"  {part:>7}" for part in PARTS)]
    lines += [
        f"{title:20}" + "".join(f"  {show(manifest[key][part]):>7}" for part in PARTS) for title, key, show in rows
    ]
    lines.append(
        f"{manifest['settings']['form']}: {len(words.words):,} words, {len(words.entities):,} of entities, "
        f"{len(words.types)} types, {words.named} relations and their inverses"
    )
    return "\n".join(lines)


def _sentences(graphs: Iterable[Graph]) -> Iterable[list[str]]:
    for graph in graphs:
        yield graph.title
        yield from ([token for token in target if isinstance(token, str)] for target in graph.targets)


def _encode(graphs: list[Graph], known: GraphVocabularies, longest: int | None, split: Tokenizer) -> GraphPart:
    first = len(MARKS) + len(known.types)  # a mark or type in a text is an unknown word
    index = {word: i for i, word in enumerate(known.words.words) if i >= first}
    kinds = {kind: i for i, kind in enumerate(known.types, len(MARKS))}
    relations = {name: i for i, name in enumerate(known.relations) if len(RELATION_MARKS) <= i}
    relations = {name: i for name, i in relations.items() if i < len(RELATION_MARKS) + known.named}
    titles, types, triples, targets, copies = [], [], [], [], []
    for graph in graphs:
        titles.append([index.get(word, UNK) for word in graph.title])
        types.append([kinds[kind] for kind in graph.types])
        triples.append([[head, relations.get(name, UNK), tail] for head, name, tail in graph.relations])
        for target in graph.targets:
            some = target[:longest]
            copied = [token if isinstance(token, int) else WORD for token in some]
            words = [kinds[graph.types[t]] if isinstance(t, int) else index.get(t, UNK) for t in some]
            targets.append([*words, EOS])
            copies.append([*copied, WORD])
    return GraphPart(
        titles=_rows(titles),
        types=_rows(types),
        entities=known.entities.encode(entity for graph in graphs for entity in graph.entities),
        relations=_rows(triples, 3),
        texts=_rows([graph.targets for graph in graphs], values=False).offsets,
        targets=_rows(targets),
        copies=_rows(copies),
        references=[graph.references for graph in graphs],
        reference_words=[[" ".join(split(text)) for text in graph.references] for graph in graphs],
        names=[graph.names for graph in graphs],
        categories=[graph.category for graph in graphs],
    )


def _rows(rows: Sequence[Sequence[Any]], width: int | None = None, *, values: bool = True) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    flat = torch.tensor([item for row in rows for item in row] if values else [], dtype=torch.int32)
    return Ragged.from_lengths(flat.view(-1, width) if width else flat, lengths)


def _unseen(graphs: list[Graph], train: list[Graph]) -> float:
    known = {graph.category for graph in train}
    return sum(graph.category not in known for graph in graphs) / max(1, len(graphs))


def _share(which: torch.Tensor) -> float:
    return float(which.double().mean()) if len(which) else 0.0
