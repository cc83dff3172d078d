"""Key of a page: which system is on which side. It is written beside the page and kept from the judges."""

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
    """Everything the page hides.

    Args:
        page: identifier of the page.
        title: page title.
        systems: names of the first system, whose wins are counted, and of the second.
        seed: random seed of the page.
        salt: random part of the seal.
        seal: hash of salt and sides.
        sides: side of the first system, pair by pair.
        ids: ids of the pairs.
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
        fields = {"format": FORMAT, "version": 1, "page": self.page, "title": self.title, "systems": self.systems}
        return json.dumps({**fields, "seed": self.seed, "salt": self.salt, "seal": self.seal, "items": items}, indent=1)


def read_key(path: str | Path) -> Key:
    """Read a key and check it against its seal.

    Raises:
        DataError: the file cannot be read, is not a key, or was changed.
    """
    row = read_json(path)
    if row.get("format") != FORMAT:
        raise DataError(
            f"{path}: not a key; `repulsive judge make` writes it beside the page, for example judge.key.json"
        )
    try:
        first, second = map(str, row["systems"])
        sides, ids = [str(one["first"]) for one in row["items"]], [str(one["id"]) for one in row["items"]]
        page, title, salt, sealed = (str(row[name]) for name in ("page", "title", "salt", "seal"))
        is_numbered = [one["item"] for one in row["items"]] == list(range(1, len(ids) + 1))
        key = Key(page, title, (first, second), int(row["seed"]), salt, sealed, sides, ids)
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}: the key is damaged; create it again from the same files and seed") from None
    if not is_numbered or not ids or seal(key.salt, key.sides) != key.seal:
        raise DataError(
            f"{path}: the key was changed: it does not match its seal; create it again from the same files and seed"
        )
    return key


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        DataError: the file cannot be read or does not contain a JSON object.
    """
    try:
        row = json.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # invalid UTF-8, invalid JSON, or nested too deeply
        raise DataError(f"{path}: is damaged or not JSON; copy the complete file again") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}: expected a JSON object (answers of a judge, or a key), got {type(row).__name__}")
    return row


def system_names(paths: Sequence[Path]) -> tuple[str, str]:
    """Derive the names of the systems from two file names; add the folder if the names are equal."""
    first, second = (path.name.removesuffix(".jsonl").removesuffix(".json") for path in paths)
    if first == second:
        first, second = (f"{path.resolve().parent.name}/{first}" for path in paths)
    if first == second:
        first, second = f"{first} (1)", f"{second} (2)"
    return first, second
