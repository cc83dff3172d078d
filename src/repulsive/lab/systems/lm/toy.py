"""A toy text that is learned in seconds: facts, then a question that one of them answers.

    Cem likes maps. Ann makes soup. Who makes soup? Ann.

A model can memorise letters and templates, but not the last word of a line: a head has to look back for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

NAMES = ("Ann", "Bob", "Cem", "Dora", "Eve", "Finn", "Gus", "Hana")
VERBS = ("likes", "makes", "sells", "paints")
THINGS = ("tea", "soup", "maps", "songs", "hats", "boats")


def lines(count: int, seed: int | str) -> Iterator[str]:
    """Generate lines of two or three facts, a question and its answer, with line feeds.

    Args:
        count: number of lines.
        seed: random seed.
    """
    draw = random.Random(f"recall/{seed}")
    for _ in range(count):
        size = draw.randint(2, 3)
        pairs = zip(draw.sample(NAMES, size), draw.sample(THINGS, size), strict=True)
        facts = [(name, draw.choice(VERBS), thing) for name, thing in pairs]
        name, verb, thing = draw.choice(facts)
        text = " ".join(f"{who} {does} {what}." for who, does, what in facts)
        yield f"{text} Who {verb} {thing}? {name}.\n"
