"""Graphs as numbers, prepared once and read in a moment: safetensors and JSON in a folder, with checksums.

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
from repulsive.lab.text.folders import read_folder, read_manifest, understood, write_folder
from repulsive.lab.text.pieces import EOS, MARKS
from repulsive.lab.text.prepared import PARTS, as_text, check_ids, read_rows, tensors_from_bytes, tensors_to_bytes
from repulsive.lab.text.tokens import UNK, Ragged, Vocabulary

TASK = "graphs"
WORD = -1  # in place of an entity's number, where nothing is copied
ROOT = 2
RELATION_MARKS = ("<pad>", "<unk>", "<root>")
_VOCABULARIES, _REFERENCES = "vocabularies.json", "references.json"


@dataclass(frozen=True, eq=False)
class GraphPart:
    """N graphs with E entities, R relations and T texts.

    Args:
        titles: N rows of words.
        types: N rows, the type of each entity as its word in `GraphVocabularies.words`; their offsets are also where
            the entities of a graph start in `entities`.
        entities: E rows of entity words.
        relations: N rows; the values are [R, 3]: head, relation, tail.
        texts: int64 [N + 1], where the texts of each graph start in `targets`, and the end.
        targets: T rows of words that end with `EOS`; a copied entity stands there as the word of its type.
        copies: T rows, `WORD` or the number of the entity that is copied, counted from 0 in its graph.
        references: N lists of texts, plain.
        reference_words: the same as words separated by spaces, what texts are scored against.
        names: what a copy of each entity writes, words separated by spaces.
        categories: of each graph; "" where the data have none.
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
        """Rows of `targets` and `copies` that are texts of a graph."""
        return range(int(self.texts[graph]), int(self.texts[graph + 1]))


