"""Prepared graphs: ids of words, entities and relations in a folder of safetensors and JSON files with checksums.

    prepared = PreparedGraphs.load("prepared/webnlg")
    part = prepared.parts["train"]
    prepared.text(part.targets[0], part.copies[0], part.names[0])

`repulsive prepare graphs` makes the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.text.folders import content_errors, read_folder, read_manifest, write_folder
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.prepared import PARTS, as_text, check_ids, read_rows, tensors_from_bytes, tensors_to_bytes
from repulsive.lab.text.tokens import UNK, Ragged, Vocabulary

TASK = "graphs"
WORD = -1  # in place of an entity's index, where nothing is copied
RELATION_MARKS = ("<pad>", "<unk>", "<root>")
_VOCABULARIES, _REFERENCES = "vocabularies.json", "references.json"


@dataclass(frozen=True, eq=False)
class GraphPart:
    """A data split: N graphs with E entities, R relations and T texts.

    Args:
        titles: N rows of words.
        types: N rows, the type of each entity as its word in `GraphVocabularies.words`; their offsets are also the rows
            of `entities` at which the entities of a graph start.
        entities: E rows of entity words.
        relations: N rows; the values are [R, 3]: head, relation, tail.
        texts: int64 [N + 1], the rows of `targets` at which the texts of each graph start, and the end.
        targets: T rows of words that end with `EOS`; a copied entity is replaced by the word of its type.
        copies: T rows, `WORD` or the index of the entity that is copied, counted from 0 in its graph.
        references: N lists of plain texts.
        reference_words: the same texts tokenised, with single spaces, against which outputs are scored.
        names: text that is written where an entity is copied, for each entity; tokenised, with single spaces.
        categories: category of each graph; "" if the dataset has no categories.
    """

    titles: Ragged
    types: Ragged
    entities: Ragged
    relations: Ragged
    texts: Tensor
    targets: Ragged
    copies: Ragged
    references: list[list[str]]
    reference_words: list[list[str]]
    names: list[list[str]]
    categories: list[str]

    def __len__(self) -> int:
        return len(self.titles)

    def texts_of(self, graph: int) -> range:
        """Return the rows of `targets` and `copies` that are texts about a graph."""
        return range(int(self.texts[graph]), int(self.texts[graph + 1]))


@dataclass(frozen=True)
class GraphVocabularies:
    """The vocabularies of the ids in a `GraphPart`.

    Args:
        words: vocabulary of titles and texts: `pieces.MARKS`, then the types, then words.
        entities: vocabulary of entities.
        types: names of the entity types.
        relations: `RELATION_MARKS`, then the names, then each name's inverse in the same order.
    """

    words: Vocabulary
    entities: Vocabulary
    types: tuple[str, ...]
    relations: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words.words[: len(MARKS) + len(self.types)] != (*MARKS, *self.types):
            raise DataError("expected a vocabulary of words that starts with the marks and the types")

    @property
    def named(self) -> int:
        """Number of relations with a name; the id of an inverse relation is larger by this number."""
        return (len(self.relations) - len(RELATION_MARKS)) // 2

    def inverse(self, relations: Tensor) -> Tensor:
        """Return the ids of the inverse relations; the inverse of an unknown one is unknown.

        Args:
            relations: ids of relations with a name, or `UNK`, any shape.
        """
        return torch.where(relations == UNK, relations, relations + self.named)

    def as_bytes(self) -> bytes:
        """Return the content of the vocabulary file."""
        plain = {
            "words": self.words.words,
            "entities": self.entities.words,
            "types": self.types,
            "relations": self.relations,
        }
        return json.dumps(plain, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> GraphVocabularies:
        """Read the content that `as_bytes` returned."""
        plain = {name: tuple(map(as_text, words)) for name, words in json.loads(data).items()}
        return cls(Vocabulary(plain["words"]), Vocabulary(plain["entities"]), plain["types"], plain["relations"])


@dataclass(frozen=True, eq=False)
class PreparedGraphs:
    """A prepared dataset of graphs.

    Args:
        folder: folder of the dataset, which may not be written yet.
        vocabularies: vocabularies of the training set.
        parts: "train", "dev" and "test".
        manifest: how the dataset was made: settings, SHA-256 of inputs and files, and counts.
    """

    folder: Path
    vocabularies: GraphVocabularies
    parts: dict[str, GraphPart]
    manifest: dict[str, Any]

    def save(self) -> PreparedGraphs:
        """Write the folder atomically; a prepared folder of the same name is replaced.

        Returns:
            The folder, read back.

        Raises:
            DataError: the folder holds something else, or cannot be written.
        """
        files = {f"{name}.safetensors": _part_bytes(part) for name, part in self.parts.items()}
        files[_VOCABULARIES] = self.vocabularies.as_bytes()
        texts = {name: {key: getattr(part, key) for key in _TEXTS} for name, part in self.parts.items()}
        files[_REFERENCES] = json.dumps(texts, ensure_ascii=False).encode()
        write_folder(self.folder, files, self.manifest | {"task": TASK})
        return PreparedGraphs.load(self.folder)

    @classmethod
    def load(cls, folder: str | Path) -> PreparedGraphs:
        """Read a folder that `repulsive prepare graphs` made.

        Raises:
            DataError: there is no such folder, it is another dataset, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        task = read_manifest(folder).get("task")
        if task != TASK:
            raise DataError(f"{folder}: is dataset {task!r}, not {TASK!r}; prepare it with: repulsive prepare {TASK}")
        files, manifest = read_folder(folder)
        with content_errors(folder):
            texts = json.loads(files[_REFERENCES])
            parts = {name: _part(tensors_from_bytes(files[f"{name}.safetensors"]), texts[name]) for name in PARTS}
            vocabularies = GraphVocabularies.from_bytes(files[_VOCABULARIES])
            for name, part in parts.items():
                _check(part, vocabularies, f"{folder / name}.safetensors")
        return cls(folder, vocabularies, parts, manifest)

    def text(self, target: Tensor, copies: Tensor, names: list[str]) -> str:
        """Decode a target, or the output of a model, into words up to the first `EOS`.

        Args:
            target: word ids, [L].
            copies: `WORD`, or the index of the entity that is copied, [L].
            names: texts of the graph's entities, one entry of `GraphPart.names`.
        """
        words = []
        for word, copied in zip(target.tolist(), copies.tolist(), strict=True):
            if copied == WORD and word == EOS:
                break
            words.append(self.vocabularies.words.words[word] if copied == WORD else names[copied])
        return " ".join(words)


