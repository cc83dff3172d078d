"""Toy graphs about who likes or makes what, in the layout of WebNLG, that are learned in seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAMES = ["Ann", "Bob Lee", "Cem", "Dora", "Eve Ray", "Finn"]
THINGS = ["tea", "green soup", "maps", "old songs"]
TEMPLATES = {"likes": "{a} likes {b} .", "makes": "{b} is made by {a} .", "sells": "you can buy {b} from {a} ."}


def entries(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Generate graphs of one or two triples with one or two texts each."""
    draw = random.Random(seed)
    for i in range(count):
        triples = [
            (draw.choice(NAMES), draw.choice(list(TEMPLATES)), thing) for thing in draw.sample(THINGS, 1 + i % 2)
        ]
        text = " ".join(TEMPLATES[name].format(a=a, b=b) for a, name, b in triples)
        texts = [text, f"we know that {text}"][: 1 + i % 3 % 2]
        yield {"eid": f"Id{i}", "category": "Toy", "triples": [list(triple) for triple in triples], "texts": texts}


def write_graphs(folder: Path, sizes: Sequence[int] = (160, 20, 20)) -> Path:
    """Write toy graphs to train.jsonl, dev.jsonl and test.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate(zip(("train", "dev", "test"), sizes, strict=True)):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries(count, seed)))
    return folder
