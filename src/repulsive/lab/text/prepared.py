"""Sentences as numbers, prepared once and read in a moment: safetensors and JSON in a folder, with checksums.

    prepared = Prepared.load("prepared/yelp")
    ids, lengths = prepared.parts["train"].sentences[0].padded(torch.tensor([0, 7]))

`repulsive prepare` makes the folder.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.lab.systems.classification.generated import ASPECTS, Review
from repulsive.lab.text.folders import read_folder, understood, write_folder
from repulsive.lab.text.tokens import Ragged, Vocabulary

PARTS = ("train", "dev", "test")
_TENSORS = ".safetensors"
_VECTORS = f"vectors{_TENSORS}"
_ASPECT, _PLACE = 17, 0xFFFF  # of an entry of the evidence: aspect << 17 | place << 1 | is it the opinion itself?


@dataclass(frozen=True, eq=False)
class Part:
    """Sentences, or pairs of them, with a class each.

    Args:
        sentences: one set of sentences, or two of the same size: premises and hypotheses, source and target.
        labels: int64 [N]; zeros where there are no classes. float32 [N] where they are points.
        evidence: of generated reviews, what `pack_evidence` makes; None for any other text.
    """

    sentences: tuple[Ragged, ...]
    labels: Tensor
    evidence: Ragged | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Tensor:
        """Words of each sentence, of a pair those of the longer one: int64 [N]."""
        return torch.stack([sentences.lengths for sentences in self.sentences]).amax(0)

    def to(self, device: torch.device | str) -> Part:
        """Sentences and labels on another device; evidence stays where it is."""
        return Part(tuple(sentences.to(device) for sentences in self.sentences), self.labels.to(device), self.evidence)

    def evidence_mask(self, indices: Tensor, length: int, *, sentences: bool = False) -> Tensor:
        """Where the evidence of each aspect is, as `metrics.classification.evidence_coverage` takes it.

        Args:
            indices: of which reviews, int64 [B].
            length: what they are padded to, T.
            sentences: mark the whole sentence on an aspect, not its opinion alone.

        Returns:
            bool [B, K, T], K aspects in the order of `generated.ASPECTS`, up to the last that is in this part; on the
            evidence's device.

        Raises:
            DataError: the sentences have no known evidence.
        """
        if self.evidence is None:
            raise DataError("these sentences have no known evidence; those of the task 'reviews' do")
        device = self.evidence.values.device
        packed, counts = self.evidence.padded(indices.to(device))  # [B, E]
        real = torch.arange(packed.shape[1], device=device) < counts.unsqueeze(1)  # [B, E]
        row, entry = (real if sentences else real & (packed % 2 == 1)).nonzero(as_tuple=True)
        values = packed[row, entry].long()
        mask = torch.zeros(len(indices), self._aspects, length, dtype=torch.bool, device=device)
        mask[row, values >> _ASPECT, values >> 1 & _PLACE] = True
        return mask

    @cached_property
    def _aspects(self) -> int:
        if self.evidence is None or not len(self.evidence.values):
            return 0
        return int(self.evidence.values.max() >> _ASPECT) + 1


@dataclass(frozen=True, eq=False)
class Prepared:
    """A task, ready to train on.

    Args:
        folder: where it is, or is to be.
        task: its name.
        classes: their names, in the order of the labels.
        vocabulary: the words of the training part.
        vectors: float32 [V, E], or None.
        parts: "train", "dev" and "test", and further ones to be tested on.
        manifest: how it was made: settings, SHA-256 of sources and files, and what was counted on the way.
        extra: files of the task's own, by name.
    """

    folder: Path
    task: str
    classes: tuple[str, ...]
    vocabulary: Vocabulary
    vectors: Tensor | None
    parts: dict[str, Part]
    manifest: dict[str, Any]
    extra: dict[str, bytes] = field(default_factory=dict)

    def save(self, *, half_vectors: bool = False) -> Prepared:
        """Write the folder aside and rename it into place; an older preparation there is replaced.

        Args:
            half_vectors: write the vectors in float16, half the size.

        Returns:
            What was written, read back.

        Raises:
            DataError: the folder holds something else, or cannot be written.
        """
        files = {f"{name}{_TENSORS}": _part_bytes(part, len(self.vocabulary)) for name, part in self.parts.items()}
        files |= self.extra
        files["vocabulary.json"] = json.dumps(self.vocabulary.words).encode()
        if self.vectors is not None:
            dtype = torch.float16 if half_vectors else torch.float32
            files[_VECTORS] = _tensor_bytes({"vectors": self.vectors.to(dtype)})
        write_folder(self.folder, files, self.manifest | {"task": self.task, "classes": list(self.classes)})
        return Prepared.load(self.folder)

    @classmethod
    def load(cls, folder: str | Path) -> Prepared:
        """Read a folder that `repulsive prepare` made.

        Raises:
            DataError: there is none, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        files, manifest = read_folder(folder)
        if "vocabulary.json" not in files:
            raise DataError(f"{folder}: is task {manifest.get('task')!r}, which has no sentences with labels")
        with understood(folder):
            vectors = None
            if _VECTORS in files:
                vectors = _tensors(files[_VECTORS])["vectors"].float()  # [V, E]
            vocabulary = Vocabulary(tuple(map(as_text, json.loads(files["vocabulary.json"]))))
            parts = {name: _part(_tensors(files[f"{name}{_TENSORS}"])) for name in part_names(files)}
            own = {"vocabulary.json", _VECTORS, *(f"{name}{_TENSORS}" for name in parts)}
            extra = {name: data for name, data in files.items() if name not in own}
            task, classes = as_text(manifest["task"]), tuple(map(as_text, manifest["classes"]))
            found = cls(folder, task, classes, vocabulary, vectors, parts, manifest, extra)
            found._check()
            return found

    def _check(self) -> None:
        """Refuse numbers that would be met in the middle of a training: words and classes that nobody knows."""
        known, table = len(self.vocabulary), self.vectors
        if table is not None and (table.ndim != 2 or len(table) != known):
            raise DataError(f"{self.folder}: vectors {list(table.shape)} do not fit {known:,} words; prepare it again")
        for name, part in self.parts.items():
            where = f"{self.folder / name}{_TENSORS}"
            if len({len(part), *map(len, part.sentences)}) != 1 or not part.sentences:
                raise DataError(f"{where}: has not as many labels as sentences; prepare it again with --force")
            for side in part.sentences:
                check_ids(side.values, known, where)
            if part.evidence is not None:
                check_ids(part.evidence.values >> _ASPECT, len(ASPECTS), where)
                ends = part.lengths.repeat_interleave(part.evidence.lengths)  # [entries], of the review of each
                if len(part.evidence) != len(part) or bool((part.evidence.values >> 1 & _PLACE >= ends).any()):
                    raise DataError(f"{where}: has evidence where there are no words; prepare it again with --force")
            labels = part.labels
            most = len(self.classes) or 1 if not labels.is_floating_point() else math.inf
            if len(labels) and not (labels.isfinite().all() and labels.max() < most and labels.min() >= -1):
                raise DataError(f"{where}: has labels that are none of {len(self.classes)} classes; prepare it again")