_TEXTS = ("references", "reference_words", "names", "categories")
_RAGGED = ("titles", "types", "entities", "relations", "targets", "copies")


def _part_bytes(part: GraphPart) -> bytes:
    tensors = {"texts": part.texts.diff().int()}
    for name in _RAGGED:
        rows: Ragged = getattr(part, name)
        tensors[name] = rows.values
        tensors[f"{name}.lengths"] = rows.lengths.int()
    return tensors_to_bytes(tensors)


def _part(tensors: dict[str, Tensor], texts: dict[str, Any]) -> GraphPart:
    rows: dict[str, Any] = {name: read_rows(tensors[name], tensors[f"{name}.lengths"]) for name in _RAGGED}
    starts = Ragged.from_lengths(tensors["texts"], tensors["texts"]).offsets
    return GraphPart(texts=starts, **rows, **{key: texts[key] for key in _TEXTS})


def _check(part: GraphPart, known: GraphVocabularies, where: str) -> None:
    """Raise an error for word, entity or relation ids out of range, which would fail in the middle of a training."""
    of_graphs: list[Sized] = [part.titles, part.types, part.relations, part.references, part.names, part.categories]
    counts = {len(part.texts) - 1, len(part.reference_words), *map(len, of_graphs)}
    texts, entities = int(part.texts[-1]), part.types.lengths  # entities: [N]
    text_counts = {len(part.targets), len(part.copies)}
    if len(counts) != 1 or text_counts != {texts} or len(part.entities) != int(entities.sum()):
        raise DataError(f"{where}: numbers of graphs, texts and entities do not match; prepare it again with --force")
    if not torch.equal(part.targets.offsets, part.copies.offsets) or int(part.texts.diff().min()) < 0:
        raise DataError(f"{where}: numbers of words and copies do not match; prepare it again with --force")
    for rows in (part.titles, part.types, part.targets):
        check_ids(rows.values, len(known.words), where)
    check_ids(part.entities.values, len(known.entities), where)
    check_ids(part.relations.values[:, 1], len(known.relations), where)
    ends = part.relations.values[:, ::2]  # [R, 2]
    of_relation = entities.repeat_interleave(part.relations.lengths).unsqueeze(1)  # [R, 1]
    of_text = entities.repeat_interleave(part.texts.diff()).repeat_interleave(part.copies.lengths)  # [words]
    copies = part.copies.values
    if bool(((ends < 0) | (ends >= of_relation)).any()) or bool(((copies < WORD) | (copies >= of_text)).any()):
        raise DataError(f"{where}: indices of entities out of range; prepare it again with --force")
    if [len(names) for names in part.names] != entities.tolist():
        raise DataError(f"{where}: numbers of names and entities do not match; prepare it again with --force")
