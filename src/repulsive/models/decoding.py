"""Beam search and greedy search: many sentences at a time, keys and values of the words so far kept.

    best = beam_search(model, source, Ends(bos=2, eos=3), beam=5)[0][0]     # of the first sentence
    best.tokens, best.score

A search waits for its device once a step, to see who is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.models.transformer import LONGEST, Transformer

_NEVER = -math.inf


@dataclass(frozen=True)
class Ends:
    """Tokens that mean something to a search.

    Args:
        bos: what a translation begins with; it is never produced.
        eos: what ends it.
    """

    bos: int
    eos: int


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Args:
        tokens: without the ends.
        score: log-probability / length^alpha; the length counts the end.
        log_probability: of all tokens and the end.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float


def limits(source: Tensor, padding: int, longest: int) -> Tensor:
    """Most tokens of each translation, its end included: twice the source and ten, and never more than `longest`.

    It depends on the sentence alone, so that a sentence is translated the same in any company.

    Args:
        source: [B, S].
        padding: id of the padding token.
        longest: at most so many.
    """
    return (2 * (source != padding).sum(1) + 10).clamp(max=longest)


@torch.inference_mode()
def beam_search(
    model: Transformer,
    source: Tensor,
    ends: Ends,
    *,
    beam: int = 5,
    alpha: float = 1.0,
    nbest: int = 1,
    longest: int = 200,
    exact: bool = False,
) -> list[list[Hypothesis]]:
    r"""The translations with the best $\log p(y) / |y|^\alpha$ that a beam finds, as fairseq searches.

    Of each step's 2 x beam best continuations, those that end and are among the first `beam` are finished; the best
    `beam` that do not end go on. The best `beam` finished ones of all steps are kept. A sentence is done when it has so
    many, or, if `exact`, when no open hypothesis can become better than the worst of them: $\log p$ only falls, so at
    its longest, L, an open one has at most $\log p / L^\alpha$. At its limit (see `limits`) a hypothesis ends.

    Args:
        model: in evaluation mode.
        source: sentences [B, S], padded at the end.
        ends: the tokens at the two ends of a translation.
        beam: hypotheses that are followed.
        alpha: length penalty; 0: none, 1: mean log-probability of a token.
        nbest: how many to return for each sentence, if so many were found; at most `beam`.
        longest: most tokens of a translation, its end included.
        exact: search on until nothing better can be found.

    Returns:
        For each sentence its hypotheses, the best first.

    Raises:
        ValueError: a setting cannot be.
    """
    if not 1 <= nbest <= beam or alpha < 0 or not 1 <= longest <= LONGEST:
        told = f"beam={beam}, nbest={nbest}, alpha={alpha}, longest={longest}"
        raise ValueError(f"{told}: needs 1 <= nbest <= beam, alpha >= 0 and longest from 1 to {LONGEST}")
    device, count = source.device, len(source)
    limit = limits(source, model.config.padding, longest)  # [A]: of the sentences still at work, all of them at first
    soonest, latest = (int(x) for x in limit.aminmax())
    finished = _Finished(count, beam, latest, ends.eos, device)
    rows = torch.arange(count, device=device)  # [A]
    tokens = torch.full((count, beam, 1), ends.bos, device=device)  # [A, K, T + 1]
    open_ = torch.full((count, beam), _NEVER, device=device)  # [A, K]: log-probabilities
    open_[:, 0] = 0.0  # all begin alike: one of them is enough
    cache = model.start(source)
    length = 0
    while len(rows):
        length += 1
        logits = model.step(tokens[:, :, -1], cache)
        words = _log_probabilities(logits, model, ends, limit <= length if length >= soonest else None)  # [A, K, V]
        open_ = open_.to(words.dtype)
        size = words.shape[-1]
        totals = (open_.unsqueeze(2) + words).flatten(1)  # [A, K V]
        values, places = totals.topk(min(2 * beam, totals.shape[1]))  # [A, 2 K]
        origin, word = places // size, places % size
        grown = torch.cat([_of_each(tokens, origin), word.unsqueeze(2)], dim=2)  # [A, 2 K, T + 2]
        ended = word == ends.eos
        done = values.masked_fill(~ended, _NEVER)[:, :beam]
        finished.add(rows, grown[:, :beam, 1:], done, length**alpha)
        open_, chosen = values.masked_fill(ended, _NEVER).topk(beam)  # [A, K]
        tokens, origin = _of_each(grown, chosen), origin.gather(1, chosen)
        worst = finished.scores[rows, -1]  # [A]: minus infinity until there are K
        bar = open_[:, 0] / limit**alpha if exact else torch.full_like(worst, torch.finfo(worst.dtype).min)
        go_on = (worst < bar) & (open_[:, 0] > _NEVER)
        if bool(go_on.all()):
            cache.keep(origin)
        else:
            (left,) = go_on.nonzero(as_tuple=True)
            cache.keep(origin, left)
            rows, limit, tokens, open_ = rows[left], limit[left], tokens[left], open_[left]
    return finished.hypotheses(nbest)


@torch.inference_mode()
def greedy(model: Transformer, source: Tensor, ends: Ends, *, longest: int = 200) -> list[Hypothesis]:
    """The most probable token after the other, until the end or the limit: `beam_search` with a beam of 1.

    Args:
        model: in evaluation mode.
        source: sentences [B, S], padded at the end.
        ends: the tokens at the two ends of a translation.
        longest: most tokens of a translation, its end included.
    """
    limit = limits(source, model.config.padding, longest)  # [B]
    cache = model.start(source)
    last = torch.full((len(source), 1), ends.bos, device=source.device)  # [B, 1]
    over = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    total: Tensor | float = 0.0
    found: list[Tensor] = []
    while not bool(over.all()):
        words = _log_probabilities(model.step(last, cache), model, ends, limit <= len(found) + 1)  # [B, 1, V]
        best, last = words.max(-1)  # [B, 1]
        total = total + best[:, 0].masked_fill(over, 0.0)
        found.append(last[:, 0].masked_fill(over, ends.eos))
        over = over | (last[:, 0] == ends.eos)
    hypotheses = []
    for row, value in zip(torch.stack(found, 1).tolist(), torch.as_tensor(total).tolist(), strict=True):
        length = row.index(ends.eos)
        hypotheses.append(Hypothesis(tuple(row[:length]), value / (length + 1), value))
    return hypotheses


def _log_probabilities(logits: Tensor, model: Transformer, ends: Ends, last: Tensor | None) -> Tensor:
    """[A, K, V], float32 at least: never padding or a beginning, and nothing but the end at the last chance."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    words = logits.log_softmax(-1)
    for token in (model.config.padding, ends.bos):
        words[..., token] = _NEVER
    if last is None:
        return words
    end = words[..., ends.eos].clone()  # [A, K]
    words = words.masked_fill(last[:, None, None], _NEVER)
    words[..., ends.eos] = end
    return words


