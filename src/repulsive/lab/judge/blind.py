"""Draw pairs at random, shuffle them, and assign the two systems to random sides."""

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
    """A pair of texts as shown to a judge."""

    left: str
    right: str
    source: Source
    gold: str | None


@dataclass(frozen=True)
class Sheet:
    """Content of the page for judges, and what stays hidden from them.

    Args:
        title: page title.
        shown: the pairs in order.
        page: identifier of the page: a hash of its content.
        seal: hash of salt and sides. It does not reveal the sides, and it proves later that the key is unchanged.
        salt: hidden: random part of the seal.
        sides: hidden: side of the first system, "left" or "right" for each pair.
        ids: hidden: ids of the pairs.
    """

    title: str
    shown: list[Shown]
    page: str
    seal: str
    salt: str
    sides: list[str]
    ids: list[str]


def blind(pairs: Sequence[Pair], *, count: int = 50, seed: int = 0, title: str = TITLE) -> Sheet:
    """Draw pairs, shuffle them, and put each system on a random side, on the left as often as on the right.

    The result depends on the seed *and* on all texts. The same files give the same page, but the seed alone, which is
    easy to guess, does not reveal the sides.

    Args:
        pairs: pairs to draw from.
        count: pairs to judge; all of them if there are fewer.
        seed: random seed.
        title: page title, visible to judges.

    Raises:
        DataError: `count` is less than one.
    """
    if count < 1:
        raise DataError(f"expected at least one pair to judge, got count={count}")
    ordered = sorted(pairs, key=lambda pair: pair.id)
    root = _digest([seed, [[p.id, p.first, p.second, p.source, p.gold] for p in ordered]])
    drawn = sorted(ordered, key=lambda pair: _digest([root, "order", pair.id]))[:count]
    by_side = sorted((pair.id for pair in drawn), key=lambda name: _digest([root, "side", name]))
    extra = int(_digest([root, "odd one"]), 16) % 2  # with an odd number of pairs, the side of the last pair
    on_left = set(by_side[: (len(drawn) + extra) // 2])
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
    """Hash salt and sides with SHA-256."""
    return _digest([salt, list(sides)])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
