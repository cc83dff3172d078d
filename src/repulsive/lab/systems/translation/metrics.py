"""How good translations are: BLEU as papers report it, sacreBLEU with its signature, chrF, and paired comparisons."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repulsive.errors import DataError
from repulsive.metrics.compare import Comparison, compare_totals

ORDER = 4  # longest n-gram of BLEU
COLUMNS = 2 + 2 * ORDER  # of statistics: words of hypothesis and reference, n-grams in common, n-grams there are


@dataclass(frozen=True)
class Score:
    """A score of a whole set, and exactly what was computed.

    Args:
        value: from 0 to 100.
        signature: as sacrebleu writes it.
    """

    value: float
    signature: str


def paper_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU as papers report IWSLT14: words on spaces, lower-cased, nothing smoothed; what multi-bleu.perl gives.

    Args:
        hypotheses: translations, their words separated by spaces.
        references: one for each, tokenised in the same way.
    """
    return _scored(_paper(), hypotheses, references)


def sacrebleu(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """BLEU of texts as people write them, which sacrebleu tokenises itself ("13a"): comparable between papers.

    Args:
        hypotheses: translations, detokenised.
        references: one for each, untouched.
        lowercase: ignore case, for systems that write none.
    """
    return _scored(_metrics().BLEU(lowercase=lowercase), hypotheses, references)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> Score:
    """Character n-gram F-score, chrF2.

    Args:
        hypotheses: translations, detokenised.
        references: one for each.
        lowercase: ignore case.
    """
    return _scored(_metrics().CHRF(lowercase=lowercase), hypotheses, references)


def statistics(hypotheses: Sequence[str], references: Sequence[str]) -> Tensor:
    """What `paper_bleu` needs of each sentence, so that any selection of sentences can be scored.

    Args:
        hypotheses: translations, their words separated by spaces.
        references: one for each.

    Returns:
        int32 [N, 10], for `bleu_of`.
    """
    metric = _paper(effective_order=True)  # of single sentences it else warns; counts are the same
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        found = metric.sentence_score(hypothesis, [reference])
        rows.append([found.sys_len, found.ref_len, *found.counts, *found.totals])
    return torch.tensor(rows, dtype=torch.int32).view(-1, COLUMNS)


def bleu_of(totals: Tensor) -> Tensor:
    r"""$100 \, e^{\min(0, 1 - r / h)} \prod_{n=1}^4 (c_n / t_n)^{1/4}$ of summed statistics; 0 where any $c_n$ is 0.

    Args:
        totals: [..., 10]: words h and r of hypothesis and reference, n-grams in common c, n-grams t of the hypothesis.

    Returns:
        [...], float64.
    """
    h, r, c, t = totals.double().split([1, 1, ORDER, ORDER], dim=-1)
    precision = (c / t.clamp(min=1)).log().mean(-1)  # [...]: minus infinity where one is 0
    short = (1 - r / h.clamp(min=1)).clamp(max=0).squeeze(-1)
    return 100 * (precision + short).exp()


def compare_bleu(
    first: Tensor, second: Tensor, over: str = "items", *, level: float = 0.95, resamples: int = 1_000, seed: int = 0
) -> Comparison:
    """`metrics.compare.compare_totals` of BLEU: paired interval and randomisation test, mean over seeds.

    Args:
        first: statistics of each sentence under each seed, [S, N, 10] or [N, 10].
        second: the same of the other system.
        over: "items", "seeds" or "both".
        level: of the confidence interval.
        resamples: sets that are drawn.
        seed: of the resampling.

    Raises:
        ValueError: the shapes differ, or there are fewer than two units to resample.
    """
    if first.shape != second.shape or first.ndim not in (2, 3) or first.shape[-1] != COLUMNS:
        shapes = f"{list(first.shape)} and {list(second.shape)}"
        raise ValueError(f"statistics {shapes}: both need [seeds, items, {COLUMNS}]")
    return compare_totals(first, second, bleu_of, over, level=level, resamples=resamples, seed=seed)


def check() -> None:
    """Raise unless sacrebleu is installed.

    Raises:
        DataError: it is not.
    """
    _metrics()


def _paper(**settings: Any) -> Any:
    return _metrics().BLEU(tokenize="none", smooth_method="none", lowercase=True, force=True, **settings)


def _scored(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    if len(hypotheses) != len(references) or not hypotheses:
        raise DataError(f"{len(hypotheses)} translations for {len(references)} references: give one for each")
    found = metric.corpus_score(list(hypotheses), [list(references)])
    return Score(float(found.score), str(metric.get_signature()))


def _metrics() -> Any:
    try:
        return importlib.import_module("sacrebleu.metrics")
    except ImportError:
        raise DataError("BLEU needs the package sacrebleu: pip install 'repulsive[translation]'") from None
