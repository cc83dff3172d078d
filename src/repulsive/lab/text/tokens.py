"""Texts to numbers: tokenizers by name, a vocabulary, and many sentences of different lengths in two tensors."""

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

PAD, UNK = 0, 1
RESERVED = ("<pad>", "<unk>")
Tokenizer = Callable[[str], list[str]]

# Splits as GloVe's corpora do: do | n't, it | 's; links, @names and #tags stay whole.
_WORD = re.compile(
    r"https?://\S+|[@#]\w+|\w+(?=n['’]t\b)|n['’]t\b|['’](?:s|m|d|re|ve|ll)\b|\d+(?:[.,]\d+)+|\w+|[^\w\s]",
    re.IGNORECASE,
)


def tokenizer(name: str, *, lowercase: bool = False) -> Tokenizer:
    """A function from a text to its words.

    Args:
        name: "spacy", spaCy's rules for English, as in the paper (no model is needed); or "regex", near them, without
            spaCy. "moses-de" and so on are the rules machine translation uses, for a language; "normalized-de" first
            makes typographic quotes, dashes and spaces plain, by Moses' rules too; "none" splits at spaces and joins
            what subword-nmt has cut. They give different words: keep to one for a vocabulary and all it is used on.
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
        # It knows abbreviations by their capitals, so those go last.
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
            "tokenizer 'spacy' needs the package spacy (pip install spacy); 'regex' needs nothing, but its words differ"
        ) from None
    rules = spacy.blank("en").tokenizer
    return lambda text: [token.text for token in rules(text) if not token.is_space]


def _moses(language: str, normalized: bool) -> Tokenizer:
    try:
        sacremoses = importlib.import_module("sacremoses")
    except ImportError:
        raise DataError(
            "tokenizer 'moses' needs the package sacremoses (pip install 'repulsive[translation]'); texts whose words "
            "lie on spaces already need none: --tokenizer none"
        ) from None
    rules = sacremoses.MosesTokenizer(lang=language)
    plain = sacremoses.MosesPunctNormalizer(lang=language).normalize if normalized else str
    return lambda text: [str(word) for word in rules.tokenize(plain(text), escape=False)]


def _at_spaces(text: str) -> list[str]:
    return re.sub(r"@@( |$)", "", text).split()


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers; 0 is padding and 1 any unknown word.

    Args:
        words: all words, the two reserved ones first.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.words[:2] != RESERVED:
            raise DataError(f"a vocabulary starts with {RESERVED}, not {self.words[:2]}")
        if len(set(self.words)) != len(self.words):
            raise DataError("a vocabulary has every word once; this one repeats some")

    @classmethod
    def build(cls, sentences: Iterable[Sequence[str]], *, minimum: int = 1, most: int | None = None) -> Vocabulary:
        """The words of some sentences, the most frequent first, equally frequent ones by code point.

        Args:
            sentences: words of each sentence, of the training set alone.
            minimum: how often a word must occur.
            most: how many words to keep, the reserved ones included; None: all.
        """
        counts: Counter[str] = Counter()
        for sentence in sentences:
            counts.update(sentence)
        for word in RESERVED:  # a text may spell them; there they are unknown words
            counts.pop(word, None)
        kept = sorted((-count, word) for word, count in counts.items() if count >= minimum)
        return cls((*RESERVED, *(word for _, word in kept))[:most])

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each word; the reserved ones are not in it, for no text may produce padding."""
        return {word: i for i, word in enumerate(self.words) if i >= len(RESERVED)}

    def encode(self, sentences: Iterable[Sequence[str]], longest: int | None = None) -> Ragged:
        """Numbers of the words of each sentence.

        Args:
            sentences: words of each sentence.
            longest: cut sentences after so many words; None: never.
        """
        index, values, offsets = self.index, array("i"), array("q", [0])  # a list takes ten times the memory
        for sentence in sentences:
            values.extend([index.get(word, UNK) for word in sentence[:longest]])
            offsets.append(len(values))
        return Ragged(_tensor(values, torch.int32), _tensor(offsets, torch.int64))


def _tensor(values: array[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sentences of different lengths, one after the other.

    Args:
        values: int32 [words], all sentences.
        offsets: int64 [N + 1], where each starts, and the end.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """Join values and the lengths of the sentences, integers [N]."""
        start = torch.zeros(1, dtype=torch.int64)
        return cls(values, torch.cat([start, lengths.cumsum(0, dtype=torch.int64)]))

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Ragged:
        """Pack lists of ids."""
        values = torch.tensor([item for row in rows for item in row], dtype=torch.int32)
        return cls.from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Tensor:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sentence {i} of {len(self)}")
        i %= len(self)
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> Tensor:
        """int64 [N]"""
        return self.offsets.diff()

    def to(self, device: torch.device | str) -> Ragged:
        """The same sentences on another device."""
        return Ragged(self.values.to(device), self.offsets.to(device))

    def padded(self, indices: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Some sentences as a table.

        Args:
            indices: which, int64 [B].
            length: columns of the table; None: what the longest needs, at least one, for which a GPU is waited for.
                On a GPU a length that is too short cuts sentences; elsewhere it is an error.

        Returns:
            int32 [B, T], padded at the end, and the lengths [B].
        """
        starts = self.offsets[indices]  # [B]
        lengths = self.offsets[indices + 1] - starts  # [B]
        if length is None or indices.device.type == "cpu":
            needed = max(1, int(lengths.max()))
            length = needed if length is None else length
            if length < needed:
                raise ValueError(f"length={length} is too short for a sentence of {needed} words; cut in `encode`")
        places = torch.arange(length, device=indices.device)  # [T]
        real = places < lengths.unsqueeze(1)  # [B, T]
        if not len(self.values):
            return torch.full(real.shape, PAD, dtype=self.values.dtype, device=indices.device), lengths
        found = self.values[(starts.unsqueeze(1) + places).clamp(max=len(self.values) - 1)]  # [B, T]
        return torch.where(real, found, PAD), lengths
