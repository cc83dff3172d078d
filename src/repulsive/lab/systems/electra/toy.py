"""A toy corpus that is learned in seconds, and its vocabulary: all words of a document start with the same syllable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

STARTS = ("ka", "lo", "mi", "nu", "pe")
WORDS = [a + b for a in STARTS for b in ("ra", "si", "to", "vu", "ze")]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_vocabulary(folder: Path, more: Sequence[str] = ()) -> Path:
    """Write `vocab.txt`, with the word pieces in `more` at its end."""
    path = folder / "vocab.txt"
    pieces = dict.fromkeys([*MARKS, *WORDS, ".", "##s", *more])
    path.write_text("".join(f"{piece}\n" for piece in pieces))
    return path


def write_corpus(folder: Path, documents: int = 200) -> Path:
    """Write documents of five different words each, so that masked and replaced words can be recognised."""
    draw, texts = random.Random(0), []
    for _ in range(documents):
        start = draw.choice(STARTS)
        words = [word for word in WORDS if word.startswith(start)]
        lengths = [draw.randint(4, 14) for _ in range(draw.randint(2, 9))]
        texts.append("\n".join(" ".join(draw.choices(words, k=n)).capitalize() + "." for n in lengths))
    path = folder / "corpus.txt"
    path.write_text("\n\n".join(texts) + "\n")
    return path
