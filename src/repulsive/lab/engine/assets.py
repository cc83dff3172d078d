"""Assets of a run: files that a trained model needs, copied from the prepared data into the run folder.

`data.json` describes the data, `vocabulary.json` has the words, and `examples.safetensors` a few items for reports.
With them `translate`, `export` and `report` work after the prepared folder is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import RunError
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.lab.text.tokens import Ragged, Vocabulary

DATA, VOCABULARY, EXAMPLES = "data.json", "vocabulary.json", "examples.safetensors"


def data_json(manifest: Mapping[str, Any], **facts: Any) -> bytes:
    """Return the content of `data.json`: settings and checksums of prepared data, and other facts about the data."""
    kept = {name: manifest[name] for name in ("settings", "files") if name in manifest}
    return json.dumps(kept | facts, ensure_ascii=False, indent=1).encode()


def read_data_json(assets: Mapping[str, bytes]) -> dict[str, Any]:
    """Read `data.json`; the caller must check for missing keys and wrong types."""
    facts: dict[str, Any] = json.loads(assets[DATA])
    return facts


def save_prepared(
    data: Prepared, examples: Mapping[str, Part] | None = None, extra: Sequence[str] = ()
) -> dict[str, bytes]:
    """Return the assets of a model that was trained on `data`.

    Args:
        data: the prepared data.
        examples: data split -> a few items of the split.
        extra: names of the task's own files that the model needs.
    """
    from safetensors.torch import save

    files = {
        DATA: data_json(
            data.manifest,
            task=data.task,
            classes=data.classes,
            sizes=sizes(data),
            sentences=sentences_per_item(data),
            vector_size=vector_size(data),
        ),
        VOCABULARY: json.dumps(data.vocabulary.words, ensure_ascii=False).encode(),
    }
    if examples:
        files[EXAMPLES] = save({f"{part}/{key}": x for part, few in examples.items() for key, x in _tensors(few)})
    return files | {name: data.extra[name] for name in extra}


def restore_prepared(assets: Mapping[str, bytes], folder: Path) -> tuple[Prepared, dict[str, Part]]:
    """Restore what `save_prepared` returned: prepared data without data splits, and a few examples of each split.

    Args:
        assets: file name -> content.
        folder: folder that the prepared data were in, for messages.

    Raises:
        RunError: the examples have token ids outside the vocabulary.
    """
    from safetensors.torch import load

    facts = read_data_json(assets)
    vocabulary = Vocabulary(tuple(map(str, json.loads(assets[VOCABULARY]))))
    own = (DATA, VOCABULARY, EXAMPLES)
    extra = {name: content for name, content in assets.items() if name not in own}
    classes = tuple(map(str, facts["classes"]))
    data = Prepared(folder, str(facts["task"]), classes, vocabulary, None, {}, facts, extra)
    tensors = load(assets[EXAMPLES]) if EXAMPLES in assets else {}
    examples = {part: _part(tensors, part) for part in dict.fromkeys(name.rpartition("/")[0] for name in tensors)}
    for part in examples.values():
        ids = torch.cat([side.values for side in part.sentences])
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(vocabulary):
            raise RunError(f"{EXAMPLES}: token ids out of range for a vocabulary of {len(vocabulary):,}")
    return data, examples


def sizes(data: Prepared) -> dict[str, int]:
    """Return the number of items in each data split; works for restored data too."""
    return {name: len(part) for name, part in data.parts.items()} or dict(data.manifest["sizes"])


def sentences_per_item(data: Prepared) -> int:
    """Return the number of sentences per item: 1, or 2 for sentence pairs; works for restored data too."""
    for part in data.parts.values():
        return len(part.sentences)
    return int(data.manifest["sentences"])


def vector_size(data: Prepared) -> int:
    """Return the size of the prepared word vectors, 0 if there are none; works for restored data too."""
    return int(data.manifest.get("vector_size", 0)) if data.vectors is None else data.vectors.shape[1]


def data_facts(data: Prepared) -> list[tuple[str, str]]:
    """List facts about prepared data as (name, value) pairs, for the top of a report."""
    counts = ", ".join(f"{count:,} {name}" for name, count in sizes(data).items())
    return [("data", f"{data.task}: {counts}"), ("words known", f"{len(data.vocabulary):,}")]


def select(part: Part, indices: Tensor) -> Part:
    """Select some items of a data split, in the order of the indices, int64 [K]."""
    sentences = tuple(_rows(side, indices) for side in part.sentences)
    evidence = None if part.evidence is None else _rows(part.evidence, indices)
    return Part(sentences, part.labels[indices], evidence)


def middle_length(part: Part, count: int) -> Tensor:
    """Return the indices of the items whose lengths are nearest to the median, int64 [count]."""
    lengths = part.lengths.float()
    return (lengths - lengths.median()).abs().argsort(stable=True)[:count]


def _rows(ragged: Ragged, indices: Tensor) -> Ragged:
    rows = [ragged[i] for i in indices.tolist()]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    return Ragged(torch.cat(rows) if rows else ragged.values[:0], offsets)


def _tensors(part: Part) -> list[tuple[str, Tensor]]:
    rows = {f"side{i}": side for i, side in enumerate(part.sentences)}
    if part.evidence is not None:
        rows["evidence"] = part.evidence
    values = [(f"{name}.values", row.values) for name, row in rows.items()]
    offsets = [(f"{name}.offsets", row.offsets) for name, row in rows.items()]
    return [("labels", part.labels), *values, *offsets]


def _part(tensors: Mapping[str, Tensor], name: str) -> Part:
    def rows(key: str) -> Ragged:
        values, offsets = tensors[f"{name}/{key}.values"], tensors[f"{name}/{key}.offsets"]
        if int(offsets[0]) or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
            raise ValueError(f"offsets of {name}/{key} do not fit its values")
        return Ragged(values, offsets)

    sides: list[Ragged] = []
    while f"{name}/side{len(sides)}.values" in tensors:
        sides.append(rows(f"side{len(sides)}"))
    evidence = rows("evidence") if f"{name}/evidence.values" in tensors else None
    return Part(tuple(sides), tensors[f"{name}/labels"], evidence)
