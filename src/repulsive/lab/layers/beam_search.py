"""Beam search and greedy search: many sentences at a time, keys and values of the words so far kept.

    best = beam_search(model, source, Ends(bos=2, eos=3), beam=5)[0][0]     # of the first sentence
    best.tokens, best.score

A search waits for its device once a step, to see who is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from repulsive.lab.systems.translation.model import LONGEST, Transformer

_NEVER = -math.inf
# Not cuDNN's, which torch prefers on some GPUs: it plans anew, for up to half a second, at every shape it meets.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_GONE = 1 / 8  # of the sentences: when so many are done, the others move together


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


def check_search(search: Any) -> None:
    """Raise unless a search has `beam`, `longest` and `at_once` of at least 1, and a `lenpen` from 0 on."""
    for name in ("beam", "longest", "at_once"):
        if getattr(search, name) < 1:
            raise ValueError(f"{name}={getattr(search, name)} must be at least 1")
    if not 0 <= search.lenpen < math.inf:
        raise ValueError(f"lenpen={search.lenpen} must not be negative, and a finite number")


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
@sdpa_kernel(_ATTENTION)
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
    trail = _Trail(count, beam, latest)
    rows = torch.arange(count, device=device)  # [A]
    last = torch.full((count, beam), ends.bos, device=device)  # [A, K]: the last word of each hypothesis
    best = torch.full((count, beam), _NEVER, dtype=torch.float64, device=device)  # [A, K]: scores of finished ones
    cache = model.start(source)
    never, forbidden = best.new_full((), _NEVER), _forbidden(model, ends, device)
    open_ = never.expand(count, beam).clone()  # [A, K]: log-probabilities
    open_[:, 0] = 0.0  # all begin alike: one of them is enough
    left, length = count, 0
    while left:
        length += 1
        words = _log_probabilities(
            model.step(last, cache), forbidden, ends, limit <= length if length >= soonest else None
        )  # [A, K, V]
        never, open_, size = never.to(words.dtype), open_.to(words.dtype), words.shape[-1]
        totals = words.add_(open_.unsqueeze(2)).flatten(1)  # [A, K V]
        values, places = totals.topk(min(2 * beam, totals.shape[1]))  # [A, 2 K]: place = origin V + word
        ended = places % size == ends.eos
        done = torch.where(ended, values, never)[:, :beam]
        open_, chosen = torch.where(ended, never, values).topk(beam)  # [A, K]
        kept = places.gather(1, chosen)
        trail.add(done, places[:, :beam], kept)
        best = torch.cat([best, done.double() / length**alpha], dim=1).topk(beam).values
        worst = best[:, -1]  # [A]: minus infinity until there are K
        go_on = worst < open_[:, 0] / limit**alpha if exact else worst == _NEVER
        go_on = go_on & (open_[:, 0] > _NEVER)
        open_ = torch.where(go_on.unsqueeze(1), open_, never)
        last, origin, left = kept % size, kept // size, int(go_on.sum())
        if left > (1 - _GONE) * len(rows):
            cache.keep(origin)
            continue
        trail.write(rows)
        (stay,) = go_on.nonzero(as_tuple=True)  # none, at the end
        cache.keep(origin, stay)
        rows, limit, last, best, open_ = rows[stay], limit[stay], last[stay], best[stay], open_[stay]
    return trail.hypotheses(nbest, alpha, model.config.vocabulary)


@torch.inference_mode()
@sdpa_kernel(_ATTENTION)
def greedy(model: Transformer, source: Tensor, ends: Ends, *, longest: int = 200) -> list[Hypothesis]:
    """The most probable token after the other, until the end or the limit: `beam_search` with a beam of 1.

    Args:
        model: in evaluation mode.
        source: sentences [B, S], padded at the end.
        ends: the tokens at the two ends of a translation.
        longest: most tokens of a translation, its end included.
    """
    limit = limits(source, model.config.padding, longest)  # [B]
    cache, forbidden = model.start(source), _forbidden(model, ends, source.device)
    last = torch.full((len(source), 1), ends.bos, device=source.device)  # [B, 1]
    over = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    total: Tensor | float = 0.0
    found: list[Tensor] = []
    while not bool(over.all()):
        words = _log_probabilities(model.step(last, cache), forbidden, ends, limit <= len(found) + 1)  # [B, 1, V]
        best, last = words.max(-1)  # [B, 1]
        total = total + best[:, 0].masked_fill(over, 0.0)
        found.append(last[:, 0].masked_fill(over, ends.eos))
        over = over | (last[:, 0] == ends.eos)
    hypotheses = []
    for row, value in zip(torch.stack(found, 1).tolist(), torch.as_tensor(total).tolist(), strict=True):
        length = row.index(ends.eos)
        hypotheses.append(Hypothesis(tuple(row[:length]), value / (length + 1), value))
    return hypotheses


def _forbidden(model: Transformer, ends: Ends, device: torch.device) -> Tensor:
    """What no translation has."""
    return torch.tensor([model.config.padding, ends.bos], device=device)


def _log_probabilities(logits: Tensor, forbidden: Tensor, ends: Ends, last: Tensor | None) -> Tensor:
    """[A, K, V], float32 at least: never what is forbidden, and nothing but the end at the last chance."""
    words = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    words.index_fill_(-1, forbidden, _NEVER)
    if last is None:
        return words
    end = words[..., ends.eos].clone()  # [A, K]
    words.masked_fill_(last[:, None, None], _NEVER)
    words[..., ends.eos] = end
    return words


class _Trail:
    """What a search did, step by step: enough to find the way back from every end.

    Args:
        sentences: B.
        beam: K.
        longest: most steps.
    """

    def __init__(self, sentences: int, beam: int, longest: int) -> None:
        self.done = torch.full((longest, sentences, beam), _NEVER, dtype=torch.float64)  # log-probabilities of ends
        self.ends, self.kept = torch.zeros(2, longest, sentences, beam, dtype=torch.int64)  # origin V + word
        self.length = 0
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, done: Tensor, ends: Tensor, kept: Tensor) -> None:
        """One more step of the sentences still at work, [A, K] each, on the device: nobody waits for it."""
        self._steps.append((done, ends, kept))

    def write(self, rows: Tensor) -> None:
        """Bring home the steps since the last time; the sentences were `rows`, [A]."""
        start, self.length = self.length, self.length + len(self._steps)
        where = rows.cpu()
        for home, steps in zip((self.done, self.ends, self.kept), zip(*self._steps, strict=True), strict=True):
            home[start : self.length, where] = torch.stack(steps).cpu().to(home.dtype)  # [steps, A, K]
        self._steps.clear()

    def hypotheses(self, nbest: int, alpha: float, size: int) -> list[list[Hypothesis]]:
        """The best of each sentence, the best first.

        Args:
            nbest: how many, if there are so many.
            alpha: length penalty.
            size: words in the vocabulary.
        """
        beam = self.done.shape[2]
        lengths = torch.arange(1, self.length + 1, dtype=torch.float64)[:, None, None]  # [T, 1, 1]
        done, ends = (x[: self.length].transpose(0, 1).flatten(1) for x in (self.done, self.ends))  # [B, T K]
        scores = (self.done[: self.length] / lengths**alpha).transpose(0, 1).flatten(1)
        scores, best = scores.topk(nbest)  # [B, N]
        before, origin = best // beam, ends.gather(1, best) // size  # words before the end, and who it was that ended
        tokens = torch.empty(*best.shape, self.length, dtype=torch.int64)
        for step in reversed(range(self.length)):
            went = self.kept[step].gather(1, origin)  # [B, N]
            tokens[..., step] = went % size
            origin = torch.where(step < before, went // size, origin)
        listed = zip(*(x.tolist() for x in (tokens, before, scores, done.gather(1, best))), strict=True)
        return [
            [Hypothesis(tuple(row[:length]), score, value) for row, length, score, value in each if score > _NEVER]
            for each in (zip(*sentence, strict=True) for sentence in listed)
        ]
