"""A text that is learned in seconds: facts, then a question whose answer stands among them.

    Cem likes maps. Ann makes soup. Who makes soup? Ann.

Letters and templates can be learned by heart; the last word of a line cannot: a head has to look back for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

NAMES = ("Ann", "Bob", "Cem", "Dora", "Eve", "Finn", "Gus", "Hana")
VERBS = ("likes", "makes", "sells", "paints")
THINGS = ("tea", "soup", "maps", "songs", "hats", "boats")


def lines(count: int, seed: int | str) -> Iterator[str]:
    """Lines of two or three facts, a question and its answer, each with its line feed.

    Args:
        count: number of lines.
        seed: of what is drawn.
    """
    draw = random.Random(f"recall/{seed}")
    for _ in range(count):
        size = draw.randint(2, 3)
        pairs = zip(draw.sample(NAMES, size), draw.sample(THINGS, size), strict=True)
        facts = [(name, draw.choice(VERBS), thing) for name, thing in pairs]
        name, verb, thing = draw.choice(facts)
        told = " ".join(f"{who} {does} {what}." for who, does, what in facts)
        yield f"{told} Who {verb} {thing}? {name}.\n"
