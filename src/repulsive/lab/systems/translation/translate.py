"""Translate token ids, or lines of text, with a trained model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from repulsive.lab.layers.beam_search import Ends, Hypothesis, SearchSettings, beam_search
from repulsive.lab.systems.translation.batches import TokenBuckets
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.prepare import MOST_PIECES
from repulsive.lab.text.pieces import BOS, EOS, Pieces
from repulsive.lab.text.tokens import Ragged

ENDS = Ends(BOS, EOS)


@dataclass(frozen=True)
class Search(SearchSettings):
    """Beam search settings.

    Args:
        at_once: source pieces in a batch, padding included; a GPU is faster with many thousands.
        precision: "bf16" searches with a bfloat16 copy of the model: half the memory, faster on a GPU.
            Log-probabilities are summed in float32 in either case.
    """

    beam: int = 5
    at_once: int = 4096
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest > MOST_PIECES:
            raise ValueError(f"longest={self.longest} must be {MOST_PIECES} at most")


def translate(model: Transformer, source: Ragged, search: Search, nbest: int = 1) -> list[list[Hypothesis]]:
    """Find the best translations of each sentence, in the order of the sentences.

    Args:
        model: a translator in evaluation mode.
        source: sentences, on the model's device.
        search: search settings.
        nbest: number of translations of each sentence.
    """
    model, lengths = _in_precision(model, search), source.lengths.cpu()
    results: list[list[Hypothesis]] = [[] for _ in lengths]
    for batch in TokenBuckets(lengths, lengths, search.at_once).in_order():
        table, _ = source.padded(batch.indices.to(source.values.device), batch.length)  # [B, S]
        best = beam_search(
            model, table.long(), ENDS, beam=search.beam, alpha=search.lenpen, nbest=nbest, longest=search.longest
        )
        for index, hypotheses in zip(batch.indices.tolist(), best, strict=True):
            results[index] = hypotheses
    return results


def _in_precision(model: Transformer, search: Search) -> Transformer:
    if search.precision == "fp32" or model.embedding.weight.dtype == torch.bfloat16:
        return model
    return copy.deepcopy(model).to(torch.bfloat16)


Translated = tuple[str, float]  # text and score


def translate_lines(
    model: Transformer, pieces: Pieces, lines: Iterable[str], search: Search, *, nbest: int = 1, at_once: int = 64
) -> Iterator[list[Translated]]:
    """Translate lines of text, in order; an empty line has one empty translation.

    A line of more than `MOST_PIECES` pieces is cut, with a warning.

    Args:
        model: a translator in evaluation mode.
        pieces: the tokenizer of the model.
        lines: texts.
        search: search settings.
        nbest: number of translations of each line.
        at_once: number of lines to read before translating them.
    """
    split, device = pieces.split("source"), model.embedding.weight.device
    model = _in_precision(model, search)
    lines, done = iter(lines), 0
    while chunk := list(islice(lines, at_once)):
        words = [split(line) for line in chunk]
        answers: list[list[Translated]] = [[("", 0.0)] for _ in words]
        full = [i for i, sentence in enumerate(words) if sentence]
        if full:
            encoded = pieces.encode([words[i] for i in full], MOST_PIECES)
            for i, length in zip(full, encoded.lengths.tolist(), strict=True):
                if length > MOST_PIECES:  # `length` includes the end-of-sentence token
                    warnings.warn(f"line {done + i + 1}: cut after {MOST_PIECES} pieces", stacklevel=2)
            for i, hypotheses in zip(full, translate(model, encoded.to(device), search, nbest), strict=True):
                answers[i] = [(pieces.text(pieces.words(best.tokens)), best.score) for best in hypotheses]
        done += len(chunk)
        yield from answers
