"""Byte-pair encoding for a language pair: convert texts to words (Moses) and to piece ids, and back.

One vocabulary serves both languages. Words are separated by single spaces; the first piece of a word starts with "▁".
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from repulsive.errors import DataError
from repulsive.extras import install_command
from repulsive.lab.text.folders import content_errors
from repulsive.lab.text.prepared import Prepared
from repulsive.lab.text.tokens import RESERVED, UNK, Ragged, Tokenizer, Vocabulary, tokenizer

BOS, EOS = 2, 3
MARKS = (*RESERVED, "<s>", "</s>")
TOKENIZERS = ("moses", "normalized", "none")
FILE = "pieces.json"
_START = "▁"
_AT_ONCE = 50_000  # sentences encoded together
_LONGEST_WORD = 1_000  # maximum characters; learning takes quadratic time in the length of a word


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tokenizer and byte-pair encoding of a language pair.

    Args:
        source: source language, such as "de".
        target: target language.
        tokenizer: "moses", "normalized" (moses after plain punctuation), or "none" if spaces separate the words.
        lowercase: lower-case the words.
        vocabulary: the four marks, then the pieces.
        model: the byte-pair encoding, as the package tokenizers writes it.
    """

    source: str
    target: str
    tokenizer: str
    lowercase: bool
    vocabulary: Vocabulary
    model: bytes

    @classmethod
    def of(cls, prepared: Prepared) -> Pieces:
        """Return the encoding that a prepared folder was made with.

        Raises:
            DataError: the folder is another dataset.
        """
        settings: Any = prepared.manifest.get("settings", {})
        if FILE not in prepared.extra:
            raise DataError(f"{prepared.folder}: is dataset {prepared.task!r}, not translation; prepare it as that")
        with content_errors(prepared.folder):
            kept = {name: settings[name] for name in ("source", "target", "tokenizer", "lowercase")}
        return cls(**kept, vocabulary=prepared.vocabulary, model=prepared.extra[FILE])

    def split(self, side: str) -> Tokenizer:
        """Return the function that splits a text into words.

        Args:
            side: "source" or "target".
        """
        return tokenizer(tokenizer_name(self.tokenizer, getattr(self, side)), lowercase=self.lowercase)

    def encode(self, sentences: Sequence[Sequence[str]], longest: int | None = None) -> Ragged:
        """Encode sentences as piece ids, each sentence followed by `EOS`.

        Args:
            sentences: words of each sentence.
            longest: maximum number of pieces in a sentence, without `EOS`; None: unlimited.
        """
        values, offsets = array("i"), array("q", [0])
        for start in range(0, len(sentences), _AT_ONCE):
            texts = [" ".join(words) for words in sentences[start : start + _AT_ONCE]]
            for encoding in self._bpe.encode_batch(texts, add_special_tokens=False):
                # A text may contain a mark such as "</s>": it becomes an unknown piece and does not end the sentence.
                values.extend([piece if piece >= len(MARKS) else UNK for piece in encoding.ids[:longest]])
                values.append(EOS)
                offsets.append(len(values))
        return Ragged(torch.tensor(values, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int64))

    def words(self, pieces: Iterable[int]) -> str:
        """Decode ids into words separated by single spaces, up to the first `EOS`.

        Args:
            pieces: ids of pieces.
        """
        parts = []
        for piece in pieces:
            if piece == EOS:
                break
            parts.append(f"{_START}{RESERVED[UNK]}" if piece == UNK else self.vocabulary.words[piece])
        return "".join(parts).replace(_START, " ").strip()

    def text(self, words: str) -> str:
        """Detokenise words of the target language; unchanged if the tokenizer is "none"."""
        if self.tokenizer == "none":
            return words
        joined: str = self._detokenizer.detokenize(words.split(" ")) if words else ""
        return joined

    @cached_property
    def _bpe(self) -> Any:
        package = _tokenizers()
        try:
            return package.Tokenizer.from_str(self.model.decode())
        except Exception as error:  # the package has no error class of its own
            why = " ".join(str(error).split())[:120]
            raise DataError(f"{FILE} of the prepared data is damaged ({why}); prepare it again with --force") from None

    @cached_property
    def _detokenizer(self) -> Any:
        tokenizer(f"moses-{self.target}")  # raises an error if Moses is not installed
        return importlib.import_module("sacremoses").MosesDetokenizer(lang=self.target)


def tokenizer_name(name: str, language: str) -> str:
    """Return the name that `tokens.tokenizer` takes; Moses' rules depend on the language."""
    return f"{name}-{language}" if name in ("moses", "normalized") else name


def learn(sentences: Iterable[Sequence[str]], size: int, minimum: int) -> tuple[Vocabulary, bytes]:
    """Learn a byte-pair encoding; the same sentences give the same encoding on any machine.

    Args:
        sentences: words of each sentence, of both languages together.
        size: maximum size of the vocabulary, the four marks included.
        minimum: occurrences that a pair of pieces needs to be merged.
    """
    package = _tokenizers()
    # The mark at the start of a word is an ordinary letter. The ids of the package's own "</w>" would depend on the
    # order of a hash table, so that every process would get another vocabulary.
    bpe = package.Tokenizer(package.models.BPE(unk_token=RESERVED[UNK]))
    bpe.pre_tokenizer = package.pre_tokenizers.Metaspace(replacement=_START, prepend_scheme="always", split=True)
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, min_frequency=minimum, special_tokens=list(MARKS), show_progress=False
    )
    kept = (" ".join(word for word in words if len(word) <= _LONGEST_WORD) for words in sentences)
    bpe.train_from_iterator(kept, trainer)
    written = json.loads(bpe.to_str())
    written["added_tokens"] = []  # otherwise a text that contains "</s>" would be encoded as the mark
    ids: dict[str, int] = written["model"]["vocab"]
    return Vocabulary(tuple(sorted(ids, key=ids.__getitem__))), json.dumps(written).encode()


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise DataError(f"byte pairs need the package tokenizers: {install_command('translation')}") from None
