"""Translation quality: BLEU as papers report it, sacreBLEU with its signature, and chrF."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.extras import install_command
from repulsive.metrics.bleu import COLUMNS


@dataclass(frozen=True)
class Score:
    """A corpus score and how it was computed.

    Args:
        value: the score, from 0 to 100.
        signature: sacrebleu's signature, which describes how the score was computed.
    """

    value: float
    signature: str


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Compute BLEU as papers report it for IWSLT14 (multi-bleu.perl): split at spaces, lower-cased, not smoothed.

    Args:
        hypotheses: translations, their words separated by spaces.
        references: one reference for each translation, tokenised in the same way.
    """
    return _score(_paper_bleu(), hypotheses, references)


def sacrebleu(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """Compute BLEU of plain texts, tokenised by sacrebleu itself ("13a") and so comparable between papers.

    Args:
        hypotheses: translations, detokenised.
        references: one reference for each translation, as published.
        lowercase: ignore case, for systems that write lower case only.
    """
    return _score(_sacrebleu().BLEU(lowercase=lowercase), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """Compute the character n-gram F-score, chrF2.

    Args:
        hypotheses: translations, detokenised.
        references: one reference for each translation.
        lowercase: ignore case.
    """
    return _score(_sacrebleu().CHRF(lowercase=lowercase), hypotheses, references)


def statistics(hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
    """Count words and n-grams of each sentence, from which `paper_bleu` of any subset can be computed.

    Args:
        hypotheses: translations, their words separated by spaces.
        references: one reference for each translation.

    Returns:
        int32 [N, 10], for `repulsive.metrics.bleu.bleu_of`.
    """
    metric = _paper_bleu(effective_order=True)  # avoids a warning about single sentences; the counts are the same
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        score = metric.sentence_score(hypothesis, [reference])
        rows.append([score.sys_len, score.ref_len, *score.counts, *score.totals])
    return torch.tensor(rows, dtype=torch.int32).view(-1, COLUMNS)


def check_installed() -> None:
    """Raise `DataError` unless sacrebleu is installed."""
    _sacrebleu()


def _paper_bleu(**settings: Any) -> Any:
    return _sacrebleu().BLEU(tokenize="none", smooth_method="none", lowercase=True, force=True, **settings)


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    if len(hypotheses) != len(references) or not hypotheses:
        raise DataError(f"{len(hypotheses)} translations for {len(references)} references: give one for each")
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return Score(float(result.score), str(metric.get_signature()))


def _sacrebleu() -> Any:
    try:
        return importlib.import_module("sacrebleu.metrics")
    except ImportError:
        raise DataError(f"BLEU needs the package sacrebleu: {install_command('translation')}") from None
