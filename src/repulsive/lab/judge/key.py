"""The key: which side was which system. Written beside the page, and not for the judges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repulsive.errors import DataError
from repulsive.lab.judge.blind import Sheet, seal

FORMAT = "repulsive-judge-key"


@dataclass(frozen=True)
class Key:
    """What the page hides.

    Args:
        page: name of the page's content.
        title: of the page.
        systems: names of the first system, whose wins are counted, and of the second.
        seed: of the draw.
        salt: of the seal.
        seal: hash of salt and sides.
        sides: where the first system's text stands, pair by pair.
        ids: of the pairs.
    """

    page: str
    title: str
    systems: tuple[str, str]
    seed: int
    salt: str
    seal: str
    sides: list[str]
    ids: list[str]

    @classmethod
    def of(cls, sheet: Sheet, systems: tuple[str, str], seed: int) -> Key:
        return cls(sheet.page, sheet.title, systems, seed, sheet.salt, sheet.seal, sheet.sides, sheet.ids)

    def as_json(self) -> str:
        items = [
            {"item": number, "id": name, "first": side}
            for number, (name, side) in enumerate(zip(self.ids, self.sides, strict=True), 1)
        ]
        told = {"format": FORMAT, "version": 1, "page": self.page, "title": self.title, "systems": self.systems}
        return json.dumps({**told, "seed": self.seed, "salt": self.salt, "seal": self.seal, "items": items}, indent=1)


def read_key(path: str | Path) -> Key:
    """Read a key and check it against its own seal.

    Raises:
        DataError: it cannot be read, is no key, or was changed.
    """
    row = read_json(path)
    if row.get("format") != FORMAT:
        raise DataError(f"{path}: is no key; `repulsive judge make` writes one beside the page, as judge.key.json")
    try:
        first, second = map(str, row["systems"])
        sides, ids = [str(one["first"]) for one in row["items"]], [str(one["id"]) for one in row["items"]]
        told = [str(row[name]) for name in ("page", "title", "salt", "seal")]
        numbered = [one["item"] for one in row["items"]] == list(range(1, len(ids) + 1))
        key = Key(told[0], told[1], (first, second), int(row["seed"]), told[2], told[3], sides, ids)
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: the key is damaged; make it again from the same files and seed") from None
    if not numbered or not ids or seal(key.salt, key.sides) != key.seal:
        raise DataError(f"{path}: the key was changed, it does not fit its seal; make it again from the same files")
    return key


def read_json(path: str | Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        DataError: the file cannot be read or holds something else.
    """
    try:
        row = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, or JSON that nobody meant
        raise DataError(f"{path}: is damaged or no JSON; was it copied whole?") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}: is JSON, but neither answers of a judge nor a key")
    return row


def system_names(paths: Sequence[Path]) -> tuple[str, str]:
    """Names of two files without their ends; with their folders where those are equal."""
    first, second = (path.name.removesuffix(".jsonl").removesuffix(".json") for path in paths)
    if first == second:
        first, second = (f"{path.resolve().parent.name}/{first}" for path in paths)
    if first == second:
        first, second = f"{first} (1)", f"{second} (2)"
    return first, second
