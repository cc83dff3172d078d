"""Attention of trained classifiers on a few sentences, for the attention explorer of a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from repulsive.lab.systems.classification.generated import ASPECTS
from repulsive.lab.systems.classification.inputs import model_inputs
from repulsive.lab.text.prepared import Part, Prepared
from repulsive.pages import Example, Reading

SEPARATOR = "‖"  # between the two sentences of a pair


def read_examples(data: Prepared, part: Part, indices: Tensor, models: Mapping[str, nn.Module]) -> list[Example]:
    """Collect the prediction and the attention of each model on some items of a data split.

    Args:
        data: vocabulary and class names.
        part: the data split, on the CPU.
        indices: indices of the items, int64 [K].
        models: method -> classifier in evaluation mode, on the CPU.
    """
    read = {method: _read(model, part, indices, data.classes) for method, model in models.items()}
    examples = []
    for place, index in enumerate(indices.tolist()):
        sides = [[data.vocabulary.words[i] for i in side[index].tolist()] for side in part.sentences]
        words = [word for side in sides for word in [SEPARATOR, *side]][1:]
        readings = [dataclasses.replace(each[place], method=method) for method, each in read.items()]
        truth = class_name(data.classes[int(part.labels[index])])
        examples.append(Example(words, truth, readings, _evidence(part, index, len(words))))
    return examples


def spread(part: Part, count: int) -> Tensor:
    """Choose at most `count` items of about median length, spread over the classes; return their indices, int64."""
    lengths = part.lengths
    near = (lengths - lengths.float().median()).abs().argsort(stable=True)  # [N]
    chosen: list[int] = []
    for place in range(count):
        label = place % int(part.labels.max() + 1)
        chosen += [i for i in near.tolist() if int(part.labels[i]) == label and i not in chosen][:1]
    return torch.tensor(chosen)


def class_name(name: str) -> str:
    """Return the display name of a class; class names that are numbers are star ratings."""
    return name if not name.isdigit() else f"{name} star{'' if name == '1' else 's'}"


@torch.inference_mode()
def _read(model: nn.Module, part: Part, indices: Tensor, classes: Sequence[str]) -> list[Reading]:
    arguments = model_inputs(part, indices)
    logits, attention, _ = model(*arguments, collect=True)
    views = attention if isinstance(attention, tuple) else (attention,)  # [B, M, T] each
    confidence, predicted = logits.softmax(-1).max(-1)  # [B]
    readings = []
    for i in range(len(indices)):
        lengths = [int(each[i]) for each in arguments[len(views) :]]
        parts = [view[i, :, :length] for view, length in zip(views, lengths, strict=True)]
        gap = parts[0].new_zeros(len(parts[0]), 1)  # [M, 1], under the separator
        weights = torch.cat([column for part in parts for column in (gap, part)][1:], 1) / len(parts)  # [M, T]
        readings.append(Reading("", class_name(classes[int(predicted[i])]), float(confidence[i]), weights))
    return readings


def _evidence(part: Part, index: int, length: int) -> Mapping[str, Sequence[int]]:
    if part.evidence is None:
        return {}
    mask = part.evidence_mask(torch.tensor([index]), length)[0]  # [K, T]
    return {ASPECTS[k]: row.nonzero()[:, 0].tolist() for k, row in enumerate(mask) if row.any()}
