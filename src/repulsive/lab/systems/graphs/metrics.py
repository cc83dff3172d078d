"""Quality of generated texts: BLEU-1 to 4, METEOR, ROUGE, entity coverage and repeated clauses.

    scores = score_texts(texts, references, entities)       # one list of references, and of entities, for each text
    scores["BLEU-4"], scores["entity coverage"]

Texts are lower-cased and split at spaces, so give words separated by spaces. ROUGE-1, 2 and L split as the package
rouge-score does, at all characters other than a-z and digits.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from repulsive.errors import DataError
from repulsive.lab.systems.graphs.meteor import meteor

References = Sequence[Sequence[str]]  # one or more references for each text
ORDER = 4
BETA = 1.2  # weight of recall in the ROUGE-L of image captioning, which GraphWriter's scores are
ENDS = frozenset((*",;:.!?", "and", "or", "but", "nor", "yet", "so", "while", "whereas", "because", "although"))


@dataclass(frozen=True)
class Rouge:
    """ROUGE means over texts, from 0 to 100; each text is compared with the reference that gives the best `f`.

    Args:
        precision: fraction of the text that the reference has.
        recall: fraction of the reference that the text has.
        f: harmonic mean of precision and recall.
    """

    precision: float
    recall: float
    f: float


def score_texts(
    texts: Sequence[str], references: References, entities: Sequence[Sequence[str]] | None = None
) -> dict[str, float]:
    """Compute all scores, from 0 to 100, by name; METEOR, if installed, is named after its version.

    If METEOR fails it is left out with a warning, so that a long training still gets its other scores.

    Args:
        texts: one for each graph, words separated by spaces.
        references: one or more references for each text.
        entities: entities of each graph, words separated by spaces; None: do not compute coverage.

    Raises:
        DataError: the numbers of texts, references and entities differ.
    """
    scores = {f"BLEU-{n}": score for n, score in enumerate(bleu(texts, references), 1)}
    try:
        judged = meteor(texts, references)
    except DataError as error:  # BLEU above has already raised an error for wrong arguments
        warnings.warn(f"{error}; it is left out", stacklevel=2)
    else:
        scores |= {judged.name: judged.value} if judged is not None else {}
    for name in ("1", "2", "L"):
        scores[f"ROUGE-{name}"] = rouge(texts, references, name).f
    scores["ROUGE-L (caption)"] = caption_rouge(texts, references)
    if entities is not None:
        scores["entity coverage"] = entity_coverage(texts, entities)
    scores["repeated clauses"] = repeated_clauses(texts)
    return scores


def bleu(texts: Sequence[str], references: References) -> list[float]:
    r"""BLEU-n $= 100 \, e^{\min(0, 1 - r / h)} \prod_{k=1}^n (c_k / t_k)^{1/n}$ for n = 1 to 4, of all texts together.

    $h$ words in the texts, $r$ in the nearest references (the shorter of two equally near), $t_k$ k-grams in the texts,
    of which the references have $c_k$ (Papineni et al., 2002). Nothing is smoothed.

    Args:
        texts: words separated by spaces.
        references: one or more references for each text.
    """
    h, r, *counts = (sum(column) for column in zip(*bleu_statistics(texts, references), strict=True))
    common, total = counts[:ORDER], counts[ORDER:]
    if not h:
        return [0.0] * ORDER
    logs = [math.log(c / t) if c else -math.inf for c, t in zip(common, total, strict=True)]
    return [100 * math.exp(min(0.0, 1 - r / h) + sum(logs[:n]) / n) for n in range(1, ORDER + 1)]


def bleu_statistics(texts: Sequence[str], references: References) -> list[list[int]]:
    """Count h, r, c_1 to c_4, t_1 to t_4 for each text, from which `bleu` of any subset can be computed.

    Args:
        texts: words separated by spaces.
        references: one or more references for each text.
    """
    _check(texts, references)
    rows = []
    for text, some in zip(texts, references, strict=True):
        words, others = _words(text), [_words(reference) for reference in some]
        nearest = min((abs(len(other) - len(words)), len(other)) for other in others)[1]
        common, total = [], []
        for k in range(1, ORDER + 1):
            most: Counter[tuple[str, ...]] = Counter()
            for other in others:
                most |= _grams(other, k)
            counts = _grams(words, k)
            common.append((counts & most).total())
            total.append(counts.total())
        rows.append([len(words), nearest, *common, *total])
    return rows


def rouge(texts: Sequence[str], references: References, name: str = "L") -> Rouge:
    """Compute ROUGE-1, 2 (shared n-grams) or L (longest common subsequence), as rouge-score without stemming does.

    Args:
        texts: the texts.
        references: one or more references for each text.
        name: "1", "2" or "L".
    """
    _check(texts, references)
    if name not in ("1", "2", "L"):
        raise DataError(f"ROUGE-{name}: choose 1, 2 or L")
    rows = []
    for text, some in zip(texts, references, strict=True):
        scores = [_overlap(_letters(text), _letters(reference), name) for reference in some]
        rows.append(max(scores, key=lambda score: score[2]))
    return Rouge(*(100 * sum(column) / len(rows) for column in zip(*rows, strict=True)))


def caption_rouge(texts: Sequence[str], references: References) -> float:
    r"""Compute ROUGE-L as in image captioning: $(1 + β^2) P R / (R + β^2 P)$, β = 1.2, the mean over texts.

    P and R are each the best over the references; words are split at spaces.

    Args:
        texts: words separated by spaces.
        references: one or more references for each text.
    """
    _check(texts, references)
    total = 0.0
    for text, some in zip(texts, references, strict=True):
        scores = [_overlap(_words(text), _words(reference), "L") for reference in some]
        p, r = max(score[0] for score in scores), max(score[1] for score in scores)
        total += (1 + BETA**2) * p * r / (r + BETA**2 * p) if p and r else 0.0
    return 100 * total / len(texts)


def entity_coverage(texts: Sequence[str], entities: Sequence[Sequence[str]]) -> float:
    """Compute the percentage of entities, each counted once per graph, that occur in the graph's text as a phrase.

    Args:
        texts: words separated by spaces.
        entities: entities of each text's graph, words separated by spaces.

    Example:
        >>> entity_coverage(["we use Beam search ."], [["beam search", "parsing"]])
        50.0
    """
    _check(texts, entities, "lists of entities", empty=True)
    mentioned = total = 0
    for text, some in zip(texts, entities, strict=True):
        padded = f" {' '.join(_words(text))} "
        names = {" ".join(_words(entity)) for entity in some} - {""}
        mentioned += sum(f" {name} " in padded for name in names)
        total += len(names)
    return 100 * mentioned / max(1, total)


def repeated_clauses(texts: Sequence[str]) -> float:
    """Compute the percentage of clauses that occurred before in the same text.

    A clause is the text between two of `ENDS` (punctuation and conjunctions), or the ends of the text.

    Args:
        texts: words separated by spaces.

    Example:
        >>> repeated_clauses(["we win , we win and we lose ."])
        33.33333333333333
    """
    repeated = total = 0
    for text in texts:
        clauses: Counter[tuple[str, ...]] = Counter()
        clause: list[str] = []
        for word in [*_words(text), "."]:
            if word not in ENDS:
                clause.append(word)
                continue
            if clause:
                clauses[tuple(clause)] += 1
            clause = []
        total += clauses.total()
        repeated += clauses.total() - len(clauses)
    return 100 * (repeated / max(1, total))


def _overlap(words: list[str], others: list[str], name: str) -> tuple[float, float, float]:
    """Compute precision, recall and their harmonic mean."""
    if name == "L":
        common, mine, theirs = _longest_common(words, others), len(words), len(others)
    else:
        counts, most = _grams(words, int(name)), _grams(others, int(name))
        common, mine, theirs = (counts & most).total(), counts.total(), most.total()
    p, r = common / max(1, mine), common / max(1, theirs)
    return p, r, 2 * p * r / (p + r) if common else 0.0


def _longest_common(first: list[str], second: list[str]) -> int:
    row = [0] * (len(second) + 1)
    for word in first:
        before = row
        row = [0]
        for i, other in enumerate(second):
            row.append(before[i] + 1 if word == other else max(before[i + 1], row[i]))
    return row[-1]


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))


def _words(text: str) -> list[str]:
    return text.lower().split()


def _letters(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def _check(texts: Sequence[str], others: References, what: str = "lists of references", empty: bool = False) -> None:
    if isinstance(texts, str) or any(isinstance(some, str) for some in others):
        raise DataError(f"give a list of texts, and a list of {what}, not a single text")
    if len(texts) != len(others) or not texts:
        raise DataError(f"{len(texts)} texts for {len(others)} {what}: give one for each")
    if not empty and not all(others):
        raise DataError(f"text {[bool(some) for some in others].index(False)} has no reference: give at least one")
