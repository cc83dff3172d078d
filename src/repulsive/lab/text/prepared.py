"""Prepared sentences: token ids, labels and a vocabulary in a folder of safetensors and JSON files with checksums.

    prepared = Prepared.load("prepared/yelp")
    ids, lengths = prepared.parts["train"].sentences[0].padded(torch.tensor([0, 7]))

`repulsive prepare` makes the folder.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.extras import install_command
from repulsive.lab.text.evidence import check_evidence, count_aspects, unpack_mask
from repulsive.lab.text.folders import content_errors, read_folder, write_folder
from repulsive.lab.text.tokens import Ragged, Vocabulary

PARTS = ("train", "dev", "test")
_TENSORS = ".safetensors"
_VECTORS = f"vectors{_TENSORS}"


@dataclass(frozen=True, eq=False)
class Part:
    """A data split: sentences, or sentence pairs, with one label each.

    Args:
        sentences: one set of sentences, or two of the same size: premises and hypotheses, or source and target.
        labels: int64 [N] class indices, zeros without classes; float32 [N] for scores.
        evidence: evidence of generated reviews, packed as in `evidence`; None for any other text.
    """

    sentences: tuple[Ragged, ...]
    labels: Tensor
    evidence: Ragged | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> Tensor:
        """Words per sentence, int64 [N]; for a pair, the words of the longer sentence."""
        return torch.stack([sentences.lengths for sentences in self.sentences]).amax(0)

    def to(self, device: torch.device | str) -> Part:
        """Copy sentences and labels to a device; the evidence stays where it is."""
        return Part(tuple(sentences.to(device) for sentences in self.sentences), self.labels.to(device), self.evidence)

    def evidence_mask(self, indices: Tensor, length: int, *, sentences: bool = False) -> Tensor:
        """Mark the evidence of each aspect, in the form that `metrics.classification.evidence_coverage` takes.

        Args:
            indices: indices of the reviews, int64 [B].
            length: padded length of a review, T.
            sentences: mark the whole sentence about an aspect, not its opinion alone.

        Returns:
            bool [B, K, T], K aspects in the order of `generated.ASPECTS`, up to the last one in this split; on the
            device of the evidence.

        Raises:
            DataError: the sentences have no known evidence.
        """
        if self.evidence is None:
            raise DataError("these sentences have no known evidence; only the dataset 'reviews' has")
        return unpack_mask(self.evidence, self._aspects, indices, length, sentences=sentences)

    @cached_property
    def _aspects(self) -> int:
        return 0 if self.evidence is None else count_aspects(self.evidence)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared dataset of labelled sentences.

    Args:
        folder: folder of the dataset, which may not be written yet.
        task: name of the dataset.
        classes: names of the classes, in the order of the labels.
        vocabulary: words of the training set.
        vectors: word vectors, float32 [V, E], or None.
        parts: "train", "dev" and "test", and further test sets.
        manifest: how the dataset was made: settings, SHA-256 of inputs and files, and counts.
        extra: contents of files that only some datasets have, by name.
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
        """Write the folder atomically; a prepared folder of the same name is replaced.

        Args:
            half_vectors: store the vectors in float16.

        Returns:
            The folder, read back.

        Raises:
            DataError: the folder holds something else, or cannot be written.
        """
        files = {f"{name}{_TENSORS}": _part_bytes(part, len(self.vocabulary)) for name, part in self.parts.items()}
        files |= self.extra
        files["vocabulary.json"] = json.dumps(self.vocabulary.words).encode()
        if self.vectors is not None:
            dtype = torch.float16 if half_vectors else torch.float32
            files[_VECTORS] = tensors_to_bytes({"vectors": self.vectors.to(dtype)})
        write_folder(self.folder, files, self.manifest | {"task": self.task, "classes": list(self.classes)})
        return Prepared.load(self.folder)

    @classmethod
    def load(cls, folder: str | Path) -> Prepared:
        """Read a folder that `repulsive prepare` made.

        Raises:
            DataError: there is no such folder, or a file in it is missing or damaged.
        """
        folder = Path(folder)
        files, manifest = read_folder(folder)
        if "vocabulary.json" not in files:
            raise DataError(f"{folder}: is dataset {manifest.get('task')!r}, which has no sentences with labels")
        with content_errors(folder):
            vectors = None
            if _VECTORS in files:
                vectors = tensors_from_bytes(files[_VECTORS])["vectors"].float()  # [V, E]
            vocabulary = Vocabulary(tuple(map(as_text, json.loads(files["vocabulary.json"]))))
            parts = {name: _part(tensors_from_bytes(files[f"{name}{_TENSORS}"])) for name in part_names(files)}
            own = {"vocabulary.json", _VECTORS, *(f"{name}{_TENSORS}" for name in parts)}
            extra = {name: data for name, data in files.items() if name not in own}
            task, classes = as_text(manifest["task"]), tuple(map(as_text, manifest["classes"]))
            prepared = cls(folder, task, classes, vocabulary, vectors, parts, manifest, extra)
            prepared._check()
            return prepared

    def _check(self) -> None:
        """Raise an error for ids or labels out of range, which would fail in the middle of a training."""
        words, table = len(self.vocabulary), self.vectors
        if table is not None and (table.ndim != 2 or len(table) != words):
            raise DataError(f"{self.folder}: vectors {list(table.shape)} do not fit {words:,} words; prepare it again")
        for name, part in self.parts.items():
            where = f"{self.folder / name}{_TENSORS}"
            if len({len(part), *map(len, part.sentences)}) != 1 or not part.sentences:
                raise DataError(f"{where}: labels and sentences differ in number; prepare it again with --force")
            for side in part.sentences:
                check_ids(side.values, words, where)
            if part.evidence is not None:
                check_evidence(part.evidence, part.lengths, where)
            labels = part.labels
            end = len(self.classes) or 1 if not labels.is_floating_point() else math.inf
            if len(labels) and not (labels.isfinite().all() and labels.max() < end and labels.min() >= -1):
                raise DataError(f"{where}: labels out of range for {len(self.classes)} classes; prepare it again")


def part_names(files: Iterable[str]) -> list[str]:
    """Return the names of the data splits of a prepared folder; those in `PARTS` are always included, and come first.

    Args:
        files: names of the folder's files, as the manifest lists them.
    """
    further = [name.removesuffix(_TENSORS) for name in files if name.endswith(_TENSORS) and name != _VECTORS]
    return list(dict.fromkeys([*PARTS, *further]))


def _part_bytes(part: Part, words: int) -> bytes:
    narrow = words <= 1 << 16  # 16 bits then hold every id, as unsigned integers
    tensors = {"labels": part.labels.to(torch.float32 if part.labels.is_floating_point() else torch.int16)}
    for i, sentences in enumerate(part.sentences):
        tensors[f"values{i}"] = sentences.values.to(torch.int16) if narrow else sentences.values
        tensors[f"lengths{i}"] = sentences.lengths.to(torch.int32)
    if part.evidence is not None:
        tensors |= {"evidence": part.evidence.values, "evidences": part.evidence.lengths.to(torch.int32)}
    return tensors_to_bytes(tensors)


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
    """Raise an error for ids that are not in 0 .. count - 1.

    Args:
        ids: ids, of any shape.
        count: number of words, or of whatever the ids stand for.
        where: the file, for the error message.

    Raises:
        DataError: an id is out of range.
    """
    if not len(ids):
        return
    least, most = ids.aminmax()
    if int(least) < 0 or int(most) >= count:
        raise DataError(f"{where}: ids out of range, expected 0 to {count - 1:,}; prepare it again with --force")


def as_text(value: Any) -> str:
    """Check that a value is a string and return it; raise `TypeError` otherwise."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {str(value)[:40]}")
    return value


def read_rows(values: Tensor, lengths: Tensor) -> Ragged:
    """Check and join the values and lengths of rows that were read from a file.

    Raises:
        DataError: values or lengths are not integers, or the lengths do not add up to the number of values.
    """
    if values.is_floating_point() or lengths.is_floating_point():
        raise DataError("expected integer ids, got floating-point numbers; prepare it again with --force")
    if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(values):
        raise DataError("the lengths of rows do not add up to the number of ids; prepare it again with --force")
    return Ragged.from_lengths(values, lengths)


def tensors_to_bytes(tensors: dict[str, Tensor]) -> bytes:
    """Encode tensors as the content of a safetensors file."""
    written: bytes = _safetensors().save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return written


def tensors_from_bytes(data: bytes) -> dict[str, Tensor]:
    """Decode tensors from the content of a safetensors file."""
    read: dict[str, Tensor] = _safetensors().load(data)
    return read


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise DataError(f"prepared data need the package safetensors: {install_command('train')}") from None
