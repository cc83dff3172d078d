"""Convert texts to token ids: tokenizers by name, a vocabulary, and ragged sentences stored in two tensors."""

from __future__ import annotations

import importlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.extras import install_command

PAD, UNK = 0, 1
RESERVED = ("<pad>", "<unk>")
Tokenizer = Callable[[str], list[str]]

# Splits as in GloVe's corpora: do | n't, it | 's; links, @names and #tags are not split.
_WORD = re.compile(
    r"https?://\S+|[@#]\w+|\w+(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|re|ve|ll)\b|\d+(?:[.,]\d+)+|\w+|[^\w\s]",
    re.IGNORECASE,
)


def tokenizer(name: str, *, lowercase: bool = False) -> Tokenizer:
    """Return a function that splits a text into words.

    Args:
        name: "spacy", spaCy's rules for English, as in the paper (no model is needed); "regex", similar rules without
            spaCy; "moses-de" and so on, the Moses rules for a language; "normalized-de", the same after typographic
            quotes, dashes and spaces are made plain; "none", splitting at spaces and joining the pieces of subword-nmt.
            Use the same tokenizer for a vocabulary and all texts encoded with it.
        lowercase: lower-case the words, as uncased vectors need.

    Raises:
        DataError: the name is unknown, or needs a package that is not installed.

    Example:
        >>> tokenizer("regex")("It's good, isn't it?")
        ['It', "'s", 'good', ',', 'is', "n't", 'it', '?']
    """
    if name == "regex":
        split: Tokenizer = _WORD.findall
    elif name == "spacy":
        split = _spacy()
    elif name.startswith(("moses-", "normalized-")):
        kind, _, language = name.partition("-")
        split = _moses(language, normalized=kind == "normalized")
        # Lower-case last: Moses recognises abbreviations by their capitals.
        return (lambda text: [word.lower() for word in split(text)]) if lowercase else split
    elif name == "none":
        split = _at_spaces
    else:
        raise DataError(f"tokenizer {name!r} is unknown; choose 'spacy' or 'regex'")
    return (lambda text: split(text.lower())) if lowercase else split


def _spacy() -> Tokenizer:
    try:
        spacy = importlib.import_module("spacy")
    except ImportError:
        raise DataError(
            f"tokenizer 'spacy' needs the package spacy ({install_command('classification')}); 'regex' does not, but "
            "its words differ"
        ) from None
    rules = spacy.blank("en").tokenizer
    return lambda text: [token.text for token in rules(text) if not token.is_space]


def _moses(language: str, normalized: bool) -> Tokenizer:
    try:
        sacremoses = importlib.import_module("sacremoses")
    except ImportError:
        raise DataError(
            f"tokenizer 'moses' needs the package sacremoses ({install_command('translation')}); for texts that are "
            "tokenised already, use --tokenizer none"
        ) from None
    rules = sacremoses.MosesTokenizer(lang=language)
    plain = sacremoses.MosesPunctNormalizer(lang=language).normalize if normalized else str
    return lambda text: [str(word) for word in rules.tokenize(plain(text), escape=False)]


def _at_spaces(text: str) -> list[str]:
    return re.sub(r"@@( |$)", "", text).split()


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids; id 0 is padding, and id 1 stands for any unknown word.

    Args:
        words: the words in the order of their ids, the two reserved words first.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[:2] != RESERVED:
            raise DataError(f"expected a vocabulary that starts with {RESERVED}, got {self.words[:2]}")
        if len(set(self.words)) != len(self.words):
            raise DataError("the vocabulary contains a word twice")

    @classmethod
    def build(cls, sentences: Iterable[Sequence[str]], *, minimum: int = 1, most: int | None = None) -> Vocabulary:
        """Build a vocabulary, sorted by descending frequency; equally frequent words are sorted by code point.

        Args:
            sentences: words of each sentence, of the training set alone.
            minimum: occurrences that a word needs.
            most: maximum size, the reserved words included; None: unlimited.
        """
        counts: Counter[str] = Counter()
        for sentence in sentences:
            counts.update(sentence)
        for word in RESERVED:  # reserved words in a text count as unknown words
            counts.pop(word, None)
        kept = sorted((-count, word) for word, count in counts.items() if count >= minimum)
        return cls((*RESERVED, *(word for _, word in kept))[:most])

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """Map each word to its id; reserved words are left out, so that no text can produce padding."""
        return {word: i for i, word in enumerate(self.words) if i >= len(RESERVED)}

    def encode(self, sentences: Iterable[Sequence[str]], longest: int | None = None) -> Ragged:
        """Encode the words of each sentence as ids.

        Args:
            sentences: words of each sentence.
            longest: maximum number of words in a sentence; None: unlimited.
        """
        index, values, offsets = self.index, array("i"), array("q", [0])  # lists would take ten times the memory
        for sentence in sentences:
            values.extend([index.get(word, UNK) for word in sentence[:longest]])
            offsets.append(len(values))
        return Ragged(_tensor(values, torch.int32), _tensor(offsets, torch.int64))


def _tensor(values: array[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sentences of different lengths, stored end to end.

    Args:
        values: ids of all sentences, int32 [words].
        offsets: int64 [N + 1], the start of each sentence, and the end of the last.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """Make ragged sentences from joined values and the length of each sentence, integers [N]."""
        start = torch.zeros(1, dtype=torch.int64)
        return cls(values, torch.cat([start, lengths.cumsum(0, dtype=torch.int64)]))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Make ragged sentences from lists of ids."""
        values = torch.tensor([item for row in rows for item in row], dtype=torch.int32)
        return cls.from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Tensor:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sentence {i} is out of range for {len(self)} sentences")
        i %= len(self)
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> Tensor:
        """Length of each sentence, int64 [N]."""
        return self.offsets.diff()

    def to(self, device: torch.device | str) -> Ragged:
        """Copy the sentences to a device."""
        return Ragged(self.values.to(device), self.offsets.to(device))

    def padded(self, indices: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Pad some sentences to the same length.

        Args:
            indices: indices of the sentences, int64 [B].
            length: padded length, T; None: that of the longest sentence, at least 1, which synchronises with a GPU.
                A length that is too short cuts sentences on a GPU, and is an error on a CPU.

        Returns:
            Ids padded at the end, int32 [B, T], and the lengths [B].
        """
        starts = self.offsets[indices]  # [B]
        lengths = self.offsets[indices + 1] - starts  # [B]
        if length is None or indices.device.type == "cpu":
            needed = max(1, int(lengths.max()))
            length = needed if length is None else length
            if length < needed:
                raise ValueError(f"length={length}: too short for a sentence of {needed} words; cut it in `encode`")
        positions = torch.arange(length, device=indices.device)  # [T]
        real = positions < lengths.unsqueeze(1)  # [B, T]
        if not len(self.values):
            return torch.full(real.shape, PAD, dtype=self.values.dtype, device=indices.device), lengths
        ids = self.values[(starts.unsqueeze(1) + positions).clamp(max=len(self.values) - 1)]  # [B, T]
        return torch.where(real, ids, PAD), lengths
