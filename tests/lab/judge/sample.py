"""Sample texts of two systems, and answer files as the page saves them."""

import json
from pathlib import Path
from typing import Any

from repulsive.lab.judge.answers import FORMAT
from repulsive.lab.judge.key import Key

CRITERIA = ("structure", "informativeness", "grammar", "overall")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def two_systems(folder: Path, count: int = 6) -> tuple[Path, Path]:
    """Files of the systems "wavelet" and "gearbox", whose texts contain the words "good" and "poor"."""
    graph = [["a", "USED-FOR", "b"]]
    inputs = [{"input": {"title": f"Title {n}", "graph": graph}, "gold": f"human text {n}"} for n in range(count)]
    first = [{"id": f"item-{n}", "text": f"good text {n}", **inputs[n]} for n in range(count)]
    second = [{"id": f"item-{n}", "text": f"poor text {n}"} for n in range(count)]
    return write_lines(folder / "wavelet.jsonl", first), write_lines(folder / "gearbox.jsonl", second)


def saved(
    folder: Path, key: Key, judge: str, chosen: dict[int, dict[str, str]], changes: dict[str, Any] | None = None
) -> Path:
    """Write a file of answers as the page saves it."""
    answers = [{"item": item, **choices} for item, choices in chosen.items()]
    fields = {"format": FORMAT, "version": 1, "page": key.page, "seal": key.seal, "judge": judge, "answers": answers}
    path = folder / f"answers-{judge}.json"
    path.write_text(json.dumps({**fields, **(changes or {})}))
    return path


def side_of(key: Key, item: int, outcome: str) -> str:
    """Return the choice that gives the first system this outcome."""
    other = {"left": "right", "right": "left"}
    first = key.sides[item - 1]
    return {"win": first, "lose": other[first], "tie": "tie"}[outcome]
