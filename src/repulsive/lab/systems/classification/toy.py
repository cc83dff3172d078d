"""Toy sentence pairs in the layout of SNLI.

The second sentence repeats the opinion of the first, denies it, or is about another aspect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from repulsive.lab.systems.classification.generated import ASPECTS, OPINIONS, SUBJECTS

SIDES = ((1, 2), (-1, -2))  # the positive and the negative opinion scores
SIZES = {"train": 600, "dev": 90, "test": 90}


def pairs(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Generate toy sentence pairs as (label, premise, hypothesis)."""
    draw = random.Random(f"opinions/{seed}")
    labels = ("entailment", "contradiction", "neutral")
    for i in range(count):
        label, aspect, side = labels[i % 3], draw.choice(ASPECTS), draw.randrange(2)
        thing = draw.choice(SUBJECTS[aspect])
        other = draw.choice([name for name in ASPECTS if name != aspect])
        premise = f"The {thing} was {_opinion(draw, aspect, side)} , and we came on a monday ."
        if label == "neutral":
            hypothesis = f"The {draw.choice(SUBJECTS[other])} was {_opinion(draw, other, draw.randrange(2))} ."
        else:
            hypothesis = f"The {thing} was {_opinion(draw, aspect, side if label == 'entailment' else 1 - side)} ."
        yield label, premise, hypothesis


def write_opinions(folder: Path) -> Path:
    """Write toy sentence pairs to train.tsv, dev.tsv and test.tsv."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate(SIZES.items()):
        rows = "".join("\t".join(row) + "\n" for row in pairs(count, seed))
        (folder / f"{part}.tsv").write_text(f"gold_label\tsentence1\tsentence2\n{rows}")
    return folder


def _opinion(draw: random.Random, aspect: str, side: int) -> str:
    words: str = draw.choice(OPINIONS[aspect][draw.choice(SIDES[side])])
    return words
