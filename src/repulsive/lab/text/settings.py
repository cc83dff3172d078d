"""Settings that the datasets of several systems share, and their command-line options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.text.dataset import Option

_LEAST = {"minimum": 1, "most": 3, "longest": 1, "size": 1, "limit": 0}


@dataclass(frozen=True)
class Settings:
    """Settings for the conversion of texts to token ids.

    Args:
        tokenizer: name of the tokenizer; None: the dataset's default.
        lowercase: lower-case the texts.
        minimum: occurrences in the training set that a word needs to enter the vocabulary.
        most: size of the vocabulary, reserved words included; None: unlimited, or the dataset's default.
        longest: maximum length of a text in words; None: the dataset's default.
        vectors: a file of GloVe vectors.
        size: dimension of the vectors; None: that of the first line of the file.
        half_vectors: store the vectors in float16.
        seed: random seed.
        limit: number of bad lines that may be skipped in a file.
    """

    tokenizer: str | None = None
    lowercase: bool = True
    minimum: int = 2
    most: int | None = None
    longest: int | None = None
    vectors: Path | None = None
    size: int | None = None
    half_vectors: bool = False
    seed: int = 0
    limit: int = 20

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise DataError(f"{name}={value}: expected at least {least}")
        if self.vectors is None and (self.size is not None or self.half_vectors):
            raise DataError("size and half_vectors describe word vectors: give a file with --vectors")

    def stored(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that a manifest stores, together with the dataset's own options.

        Args:
            options: the dataset's options that were given, or whose defaults are always stored.
        """
        vectors = self.vectors.name if self.vectors else None
        plain = asdict(self) | {"vectors": vectors} | dict(options)
        return dict(json.loads(json.dumps(plain)))


_SHARED = {
    option.name: option
    for option in (
        Option("tokenizer", str, "Tokenizer: spacy or regex.", "spacy"),
        Option("lowercase", bool, "Lower-case the texts.", True),
        Option("minimum", int, "Occurrences in the training set that a word needs to enter the vocabulary.", 2),
        Option("most", int, "Maximum size of the vocabulary; unlimited if not given."),
        Option("longest", int, "Maximum length of a text in words; the rest is cut off."),
        Option("vectors", Path, "File of pre-trained GloVe word vectors (text format)."),
        Option("size", int, "Dimension of the word vectors; by default that of the first line of the file."),
        Option("half_vectors", bool, "Store the word vectors in float16.", flag="--half-vectors"),
        Option("seed", int, "Random seed.", 0),
        Option("limit", int, "Number of bad lines that may be skipped in a file.", 20),
    )
}


def shared_options(**changes: Mapping[str, Any]) -> tuple[Option, ...]:
    """Return the command-line options of `Settings`, in the order of its fields.

    Args:
        changes: option name -> fields of `Option` that differ for a dataset, such as its default.
    """
    return tuple(replace(option, **changes.get(name, {})) for name, option in _SHARED.items())
