"""Sentences of a data set as trained models read them: what the attention explorer of a page shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from repulsive.lab.systems.classification.generated import ASPECTS
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.pages import Example, Reading

BETWEEN = "‖"  # stands between the two sentences of a pair


def examples(data: Prepared, part: str, indices: Tensor, models: Mapping[str, nn.Module]) -> list[Example]:
    """Some items of a part, and what each model makes of them.

    Args:
        data: the models' data set.
        part: "test", say.
        indices: of the items.
        models: method -> classifier in evaluation mode, on the CPU.
    """
    chosen = data.parts[part]
    read = {method: _read(model, chosen, indices, data.classes) for method, model in models.items()}
    found = []
    for place, index in enumerate(indices.tolist()):
        sides = [[data.vocabulary.words[i] for i in side[index].tolist()] for side in chosen.sentences]
        words = [word for side in sides for word in [BETWEEN, *side]][1:]
        readings = [dataclasses.replace(seen[place], method=method) for method, seen in read.items()]
        truth = class_name(data.classes[int(chosen.labels[index])])
        found.append(Example(words, truth, readings, _evidence(chosen, index, len(words))))
    return found


def spread(part: Part, count: int) -> Tensor:
    """Items of as many classes as there are, of middling length, so that a page shows them well."""
    lengths = part.lengths
    near = (lengths - lengths.float().median()).abs().argsort(stable=True)  # [N]
    chosen: list[int] = []
    for place in range(count):
        label = place % int(part.labels.max() + 1)
        chosen += [i for i in near.tolist() if int(part.labels[i]) == label and i not in chosen][:1]
    return torch.tensor(chosen)


def class_name(name: str) -> str:
    """A class in words: numbers are stars."""
    return name if not name.isdigit() else f"{name} star{'' if name == '1' else 's'}"


@torch.inference_mode()
def _read(model: nn.Module, part: Part, indices: Tensor, classes: Sequence[str]) -> list[Reading]:
    tables = [side.padded(indices) for side in part.sentences]
    answers, attention, _ = model(*(ids for ids, _ in tables), *(lengths for _, lengths in tables), collect=True)
    views = attention if isinstance(attention, tuple) else (attention,)  # [B, M, T] each
    sure, guess = answers.softmax(-1).max(-1)  # [B]
    found = []
    for i in range(len(indices)):
        parts = [view[i, :, : int(lengths[i])] for view, (_, lengths) in zip(views, tables, strict=True)]
        gap = parts[0].new_zeros(len(parts[0]), 1)
        weights = torch.cat([column for part in parts for column in (gap, part)][1:], 1) / len(parts)  # [M, T]
        found.append(Reading("", class_name(classes[int(guess[i])]), float(sure[i]), weights))
    return found


def _evidence(part: Part, index: int, length: int) -> Mapping[str, Sequence[int]]:
    if part.evidence is None:
        return {}
    mask = part.evidence_mask(torch.tensor([index]), length)[0]  # [K, T]
    return {ASPECTS[k]: row.nonzero()[:, 0].tolist() for k, row in enumerate(mask) if row.any()}
