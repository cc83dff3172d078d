"""Which items are judged, in which order, and which system stands on which side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.judge.texts import Pair, Source

TITLE = "Which text is better?"


@dataclass(frozen=True)
class Shown:
    """One pair as a judge sees it."""

    left: str
    right: str
    source: Source
    gold: str | None


@dataclass(frozen=True)
class Sheet:
    """All that is shown, and apart from it what is hidden.

    Args:
        title: of the page.
        shown: the pairs in their order.
        page: name of the content: answers to one page say nothing about another.
        seal: hash of salt and sides. It tells nothing, and proves afterwards that the key was not changed.
        salt: hidden.
        sides: hidden: where the first system's text stands, "left" or "right" for each pair.
        ids: hidden: those of the pairs.
    """

    title: str
    shown: list[Shown]
    page: str
    seal: str
    salt: str
    sides: list[str]
    ids: list[str]


def blind(pairs: Sequence[Pair], *, count: int = 50, seed: int = 0, title: str = TITLE) -> Sheet:
    """Draw pairs, put them in random order, and each system's text on a random side, as often left as right.

    All is a function of the seed *and* of all texts, so that the same files give the same page, while the seed alone,
    which anyone can guess, tells nothing about the sides.

    Args:
        pairs: to draw from.
        count: pairs to judge; all of them if there are fewer.
        seed: of the draw.
        title: of the page; judges read it.
    """
    if count < 1:
        raise DataError(f"{count} pairs to judge: at least one is needed")
    ordered = sorted(pairs, key=lambda pair: pair.id)
    root = _digest([seed, [[p.id, p.first, p.second, p.source, p.gold] for p in ordered]])
    drawn = sorted(ordered, key=lambda pair: _digest([root, "order", pair.id]))[:count]
    by_side = sorted((pair.id for pair in drawn), key=lambda name: _digest([root, "side", name]))
    odd_one = int(_digest([root, "odd one"]), 16) % 2
    on_left = set(by_side[: (len(drawn) + odd_one) // 2])
    sides = ["left" if pair.id in on_left else "right" for pair in drawn]
    shown = [
        Shown(*((p.first, p.second) if side == "left" else (p.second, p.first)), p.source, p.gold)
        for p, side in zip(drawn, sides, strict=True)
    ]
    salt = _digest([root, "salt"])
    closed = seal(salt, sides)
    page = _digest([title, closed, [[s.left, s.right, s.source, s.gold] for s in shown]])[:16]
    return Sheet(title, shown, page, closed, salt, sides, [pair.id for pair in drawn])


def seal(salt: str, sides: Sequence[str]) -> str:
    """SHA-256 of salt and sides."""
    return _digest([salt, list(sides)])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
