"""The WordPiece tokenizer of BERT and ELECTRA, with a vocabulary file of one piece per line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.extras import install_command
from repulsive.lab.text.lines import read_lines
from repulsive.lab.text.tokens import RESERVED, Vocabulary

FILE = "vocab.txt"
CLS, SEP, UNKNOWN, PADDING = "[CLS]", "[SEP]", "[UNK]", "[PAD]"
_LONGEST_WORD = 200  # characters; longer words are unknown, as in the official code
_AT_ONCE = 20_000  # texts encoded together


@dataclass(frozen=True, eq=False)
class WordPieces:
    """A WordPiece vocabulary.

    Args:
        pieces: the word pieces in the order of their ids.
        lowercase: lower-case texts and drop their accents, for "uncased" vocabularies.
    """

    pieces: tuple[str, ...]
    lowercase: bool = True

    def __post_init__(self) -> None:
        if missing := [mark for mark in (PADDING, UNKNOWN, CLS, SEP) if mark not in self.index]:
            raise DataError(f"not a WordPiece vocabulary: it lacks {', '.join(missing)}")
        if self.index[PADDING] != 0:
            raise DataError(f"{PADDING} must be the first piece of a vocabulary; here its id is {self.index[PADDING]}")
        if len(self.index) != len(self.pieces):
            raise DataError("the vocabulary contains a piece twice")

    @classmethod
    def read(cls, path: Path, lowercase: bool = True) -> WordPieces:
        """Read a vocabulary file, or the vocabulary file in a model's folder.

        Raises:
            DataError: there is no such file, or it is not a WordPiece vocabulary.
        """
        file = path / FILE if path.is_dir() else path
        try:
            return cls(tuple(line for _, line in read_lines(file)), lowercase)
        except DataError as error:
            raise DataError(str(error) if str(file) in str(error) else f"{file}: {error}") from None

    @cached_property
    def index(self) -> dict[str, int]:
        """Map each word piece to its id."""
        return {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as piece ids, without [CLS] and [SEP]; "[SEP]" in a text is split into brackets and letters."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), _AT_ONCE):
            batch = self._tokenizer.encode_batch(list(texts[start : start + _AT_ONCE]), add_special_tokens=False)
            ids += [encoding.ids for encoding in batch]
        return ids

    def as_bytes(self) -> bytes:
        """Return the content of the vocabulary file."""
        return "".join(f"{piece}\n" for piece in self.pieces).encode()

    def as_vocabulary(self) -> Vocabulary:
        """Return the vocabulary of a prepared folder: the same ids, the first two with their reserved names."""
        return Vocabulary((*RESERVED, *self.pieces[len(RESERVED) :]))

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            package = importlib.import_module("tokenizers")
        except ImportError:
            raise DataError(f"WordPiece needs the package tokenizers: {install_command('transformers')}") from None
        model = package.models.WordPiece(
            self.index, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD, continuing_subword_prefix="##"
        )
        made = package.Tokenizer(model)
        made.normalizer = package.normalizers.BertNormalizer(lowercase=self.lowercase)
        made.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
        return made