def _of_each(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of each sentence: [A, N, ...], [A, K] -> [A, K, ...]."""
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), indices]


class _Finished:
    """The best finished hypotheses of every sentence."""

    def __init__(self, sentences: int, beam: int, longest: int, eos: int, device: torch.device) -> None:
        self.eos = eos
        self.scores = torch.full((sentences, beam), _NEVER, dtype=torch.float64, device=device)
        self.log_probabilities = self.scores.clone()
        self.tokens = torch.full((sentences, beam, longest), eos, device=device)

    def add(self, rows: Tensor, tokens: Tensor, log_probabilities: Tensor, penalty: float) -> None:
        """Some more, of the sentences `rows`: [A, K, T] and [A, K], minus infinity for what is none."""
        beam, longest = self.tokens.shape[1:]
        tokens = torch.nn.functional.pad(tokens, (0, longest - tokens.shape[2]), value=self.eos)
        scores = torch.cat([self.scores[rows], log_probabilities.double() / penalty], dim=1)  # [A, 2 K]
        self.scores[rows], best = scores.topk(beam)
        both = torch.cat([self.log_probabilities[rows], log_probabilities.double()], dim=1)
        self.log_probabilities[rows] = both.gather(1, best)
        self.tokens[rows] = _of_each(torch.cat([self.tokens[rows], tokens], dim=1), best)

    def hypotheses(self, nbest: int) -> list[list[Hypothesis]]:
        listed = zip(self.tokens.tolist(), self.scores.tolist(), self.log_probabilities.tolist(), strict=True)
        found = []
        for tokens, scores, values in listed:
            best = [each for each in zip(tokens, scores, values, strict=True) if each[1] > _NEVER][:nbest]
            found.append([Hypothesis(tuple(row[: row.index(self.eos)]), *rest) for row, *rest in best])
        return found
