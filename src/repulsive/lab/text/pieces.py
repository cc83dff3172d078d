"""Texts of two languages as numbers, and back: Moses' words, cut into pieces by byte-pair encoding.

One vocabulary serves both languages. Words lie on single spaces; a piece that begins a word begins with "▁".
"""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from repulsive.errors import DataError
from repulsive.lab.text.folders import understood
from repulsive.lab.text.tokens import RESERVED, UNK, Ragged, Tokenizer, Vocabulary, tokenizer

if TYPE_CHECKING:
    from repulsive.lab.text.prepared import Prepared

BOS, EOS = 2, 3
MARKS = (*RESERVED, "<s>", "</s>")
TOKENIZERS = ("moses", "normalized", "none")
FILE = "pieces.json"
_START = "▁"
_AT_ONCE = 50_000  # sentences
_LONGEST_WORD = 1_000  # characters; what is longer is no word, and learning takes the square of its length


@dataclass(frozen=True, eq=False)
class Pieces:
    """How texts of a language pair become pieces.

    Args:
        source: language of the source, "de".
        target: language of the target.
        tokenizer: "moses", "normalized" (the same after plain punctuation), or "none" where spaces separate words.
        lowercase: lower-case the words.
        vocabulary: the pieces, after the four marks.
        model: the byte-pair encoding as the package tokenizers writes it.
    """

    source: str
    target: str
    tokenizer: str
    lowercase: bool
    vocabulary: Vocabulary
    model: bytes

    @classmethod
    def of(cls, prepared: Prepared) -> Pieces:
        """Those a prepared folder was made with.

        Raises:
            DataError: it is of another task.
        """
        asked: Any = prepared.manifest.get("settings", {})
        if FILE not in prepared.extra:
            raise DataError(f"{prepared.folder}: is task {prepared.task!r}, not translation; prepare it as that")
        with understood(prepared.folder):
            how = {name: asked[name] for name in ("source", "target", "tokenizer", "lowercase")}
        return cls(**how, vocabulary=prepared.vocabulary, model=prepared.extra[FILE])

    def split(self, side: str) -> Tokenizer:
        """The function from a text to its words.

        Args:
            side: "source" or "target".
        """
        return tokenizer(tokenizer_name(self.tokenizer, getattr(self, side)), lowercase=self.lowercase)

    def encode(self, sentences: Sequence[Sequence[str]], longest: int | None = None) -> Ragged:
        """Numbers of the pieces of words, each sentence ending with the mark of its end.

        Args:
            sentences: words of each sentence.
            longest: cut a sentence after so many pieces; None: never.
        """
        values, offsets = array("i"), array("q", [0])
        for start in range(0, len(sentences), _AT_ONCE):
            texts = [" ".join(words) for words in sentences[start : start + _AT_ONCE]]
            for found in self._bpe.encode_batch(texts, add_special_tokens=False):
                # A text may spell a mark, "</s>" say: there it is an unknown piece and ends nothing.
                values.extend([piece if piece >= len(MARKS) else UNK for piece in found.ids[:longest]])
                values.append(EOS)
                offsets.append(len(values))
        return Ragged(torch.tensor(values, dtype=torch.int32), torch.tensor(offsets, dtype=torch.int64))

    def words(self, pieces: Iterable[int]) -> str:
        """Numbers to words on single spaces; what stands after the end of the sentence is left out.

        Args:
            pieces: numbers of pieces.
        """
        found = []
        for piece in pieces:
            if piece == EOS:
                break
            found.append(f"{_START}{RESERVED[UNK]}" if piece == UNK else self.vocabulary.words[piece])
        return "".join(found).replace(_START, " ").strip()

    def text(self, words: str) -> str:
        """Words of the target language as a person would write them; as they are where nothing was tokenised."""
        if self.tokenizer == "none":
            return words
        joined: str = self._detokenizer.detokenize(words.split(" ")) if words else ""
        return joined

    @cached_property
    def _bpe(self) -> Any:
        package = _tokenizers()
        try:
            return package.Tokenizer.from_str(self.model.decode())
        except Exception as error:  # the package has no error of its own
            why = " ".join(str(error).split())[:120]
            raise DataError(f"{FILE} of the prepared data is damaged ({why}); prepare them with --force") from None

    @cached_property
    def _detokenizer(self) -> Any:
        tokenizer(f"moses-{self.target}")  # raises where it is not installed
        return importlib.import_module("sacremoses").MosesDetokenizer(lang=self.target)


def tokenizer_name(name: str, language: str) -> str:
    """As `tokens.tokenizer` has it: Moses' rules depend on the language."""
    return f"{name}-{language}" if name in ("moses", "normalized") else name


def learn(sentences: Iterable[Sequence[str]], size: int, minimum: int) -> tuple[Vocabulary, bytes]:
    """A byte-pair encoding: the same sentences give the same one, on any machine.

    Args:
        sentences: words of each sentence, of both languages together.
        size: pieces in the vocabulary, the four marks included, if there are so many.
        minimum: how often a pair occurs to become a piece.
    """
    package = _tokenizers()
    # A mark at the start of words is a letter like any other. The package's own "</w>" would be numbered in the order
    # of a hash table: another vocabulary in every process.
    bpe = package.Tokenizer(package.models.BPE(unk_token=RESERVED[UNK]))
    bpe.pre_tokenizer = package.pre_tokenizers.Metaspace(replacement=_START, prepend_scheme="always", split=True)
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, min_frequency=minimum, special_tokens=list(MARKS), show_progress=False
    )
    kept = (" ".join(word for word in words if len(word) <= _LONGEST_WORD) for words in sentences)
    bpe.train_from_iterator(kept, trainer)
    written = json.loads(bpe.to_str())
    written["added_tokens"] = []  # or a text that spells a mark would be taken for it
    numbers: dict[str, int] = written["model"]["vocab"]
    return Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__))), json.dumps(written).encode()


def _tokenizers() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise DataError("pieces of words need the package tokenizers: pip install 'repulsive[translation]'") from None
