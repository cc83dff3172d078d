"""A toy language pair that is learned in seconds: numbers spelt in two languages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

DIGITS = {
    "de": ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    "en": ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
}


def sentence(numbers: Sequence[int], language: str) -> str:
    """Spell digits as a sentence, with a capital letter and a full stop."""
    words = " ".join(DIGITS[language][n] for n in numbers)
    return f"{words[0].upper()}{words[1:]}."


def write_pairs(
    folder: Path,
    sizes: Sequence[int] = (200, 20, 20),
    names: Sequence[str] = ("train", "valid", "test"),
    longest: int = 6,
) -> Path:
    """Write toy sentence pairs to train.de, train.en and so on; no test sentence is in the training set."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    seen = set()
    for name, size in zip(names, sizes, strict=True):
        some: list[tuple[int, ...]] = []
        while len(some) < size:
            numbers = tuple(draw.randrange(10) for _ in range(draw.randint(2, longest)))
            if numbers not in seen:
                seen.add(numbers)
                some.append(numbers)
        for language in DIGITS:
            text = "".join(sentence(numbers, language) + "\n" for numbers in some)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    return folder
