"""From sentences in pieces, or lines of text, to translations, with a trained model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import torch

from repulsive.errors import ConfigError, RunError
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.tables import runs_in
from repulsive.lab.layers.beam_search import Ends, Hypothesis, beam_search, check_search
from repulsive.lab.systems.translation.batches import TokenBuckets
from repulsive.lab.systems.translation.model import Transformer
from repulsive.lab.systems.translation.prepare import MOST_PIECES
from repulsive.lab.text.pieces import BOS, EOS, Pieces
from repulsive.lab.text.tokens import Ragged

ENDS = Ends(BOS, EOS)


@dataclass(frozen=True)
class Search:
    """How translations are searched for.

    Args:
        beam: hypotheses that are followed; 1 is greedy.
        lenpen: alpha of log-probability / length^alpha.
        longest: most pieces of a translation.
        at_once: source pieces that are translated together, padding included; a GPU is quicker with many thousands.
        precision: "bf16" searches with a copy of the model in that precision, in half the memory and quicker on a GPU;
            log-probabilities are summed in float32 all the same.
    """

    beam: int = 5
    lenpen: float = 1.0
    longest: int = 200
    at_once: int = 4096
    precision: Literal["fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        check_search(self)
        if self.longest > MOST_PIECES:
            raise ValueError(f"longest={self.longest} must be {MOST_PIECES} at most")


def translate(model: Transformer, source: Ragged, search: Search, nbest: int = 1) -> list[list[Hypothesis]]:
    """The best translations of each sentence, in the order of the sentences.

    Args:
        model: in evaluation mode.
        source: sentences, on the model's device.
        search: how.
        nbest: translations of each.
    """
    model, lengths = _in_precision(model, search), source.lengths.cpu()
    found: list[list[Hypothesis]] = [[] for _ in lengths]
    for batch in TokenBuckets(lengths, lengths, search.at_once).in_order():
        table, _ = source.padded(batch.indices.to(source.values.device), batch.length)  # [B, S]
        best = beam_search(
            model, table.long(), ENDS, beam=search.beam, alpha=search.lenpen, nbest=nbest, longest=search.longest
        )
        for index, hypotheses in zip(batch.indices.tolist(), best, strict=True):
            found[index] = hypotheses
    return found


def _in_precision(model: Transformer, search: Search) -> Transformer:
    if search.precision == "fp32" or model.embedding.weight.dtype == torch.bfloat16:
        return model
    return copy.deepcopy(model).to(torch.bfloat16)


Translated = tuple[str, float]  # a text, and its score


def translate_lines(
    model: Transformer, pieces: Pieces, lines: Iterable[str], search: Search, *, nbest: int = 1, at_once: int = 64
) -> Iterator[list[Translated]]:
    """Texts in, translations out: for each line its best ones, in order. A line without words is given back empty.

    A line of more than `MOST_PIECES` pieces is cut, with a warning.

    Args:
        model: in evaluation mode.
        pieces: as the model was trained with.
        lines: texts.
        search: how.
        nbest: translations of each line.
        at_once: lines that are read before any is translated.
    """
    split, device = pieces.split("source"), model.embedding.weight.device
    model = _in_precision(model, search)
    lines, done = iter(lines), 0
    while some := list(islice(lines, at_once)):
        words = [split(line) for line in some]
        answers: list[list[Translated]] = [[("", 0.0)] for _ in words]
        full = [i for i, sentence in enumerate(words) if sentence]
        if full:
            encoded = pieces.encode([words[i] for i in full], MOST_PIECES)
            for i, length in zip(full, encoded.lengths.tolist(), strict=True):
                if length > MOST_PIECES:  # the mark of the end makes it one more
                    warnings.warn(f"line {done + i + 1}: cut after {MOST_PIECES} pieces", stacklevel=2)
            found = translate(model, encoded.to(device), search, nbest)
            for i, hypotheses in zip(full, found, strict=True):
                answers[i] = [(pieces.text(pieces.words(best.tokens)), best.score) for best in hypotheses]
        done += len(some)
        yield from answers


def open_translator(
    folder: Path, device: str | None = None, *, beam: int | None = None, lenpen: float | None = None, nbest: int = 1
) -> tuple[Transformer, Pieces, Search]:
    """What `translate_lines` needs, of a run that has ended.

    Args:
        folder: of the run, or of its only seed.
        device: "cpu", "cuda" or None for what is there.
        beam: as `Search`; None: the recipe's.
        lenpen: as `Search`; None: the recipe's.
        nbest: how many will be asked for.

    Raises:
        RunError: it has not ended, is of another task, or holds several seeds.
        ConfigError: a setting cannot be.
    """
    from repulsive.lab.runs.score import load_run
    from repulsive.lab.systems.translation.task import TranslationTask

    runs = runs_in(folder)
    if len(runs) != 1:
        told = f"has seeds {', '.join(map(str, runs))}: name one of their folders" if runs else "is no run folder"
        raise RunError(f"{folder}: {told}; `repulsive ls` lists runs")
    (run,) = runs.values()
    if run.recipe.get("task") != "translation":
        raise RunError(f"{run.path}: is a run of {run.recipe.get('task')}, not of translation")
    place = chosen_device(device)
    task, model = load_run(run, place)
    assert isinstance(task, TranslationTask) and isinstance(model, Transformer)
    given = {name: value for name, value in (("beam", beam), ("lenpen", lenpen)) if value is not None}
    try:
        search = replace(task.recipe.search, **given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not 1 <= nbest <= search.beam:
        raise ConfigError(f"nbest={nbest}: at least 1, and at most the beam, {search.beam}")
    return model, task.pieces, search
