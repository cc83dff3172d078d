"""WordPiece as BERT and ELECTRA have it: a vocabulary file of one piece a line, and texts as numbers of pieces."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.text.lines import read_lines
from repulsive.lab.text.tokens import RESERVED, Vocabulary

FILE = "vocab.txt"
CLS, SEP, UNKNOWN, PADDING = "[CLS]", "[SEP]", "[UNK]", "[PAD]"
_LONGEST_WORD = 200  # characters; longer ones are unknown, as in the official code
_AT_ONCE = 20_000  # texts


@dataclass(frozen=True, eq=False)
class WordPieces:
    """How texts become pieces.

    Args:
        pieces: all of them, in the order of their numbers.
        lowercase: lower-case the texts and drop their accents, for "uncased" vocabularies.
    """

    pieces: tuple[str, ...]
    lowercase: bool = True

    def __post_init__(self) -> None:
        if missing := [mark for mark in (PADDING, UNKNOWN, CLS, SEP) if mark not in self.index]:
            raise DataError(f"a WordPiece vocabulary has {', '.join(missing)}; this one does not")
        if self.index[PADDING] != 0:
            raise DataError(f"{PADDING} must be the first piece of a vocabulary, not number {self.index[PADDING]}")
        if len(self.index) != len(self.pieces):
            raise DataError("a vocabulary has every piece once; this one repeats some")

    @classmethod
    def read(cls, path: Path, lowercase: bool = True) -> WordPieces:
        """Of a vocabulary file, or of a folder that has one.

        Raises:
            DataError: there is none, or it is not one of WordPiece.
        """
        file = path / FILE if path.is_dir() else path
        try:
            return cls(tuple(line for _, line in read_lines(file)), lowercase)
        except DataError as error:
            raise DataError(str(error) if str(file) in str(error) else f"{file}: {error}") from None

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each piece."""
        return {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Numbers of the pieces of each text, without marks; a text that spells "[SEP]" has brackets and letters."""
        found: list[list[int]] = []
        for start in range(0, len(texts), _AT_ONCE):
            batch = self._tokenizer.encode_batch(list(texts[start : start + _AT_ONCE]), add_special_tokens=False)
            found += [encoding.ids for encoding in batch]
        return found

    def as_bytes(self) -> bytes:
        """The vocabulary file."""
        return "".join(f"{piece}\n" for piece in self.pieces).encode()

    def as_vocabulary(self) -> Vocabulary:
        """What a prepared folder keeps: the same numbers, the first two under the names they have everywhere."""
        return Vocabulary((*RESERVED, *self.pieces[len(RESERVED) :]))

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            package = importlib.import_module("tokenizers")
        except ImportError:
            raise DataError("WordPiece needs the package tokenizers: pip install 'repulsive[transformers]'") from None
        model = package.models.WordPiece(
            self.index, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD, continuing_subword_prefix="##"
        )
        made = package.Tokenizer(model)
        made.normalizer = package.normalizers.BertNormalizer(lowercase=self.lowercase)
        made.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
        return made
