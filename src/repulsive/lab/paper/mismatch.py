"""Compare prepared data with the paper's: the same, less of the same, or other data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from repulsive.lab.paper.published import published
from repulsive.lab.text.prepared import PARTS

TOLERANCE = 0.05  # relative difference of sizes: the paper rounds, and readers skip bad lines
SMALLER, OTHER = "smaller data", "other data"


@dataclass(frozen=True)
class Mismatch:
    """Why data are not the paper's.

    Args:
        reason: the difference in a few words.
        kind: `SMALLER`, the paper's data but fewer of them; `OTHER`; or "", data that test no claim, such as toy data.
    """

    reason: str
    kind: str = ""


def find_mismatch(name: str, paper_name: str, manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> Mismatch | None:
    """Compare the sizes and languages of a prepared dataset with the paper's.

    Args:
        name: name of the dataset.
        paper_name: name of the paper's dataset that it is, or that it replaces.
        manifest: description of the prepared folder.
        sizes: number of items of train, dev and test.

    Returns:
        None if the data are the paper's.
    """
    paper = published().dataset(name)
    if not paper:
        return Mismatch(f"{name} instead of the paper's {paper_name}", OTHER)
    if "documents" in paper:
        count, expected = sum(dict(manifest.get("documents", {})).values()), int(paper["documents"])
        return _compare_counts(count, expected, "documents")
    settings = manifest.get("settings", {})
    languages = [settings.get("source"), settings.get("target")]
    if "languages" in paper and languages != paper["languages"]:
        return Mismatch(
            f"from {languages[0]} into {languages[1]} instead of {' into '.join(paper['languages'])}", OTHER
        )
    for part, expected in zip(PARTS, paper["sizes"], strict=True):
        if mismatch := _compare_counts(sizes.get(part, 0), expected, f"items of {part}"):
            return mismatch
    return None


def combine(mismatches: Iterable[Mismatch | None]) -> Mismatch | None:
    """Choose the worst of several mismatches: data that test no claim, then other data, then smaller data."""
    known = [mismatch for mismatch in mismatches if mismatch is not None]
    return min(known, key=lambda mismatch: ("", OTHER, SMALLER).index(mismatch.kind), default=None)


def _compare_counts(count: int, expected: int, what: str) -> Mismatch | None:
    if abs(count - expected) <= TOLERANCE * expected:
        return None
    return Mismatch(f"{count:,} {what} instead of {expected:,}", SMALLER if count < expected else OTHER)
