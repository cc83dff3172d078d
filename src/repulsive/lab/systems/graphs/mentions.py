"""Find mentions of entities in a text by matching the usual spellings of names, numbers and dates."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

_MONTHS = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:e(\d+))?(?: \(?([a-z%³/ ]+)\)?)?")
_LONGEST = 18  # maximum digits of a number that is written out
_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)")


def fold(text: str) -> str:
    """Remove case and accents; every character keeps its position.

    Example:
        >>> fold("Suárez–Óg_1")
        'suarez-og 1'
    """
    return "".join(map(_fold, text))


@lru_cache(1 << 12)
def _fold(character: str) -> str:
    if character in "–—−‐‑_’‘“”":
        return {"_": " ", "’": "'", "‘": "'", "“": '"', "”": '"'}.get(character, "-")
    return unicodedata.normalize("NFKD", character)[:1].lower()[:1] or character


def forms(name: str) -> list[str]:
    """List the spellings of an entity name, without case and accents, the closest to the name first.

    Numbers also appear without their unit, with commas or, up to twelve, in letters; dates in words; any other name
    also without brackets at its end, or without the part after its only comma.

    Example:
        >>> forms("1923-11-18")[:3]
        ['1923-11-18', 'november 18 1923', '18 november 1923']
        >>> forms("Carrie_Lam_(politician)"), forms("Lufkin,_Texas"), forms("2702.0")
        (['carrie lam (politician)', 'carrie lam'], ['lufkin, texas', 'lufkin'], ['2702.0', '2702', '2,702'])
    """
    name = fold(name).strip()
    spellings = [name]
    if date := _DATE.fullmatch(name):
        spellings += _dates(int(date[1]), int(date[2]), int(date[3]))
    elif number := _NUMBER.fullmatch(name):
        spellings += _numbers(*number.groups())
    else:
        plain = re.sub(r"\s*\([^()]*\)$", "", name)
        spellings.append(plain)
        if plain.count(",") == 1 and not re.search(r"\b(and|or)\b", plain):  # a place, not a list
            spellings.append(plain.split(",")[0])
    return list(dict.fromkeys(form for form in spellings if re.search(r"\w", form)))


def usual_spelling(name: str) -> str:
    """Return the spelling that most texts use: without brackets at the end, a date in words.

    Example:
        >>> [usual_spelling(name) for name in ("Twilight (band)", "2006-12-31", "2702.0", "(66063)")]
        ['Twilight', 'December 31, 2006', '2702.0', '(66063)']
    """
    if (date := _DATE.fullmatch(name)) and 1 <= int(date[2]) <= 12:
        return f"{_MONTHS[int(date[2]) - 1].capitalize()} {int(date[3])}, {date[1]}"
    return re.sub(r"\s*\([^()]*\)$", "", name) or name


def find_mentions(text: str, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Find mentions of entities that do not overlap; full names take precedence over shortened ones, long over short.

    Args:
        text: plain text.
        names: names of the entities.

    Returns:
        Start, end and index of the entity of each mention, in the order of the text.

    Example:
        >>> find_mentions("Aarhus Airport serves Aarhus.", ["Aarhus", "Aarhus_Airport"])
        [(0, 14, 1), (22, 28, 0)]
    """
    folded = fold(text)
    spans = []
    for entity, name in enumerate(names):
        for rank, form in enumerate(forms(name)):
            for match in _pattern(form).finditer(folded):
                spans.append((rank > 0, match.start() - match.end(), match.start(), match.end(), entity))
    taken: list[tuple[int, int, int]] = []
    for _, _, start, end, entity in sorted(spans):
        if all(end <= first or last <= start for first, last, _ in taken):
            taken.append((start, end, entity))
    return sorted(taken)


@lru_cache(1 << 14)
def _pattern(form: str) -> re.Pattern[str]:
    if re.fullmatch(r"[\d.,-]+", form):  # digits next to other digits belong to another number
        return re.compile(rf"(?<![\w.,-]){re.escape(form)}(?![\w-]|[.,]\d)")
    words = r"\W{0,3}".join(map(re.escape, re.findall(r"\w+", form)))
    first, last = r"\(?" if form[0] == "(" else "", r"\)?" if form[-1] == ")" else ""
    return re.compile(rf"(?<!\w){first}{words}(?!\w){last}")


def _dates(year: int, month: int, day: int) -> list[str]:
    if not 1 <= month <= 12:
        return []
    name = _MONTHS[month - 1]
    th = "th" if 10 < day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    dates = []
    for called in (name, name[:3]):
        dates += [f"{called} {day} {year}", f"{day} {called} {year}", f"{called} {day}{th} {year}"]
        dates += [f"{day}{th} {called} {year}", f"{day}{th} of {called} {year}", f"{day} of {called} {year}"]
        dates += [f"{called} {day:02} {year}", f"{day:02} {called} {year}"]
    return [*dates, f"{day:02}/{month:02}/{year}", f"{month:02}/{day:02}/{year}", f"{day}/{month}/{year}"]


def _numbers(sign: str, whole: str, rest: str | None, power: str | None, unit: str | None) -> list[str]:
    if power is not None:
        if len(power) > 2 or int(power) > _LONGEST:  # texts do not write out so many zeros
            return []
        rest = (rest or "").ljust(int(power), "0")
        whole, rest = whole + rest[: int(power)], rest[int(power) :]
    rest = (rest or "").rstrip("0")
    whole = whole.lstrip("0") or "0"
    plain = [f"{sign}{whole}", f"{sign}{int(whole):,}"] if len(whole) <= _LONGEST else []
    if rest:
        plain = [f"{form}.{rest}" for form in plain]
    elif not sign and len(whole) < 3 and int(whole) < len(_SMALL):
        plain.append(_SMALL[int(whole)])
    return [f"{form} {unit}" for form in plain if unit] + plain
