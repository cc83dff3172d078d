"""Beam search over many sentences at a time, with a cache of keys and values; a beam of 1 is greedy search.

    best = beam_search(model, source, Ends(bos=2, eos=3), beam=5)[0][0]     # best hypothesis of the first sentence
    best.tokens, best.score

Each step synchronises with the device once, to count the sentences that are finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from repulsive.lab.layers.cache import Cache

NEVER = -math.inf
FINISHED_SHARE = 1 / 8  # drop finished sentences from the batch once they are at least this share of it
# cuDNN's attention is left out: on some GPUs torch prefers it, and it plans each new shape for up to half a second.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DecoderConfig(Protocol):
    """Model settings that beam search reads."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids, V."""

    @property
    def padding(self) -> int:
        """Id of the padding token."""


class Decoder(Protocol):
    """A sequence-to-sequence model that decodes one token at a time."""

    longest: int  # maximum number of tokens in a sentence

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model."""

    def start(self, source: Tensor) -> Cache:
        """Encode source sentences [B, S] and return a new cache."""

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Add one token of each hypothesis to the cache, and return the next logits: [B, K] -> [B, K, V]."""


@dataclass(frozen=True)
class Ends:
    """Tokens at the two ends of a sentence.

    Args:
        bos: the first token; never generated.
        eos: the last token.
    """

    bos: int
    eos: int


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Args:
        tokens: token ids, without `bos` and `eos`.
        score: log-probability / length^alpha; the length includes `eos`.
        log_probability: log-probability of all tokens and `eos`.
    """

    tokens: tuple[int, ...]
    score: float
    log_probability: float


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a beam search over many sentences.

    Args:
        beam: number of open hypotheses; 1 is greedy search.
        lenpen: alpha of log-probability / length^alpha.
        longest: maximum number of tokens in a hypothesis, end mark included.
        at_once: size of a batch.
    """

    beam: int
    lenpen: float = 1.0
    longest: int = 200
    at_once: int = 64

    def __post_init__(self) -> None:
        for name in ("beam", "longest", "at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.lenpen < math.inf:
            raise ValueError(f"lenpen={self.lenpen} must not be negative, and a finite number")


def limits(source: Tensor, padding: int, longest: int) -> Tensor:
    """Compute the maximum length of each translation with `eos`: twice the source length plus ten, at most `longest`.

    A limit depends only on its own sentence, so a translation does not depend on other sentences of the batch.

    Args:
        source: source sentences, [B, S].
        padding: id of the padding token.
        longest: upper bound.
    """
    return (2 * (source != padding).sum(1) + 10).clamp(max=longest)


@torch.inference_mode()
@sdpa_kernel(_ATTENTION)
def beam_search(
    model: Decoder,
    source: Tensor,
    ends: Ends,
    *,
    beam: int = 5,
    alpha: float = 1.0,
    nbest: int = 1,
    longest: int = 200,
    exact: bool = False,
) -> list[list[Hypothesis]]:
    r"""Find the translations with the best $\log p(y) / |y|^\alpha$ in a beam, with fairseq's stopping rule.

    Each step considers the 2 x beam best continuations. Those that end and are among the first `beam` are finished; the
    best `beam` of the others stay open. The best `beam` finished hypotheses of all steps are kept. A sentence is done
    when it has `beam` of them or, if `exact`, when no open hypothesis can beat the worst of them: $\log p$ only falls,
    so an open hypothesis with limit L scores at most $\log p / L^\alpha$. At its limit (see `limits`) a hypothesis is
    forced to end.

    Args:
        model: a decoder in evaluation mode.
        source: sentences [B, S], padded at the end.
        ends: the tokens at the two ends of a translation.
        beam: number of open hypotheses.
        alpha: length penalty; 0: none, 1: mean log-probability of a token.
        nbest: number of hypotheses to return for each sentence; at most `beam`, and fewer if fewer were found.
        longest: maximum number of tokens in a translation, `eos` included.
        exact: continue until no better hypothesis can be found.

    Returns:
        For each sentence its hypotheses, the best first.

    Raises:
        ValueError: a setting is out of range.
    """
    if not 1 <= nbest <= beam or alpha < 0 or not 1 <= longest <= model.longest:
        settings = f"beam={beam}, nbest={nbest}, alpha={alpha}, longest={longest}"
        raise ValueError(f"{settings}: needs 1 <= nbest <= beam, alpha >= 0 and longest from 1 to {model.longest}")
    device, count = source.device, len(source)
    # In shapes, A is the number of unfinished sentences, which is B at first.
    limit = limits(source, model.config.padding, longest)  # [A]
    soonest, latest = (int(x) for x in limit.aminmax())
    backpointers = Backpointers(count, beam, latest)
    rows = torch.arange(count, device=device)  # [A]
    last = torch.full((count, beam), ends.bos, device=device)  # [A, K]: last token of each hypothesis
    best = torch.full((count, beam), NEVER, dtype=torch.float64, device=device)  # [A, K]: finished scores
    cache = model.start(source)
    never, forbidden = best.new_full((), NEVER), _forbidden(model, ends, device)
    open_ = never.expand(count, beam).clone()  # [A, K]: log-probabilities
    open_[:, 0] = 0.0  # all hypotheses start equal, so only the first one is open
    left, length = count, 0
    while left:
        length += 1
        words = _log_probabilities(
            model.step(last, cache), forbidden, ends, limit <= length if length >= soonest else None
        )  # [A, K, V]
        never, open_, size = never.to(words.dtype), open_.to(words.dtype), words.shape[-1]
        done, places, open_, kept = extend_beam(words.add_(open_.unsqueeze(2)), beam, ends.eos)  # [A, K]
        backpointers.add(done, places, kept)
        best = torch.cat([best, done.double() / length**alpha], dim=1).topk(beam).values
        worst = best[:, -1]  # [A]: minus infinity until K are finished
        unfinished = worst < open_[:, 0] / limit**alpha if exact else worst == NEVER
        unfinished = unfinished & (open_[:, 0] > NEVER)
        open_ = torch.where(unfinished.unsqueeze(1), open_, never)
        last, origin, left = kept % size, kept // size, int(unfinished.sum())
        if left > (1 - FINISHED_SHARE) * len(rows):
            cache.keep(origin)
            continue
        backpointers.write(rows)
        (stay,) = unfinished.nonzero(as_tuple=True)  # empty at the end
        cache.keep(origin, stay)
        rows, limit, last, best, open_ = rows[stay], limit[stay], last[stay], best[stay], open_[stay]
    return backpointers.hypotheses(nbest, alpha, model.config.vocabulary)


def extend_beam(totals: Tensor, beam: int, eos: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select among all continuations of open hypotheses, as described in `beam_search`.

    Args:
        totals: log-probabilities of the continuations, [A, open hypotheses, V].
        beam: number of hypotheses to keep, K.
        eos: the last token.

    Returns:
        Finished log-probabilities (minus infinity for a continuation that does not end) and their places, then those of
        the hypotheses that stay open; [A, K] each. A place is V times the index of the extended hypothesis, plus the
        token.
    """
    size, totals = totals.shape[-1], totals.flatten(1)
    values, places = totals.topk(min(2 * beam, totals.shape[1]))  # [A, 2 K]
    if (missing := 2 * beam - values.shape[1]) > 0:  # a small vocabulary has fewer continuations
        values, places = (F.pad(x, (0, missing), value=empty) for x, empty in ((values, NEVER), (places, 0)))
    ended = places % size == eos
    done = torch.where(ended, values, NEVER)[:, :beam]
    open_, chosen = torch.where(ended, NEVER, values).topk(beam)
    return done, places[:, :beam], open_, places.gather(1, chosen)


def _forbidden(model: Decoder, ends: Ends, device: torch.device) -> Tensor:
    """List the tokens that are never generated."""
    return torch.tensor([model.config.padding, ends.bos], device=device)


def _log_probabilities(logits: Tensor, forbidden: Tensor, ends: Ends, last: Tensor | None) -> Tensor:
    """Compute log-probabilities [A, K, V] in float32 or better; sentences marked in `last`, bool [A], can only end."""
    words = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    words.index_fill_(-1, forbidden, NEVER)
    if last is None:
        return words
    end = words[..., ends.eos].clone()  # [A, K]
    words.masked_fill_(last[:, None, None], NEVER)
    words[..., ends.eos] = end
    return words


class Backpointers:
    """History of a search, from which finished hypotheses are traced back.

    Args:
        sentences: number of sentences, B.
        beam: number of open hypotheses, K.
        longest: maximum number of steps.
    """

    def __init__(self, sentences: int, beam: int, longest: int) -> None:
        self.done = torch.full((longest, sentences, beam), NEVER, dtype=torch.float64)  # finished log-probabilities
        self.ends, self.kept = torch.zeros(2, longest, sentences, beam, dtype=torch.int64)  # origin V + token
        self.length = 0
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, done: Tensor, ends: Tensor, kept: Tensor) -> None:
        """Record one step of the unfinished sentences, [A, K] each; stays on the device, without synchronising."""
        self._steps.append((done, ends, kept))

    def write(self, rows: Tensor) -> None:
        """Copy the steps since the last call, which belong to the sentences `rows`, [A], to the CPU."""
        start, self.length = self.length, self.length + len(self._steps)
        where = rows.cpu()
        for stored, steps in zip((self.done, self.ends, self.kept), zip(*self._steps, strict=True), strict=True):
            stored[start : self.length, where] = torch.stack(steps).cpu().to(stored.dtype)  # [steps, A, K]
        self._steps.clear()

    def hypotheses(self, nbest: int, alpha: float, size: int) -> list[list[Hypothesis]]:
        """Return the finished hypotheses of each sentence, the best first.

        Args:
            nbest: maximum number of hypotheses to return for each sentence.
            alpha: length penalty.
            size: number of token ids.
        """
        beam = self.done.shape[2]
        lengths = torch.arange(1, self.length + 1, dtype=torch.float64)[:, None, None]  # [T, 1, 1]
        done, ends = (x[: self.length].transpose(0, 1).flatten(1) for x in (self.done, self.ends))  # [B, T K]
        scores = (self.done[: self.length] / lengths**alpha).transpose(0, 1).flatten(1)
        scores, best = scores.topk(nbest)  # [B, N]
        before, origin = best // beam, ends.gather(1, best) // size  # tokens before eos; the ended hypothesis
        tokens = torch.empty(*best.shape, self.length, dtype=torch.int64)
        for step in reversed(range(self.length)):
            came = self.kept[step].gather(1, origin)  # [B, N]
            tokens[..., step] = came % size
            origin = torch.where(step < before, came // size, origin)
        listed = zip(*(x.tolist() for x in (tokens, before, scores, done.gather(1, best))), strict=True)
        return [
            [Hypothesis(tuple(row[:length]), score, value) for row, length, score, value in each if score > NEVER]
            for each in (zip(*sentence, strict=True) for sentence in listed)
        ]
