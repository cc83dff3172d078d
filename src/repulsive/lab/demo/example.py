"""Choose the sentence and the seed whose effect is nearest the median, so that the page does not show the best case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from repulsive import Heads
from repulsive.lab.demo.findings import Findings
from repulsive.lab.demo.settings import PLAIN, REPELLED
from repulsive.lab.demo.text import encode
from repulsive.lab.systems.lm.model import Decoder
from repulsive.pages.data.layers import Layered, Maps

SENTENCES = 12
_SPACE = "␣"


@dataclass(frozen=True)
class Chosen:
    """The sentence that the page shows, and how it was chosen.

    Args:
        sentence: the sentence.
        seed: seed of the two models that read it.
        effect: difference in the mean similarity of heads on this sentence, repelled less plain.
        median: median of this difference over all sentences and seeds.
        candidates: number of sentences times number of seeds.
    """

    sentence: str
    seed: int
    effect: float
    median: float
    candidates: int


def choose(findings: Findings, sentences: Sequence[str]) -> Chosen:
    """Find the pair of sentence and seed with the effect nearest the median; the first of several.

    Args:
        findings: results of all runs.
        sentences: candidates.
    """
    effects: dict[tuple[int, str], float] = {}
    for seed in findings.seeds:
        models = {arm: findings.results[arm, seed].model() for arm in (PLAIN, REPELLED)}
        similarity = {arm: _similarities(model, sentences) for arm, model in models.items()}
        for index, sentence in enumerate(sentences):
            effects[seed, sentence] = similarity[REPELLED][index] - similarity[PLAIN][index]
    median = statistics.median(effects.values())
    seed, sentence = min(effects, key=lambda key: abs(effects[key] - median))
    return Chosen(sentence, seed, effects[seed, sentence], median, len(effects))


def read(findings: Findings, chosen: Chosen) -> Layered:
    """Capture the attention of every head of the plain and the repelled model on the chosen sentence."""
    tokens = encode(chosen.sentence)[None]  # [1, T]
    readings = {}
    for arm in (PLAIN, REPELLED):
        captured = Heads(findings.results[arm, chosen.seed].model()).attention(tokens)
        weights = [layer[0] for layer in captured if layer is not None]  # [M, T, T] each
        readings[arm] = [Maps(f"layer {number}", layer, "text", "text") for number, layer in enumerate(weights)]
    return Layered({"text": [_SPACE if letter == " " else letter for letter in chosen.sentence]}, readings)


def _similarities(model: Decoder, sentences: Sequence[str]) -> list[float]:
    heads = Heads(model)
    layers = [heads.similarity([encode(sentence)[None]], twins=0) for sentence in sentences]  # one list per sentence
    return [statistics.fmean(layer.mean for layer in each) for each in layers]
