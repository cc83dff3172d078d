"""Beam search for GraphWriter: many graphs at a time. It waits for its device every fourth step, to see who is done.

    texts = write(model, titles, entities, relations, types, Ends(bos=2, eos=3), beam=4)

A text's tokens are words, or the size of the vocabulary + the number of the entity that is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repulsive.lab.layers.beam_search import FINISHED_SHARE, NEVER, Ends, Hypothesis, Trail
from repulsive.lab.systems.graphs.model import GraphWriter

_LOOK = 4  # steps between two looks at who is done: those that are stay as they are meanwhile


@torch.inference_mode()
def write(
    model: GraphWriter,
    titles: Tensor | None,
    entities: Tensor,
    relations: Tensor,
    types: Tensor,
    ends: Ends,
    *,
    beam: int = 4,
    alpha: float = 1.0,
    longest: int = 200,
    forbidden: Sequence[int] = (),
) -> list[Hypothesis]:
    r"""The text with the best $\log p(y) / |y|^\alpha$ that a beam finds of each graph, the end counted.

    As `decoding.beam_search`: of each step's 2 x beam best continuations, those that end and are among the first `beam`
    are finished; the best `beam` that do not end go on. A graph is done when so many are finished. At its longest a
    text ends.

    Args:
        model: in evaluation mode.
        titles: as the model takes them.
        entities: as the model takes them.
        relations: as the model takes them.
        types: the word each entity's type is, [B, E]: what follows a copy is told it.
        ends: the words at the two ends of a text.
        beam: hypotheses that are followed.
        alpha: length penalty; 0: none, 1: mean log-probability of a word.
        longest: most words of a text, its end included.
        forbidden: words that no text has, beside padding and the beginning.

    Raises:
        ValueError: a setting cannot be.
    """
    if beam < 1 or alpha < 0 or longest < 1:
        raise ValueError(f"beam={beam}, alpha={alpha}, longest={longest}: needs beam and longest >= 1 and alpha >= 0")
    device, words = entities.device, model.config.words
    size = words + entities.shape[1]
    never_written = torch.tensor(sorted({0, ends.bos, *forbidden} - {ends.eos}), device=device)
    spoken = torch.cat([torch.arange(words, device=device).expand(len(types), -1), types], dim=1)  # [A, V + E]
    memory = model.start(titles, entities, relations)
    state = model.begin(memory)  # [A, 1, ...]
    rows = torch.arange(len(entities), device=device)  # [A]: graphs still at work
    trail = Trail(len(entities), beam, longest)
    last = torch.full((len(entities), 1), ends.bos, device=device)  # [A, K], K = 1 at first
    open_ = torch.zeros(len(entities), 1, dtype=memory.root.dtype, device=device)  # [A, K]: log-probabilities
    finished = torch.zeros(len(entities), dtype=torch.int64, device=device)  # [A]
    for length in range(1, longest + 1):
        logs, state = model.step(last, state, memory)  # [A, K, V + E]
        logs.index_fill_(-1, never_written, NEVER)
        if length == longest:
            end = logs[..., ends.eos].clone()
            logs.fill_(NEVER)
            logs[..., ends.eos] = end
        totals = (logs + open_.unsqueeze(2)).flatten(1)  # [A, K (V + E)]
        values, places = totals.topk(min(2 * beam, totals.shape[1]))  # place = origin (V + E) + word
        values, places = (_wide(x, 2 * beam, empty) for x, empty in ((values, NEVER), (places, 0)))
        ended = places % size == ends.eos
        done = values.masked_fill(~ended, NEVER)[:, :beam]
        open_, chosen = values.masked_fill(ended, NEVER).topk(beam)  # [A, K]
        kept = places.gather(1, chosen)
        trail.add(done, places[:, :beam], kept)
        finished = finished + (done > NEVER).sum(1)
        go_on = (finished < beam) & (open_[:, 0] > NEVER)
        open_ = open_.masked_fill(~go_on.unsqueeze(1), NEVER)
        state, last = state.keep(kept // size), spoken.gather(1, kept % size)
        if length % _LOOK and length < longest:
            continue
        left = int(go_on.sum())
        if left > (1 - FINISHED_SHARE) * len(rows):
            continue
        trail.write(rows)
        if not left:
            break
        (stay,) = go_on.nonzero(as_tuple=True)
        rows, memory, state = rows[stay], memory.take(stay), state.take(stay)
        last, open_, finished, spoken = last[stay], open_[stay], finished[stay], spoken[stay]
    return [best[0] for best in trail.hypotheses(1, alpha, size)]


def _wide(x: Tensor, columns: int, empty: float) -> Tensor:
    """The same with more columns, where a small vocabulary gives too few."""
    missing = columns - x.shape[1]
    return torch.cat([x, x.new_full((len(x), missing), empty)], dim=1) if missing > 0 else x