def part_names(files: Iterable[str]) -> list[str]:
    """The parts of a prepared folder, of which there are always `PARTS`.

    Args:
        files: their names, as the manifest lists them.
    """
    further = [name.removesuffix(_TENSORS) for name in files if name.endswith(_TENSORS) and name != _VECTORS]
    return list(dict.fromkeys([*PARTS, *further]))


def pack_evidence(reviews: Sequence[Review], longest: int | None = None) -> Ragged:
    """The evidence of generated reviews: one number for every word of a sentence on an aspect.

    Args:
        reviews: the reviews.
        longest: words after so many are cut, and their evidence with them.
    """
    rows = []
    for review in reviews:
        row = []
        for aspect, (start, end) in review.sentences.items():
            for place in range(start, min(end, longest or end)):
                row.append(ASPECTS.index(aspect) << _ASPECT | place << 1 | (place in review.evidence[aspect]))
        rows.append(torch.tensor(row, dtype=torch.int32))
    return _ragged(torch.cat(rows), torch.tensor([len(row) for row in rows]))


def _part_bytes(part: Part, words: int) -> bytes:
    narrow = words <= 1 << 16  # then 16 bits hold every id, read without a sign
    tensors = {"labels": part.labels.to(torch.float32 if part.labels.is_floating_point() else torch.int16)}
    for i, sentences in enumerate(part.sentences):
        tensors[f"values{i}"] = sentences.values.to(torch.int16) if narrow else sentences.values
        tensors[f"lengths{i}"] = sentences.lengths.to(torch.int32)
    if part.evidence is not None:
        tensors |= {"evidence": part.evidence.values, "evidences": part.evidence.lengths.to(torch.int32)}
    return _tensor_bytes(tensors)


def _part(tensors: dict[str, Tensor]) -> Part:
    sentences: list[Ragged] = []
    while (name := f"values{len(sentences)}") in tensors:
        values = tensors[name]
        values = values.int() & 0xFFFF if values.dtype == torch.int16 else values
        sentences.append(read_rows(values, tensors[f"lengths{len(sentences)}"]))
    evidence = read_rows(tensors["evidence"], tensors["evidences"]) if "evidence" in tensors else None
    labels = tensors["labels"]
    return Part(tuple(sentences), labels if labels.is_floating_point() else labels.long(), evidence)


def check_ids(ids: Tensor, count: int, where: str) -> None:
    """Refuse numbers of words, or of anything else of which there are `count`, that are none.

    Raises:
        DataError: with `where` they were found.
    """
    if not len(ids):
        return
    least, most = ids.aminmax()
    if int(least) < 0 or int(most) >= count:
        raise DataError(f"{where}: has numbers of words that are none of {count:,}; prepare it again with --force")


def as_text(value: Any) -> str:
    """The text that a value should be; anything else is a `TypeError`."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is no text")
    return value


def read_rows(values: Tensor, lengths: Tensor) -> Ragged:
    """Rows that were read from a file.

    Raises:
        DataError: they cannot be cut out of the values.
    """
    if values.is_floating_point() or lengths.is_floating_point():
        raise DataError("a file of words that are no whole numbers; prepare it again with --force")
    if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(values):
        raise DataError("a file whose lengths do not add up to the words there are; prepare it again with --force")
    return _ragged(values, lengths)


def _ragged(values: Tensor, lengths: Tensor) -> Ragged:
    return Ragged(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)]))


def _tensor_bytes(tensors: dict[str, Tensor]) -> bytes:
    written: bytes = _safetensors().save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return written


def _tensors(data: bytes) -> dict[str, Tensor]:
    read: dict[str, Tensor] = _safetensors().load(data)
    return read


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise DataError("prepared data need the package safetensors: pip install safetensors") from None