@dataclass(frozen=True)
class GraphVocabularies:
    """What the numbers of a `GraphPart` mean.

    Args:
        words: of titles and texts: `pieces.MARKS`, then the types, then words.
        entities: words of entities.
        types: of entities.
        relations: `RELATION_MARKS`, then the names, then each name's inverse in the same order.
    """

    words: Vocabulary
    entities: Vocabulary
    types: tuple[str, ...]
    relations: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words.words[: len(MARKS) + len(self.types)] != (*MARKS, *self.types):
            raise DataError("words of graphs start with the marks and the types; these do not")

    @property
    def named(self) -> int:
        """How many relations have a name; a relation's inverse is so many further."""
        return (len(self.relations) - len(RELATION_MARKS)) // 2

    def inverse(self, relations: Tensor) -> Tensor:
        """Numbers of the inverse relations; that of an unknown one is unknown.

        Args:
            relations: numbers of relations with a name, or `UNK`, any shape.
        """
        return torch.where(relations == UNK, relations, relations + self.named)

    def as_bytes(self) -> bytes:
        """As the file has them."""
        plain = {
            "words": self.words.words,
            "entities": self.entities.words,
            "types": self.types,
            "relations": self.relations,
        }
        return json.dumps(plain, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> GraphVocabularies:
        """Read again what `as_bytes` wrote."""
        plain = {name: tuple(map(as_text, words)) for name, words in json.loads(data).items()}
        return cls(Vocabulary(plain["words"]), Vocabulary(plain["entities"]), plain["types"], plain["relations"])


@dataclass(frozen=True, eq=False)
class PreparedGraphs:
    """Graphs, ready to train on.

    Args:
        folder: where they are, or are to be.
        vocabularies: of the training part.
        parts: "train", "dev" and "test".
        manifest: how they were made: settings, SHA-256 of sources and files, and what was counted on the way.
    """

    folder: Path
    vocabularies: GraphVocabularies
    parts: dict[str, GraphPart]
    manifest: dict[str, Any]

    def save(self) -> PreparedGraphs:
        """Write the folder aside and rename it into place; an older preparation there is replaced.

        Returns:
            What was written, read back.

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
            DataError: there is none, it is of another task, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        task = read_manifest(folder).get("task")
        if task != TASK:
            raise DataError(f"{folder}: is task {task!r}, not {TASK!r}; prepare it with: repulsive prepare {TASK}")
        files, manifest = read_folder(folder)
        with understood(folder):
            told = json.loads(files[_REFERENCES])
            parts = {name: _part(tensors_from_bytes(files[f"{name}.safetensors"]), told[name]) for name in PARTS}
            vocabularies = GraphVocabularies.from_bytes(files[_VOCABULARIES])
            for name, part in parts.items():
                _check(part, vocabularies, f"{folder / name}.safetensors")
        return cls(folder, vocabularies, parts, manifest)

    def text(self, target: Tensor, copies: Tensor, names: list[str]) -> str:
        """Words of a target, or of what a model wrote in its form; what follows `EOS` is left out.

        Args:
            target: numbers of words, [L].
            copies: `WORD`, or the number of the entity that is copied, [L].
            names: of the graph's entities, one of `GraphPart.names`.
        """
        found = []
        for word, copied in zip(target.tolist(), copies.tolist(), strict=True):
            if copied == WORD and word == EOS:
                break
            found.append(self.vocabularies.words.words[word] if copied == WORD else names[copied])
        return " ".join(found)


_TEXTS = ("references", "reference_words", "names", "categories")
_RAGGED = ("titles", "types", "entities", "relations", "targets", "copies")


def _part_bytes(part: GraphPart) -> bytes:
    tensors = {"texts": part.texts.diff().int()}
    for name in _RAGGED:
        rows: Ragged = getattr(part, name)
        tensors[name] = rows.values
        tensors[f"{name}.lengths"] = rows.lengths.int()
    return tensors_to_bytes(tensors)


def _part(tensors: dict[str, Tensor], told: dict[str, Any]) -> GraphPart:
    rows: dict[str, Any] = {name: read_rows(tensors[name], tensors[f"{name}.lengths"]) for name in _RAGGED}
    texts = Ragged.from_lengths(tensors["texts"], tensors["texts"]).offsets
    return GraphPart(texts=texts, **rows, **{key: told[key] for key in _TEXTS})


def _check(part: GraphPart, known: GraphVocabularies, where: str) -> None:
    """Refuse numbers that would be met in the middle of a training: of words, entities or relations that are none."""
    of_graphs: list[Sized] = [part.titles, part.types, part.relations, part.references, part.names, part.categories]
    counts = {len(part.texts) - 1, len(part.reference_words), *map(len, of_graphs)}
    texts, entities = int(part.texts[-1]), part.types.lengths  # entities: [N]
    told_texts, all_entities = {len(part.targets), len(part.copies)}, int(entities.sum())
    if len(counts) != 1 or told_texts != {texts} or len(part.entities) != all_entities:
        raise DataError(f"{where}: has not as many texts or entities as its graphs; prepare it again with --force")
    if not torch.equal(part.targets.offsets, part.copies.offsets) or int(part.texts.diff().min()) < 0:
        raise DataError(f"{where}: has not as many copies as words; prepare it again with --force")
    for rows in (part.titles, part.types, part.targets):
        check_ids(rows.values, len(known.words), where)
    check_ids(part.entities.values, len(known.entities), where)
    check_ids(part.relations.values[:, 1], len(known.relations), where)
    ends = part.relations.values[:, ::2]  # [R, 2]
    of_relation = entities.repeat_interleave(part.relations.lengths).unsqueeze(1)  # [R, 1]
    of_text = entities.repeat_interleave(part.texts.diff()).repeat_interleave(part.copies.lengths)  # [words]
    copies = part.copies.values
    if bool(((ends < 0) | (ends >= of_relation)).any()) or bool(((copies < WORD) | (copies >= of_text)).any()):
        raise DataError(f"{where}: names entities that its graphs do not have; prepare it again with --force")
    if [len(names) for names in part.names] != entities.tolist():
        raise DataError(f"{where}: has not as many names as entities; prepare it again with --force")
