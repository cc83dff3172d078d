"""Inputs for one model, or for two models that are compared: text, pictures, or example inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.loading.images import ImageInputs, prepare_images, vision_part
from repulsive.diagnostics.loading.import_path import LoadError
from repulsive.diagnostics.loading.inputs import example_inputs, tokenize
from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.errors import short_message


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """A model and what it reads.

    Args:
        model: the model, or the part of it that reads pictures.
        batches: inputs; empty if none were given.
        tokens: tokens of each sentence; empty for other inputs.
        images: the pictures, if the inputs are pictures.
        separators: token ids that separate sentences.
        facts: (name, value) pairs for the page.
        cut: how many sentences are cut, and where; "" if none is.
    """

    model: nn.Module
    batches: list[Any] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)
    images: ImageInputs | None = None
    separators: list[int] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    cut: str = ""


def model_inputs(
    loaded: LoadedModel,
    sentences: Sequence[str] = (),
    images: Sequence[tuple[str, Any]] = (),
    example: str = "",
    *,
    length: int = 128,
) -> ModelInputs:
    """Prepare the inputs of a model; at most one kind of input is given.

    Args:
        loaded: the model.
        sentences: text.
        images: result of `read_images`.
        example: import path of example inputs.
        length: maximum number of tokens per sentence.
    """
    separator = getattr(loaded.tokenizer, "sep_token_id", None)
    separators = [] if separator is None else [separator]
    if images:
        seen = prepare_images(loaded, images)
        facts = [("Part of the model", seen.part)] if seen.part else []
        facts += [("Preprocessing", seen.note), ("Left out of the maps", _token_names(seen.layout.special))]
        return ModelInputs(seen.model, seen.batches, images=seen, facts=facts)
    if sentences:
        text = tokenize(loaded, sentences, length)
        facts = [("Decoder", "read the same sentences as the encoder")] if text.decoder_reads_source else []
        facts += [("Cut", text.cut)] if text.cut else []
        return ModelInputs(loaded.model, text.batches, text.tokens, separators=separators, facts=facts, cut=text.cut)
    return ModelInputs(loaded.model, [example_inputs(example, loaded.model)] if example else [], separators=separators)


def other_model(inputs: ModelInputs, other: LoadedModel) -> nn.Module:
    """Return the second model of a comparison, after checking that it runs on the inputs of the first.

    Args:
        inputs: inputs of the first model.
        other: the second model.

    Raises:
        LoadError: it does not run on these inputs.
    """
    model = vision_part(other.model)[0] if inputs.images else other.model
    try:
        with torch.no_grad(), evaluating(model):
            for batch in inputs.batches[:1]:
                call(model, batch)
    except Exception as error:
        raise LoadError(
            f"--compare: this model does not run on the inputs of the first: {short_message(error)}"
        ) from error
    return model


def _token_names(special: Sequence[str]) -> str:
    """List the tokens that are not patches: "class token, register 0"."""
    names = [name if name[-1].isdigit() else f"{name} token" for name in special]
    return ", ".join(names) or "no token: all tokens are patches"
