"""Beam search for GraphWriter, many graphs at a time. The search synchronises with the device every fourth step.

    texts = write(model, titles, entities, relations, types, Ends(bos=2, eos=3), beam=4)

Tokens of a text are words, or the size of the vocabulary + the index of a copied entity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from repulsive.lab.layers.beam_search import FINISHED_SHARE, NEVER, Backpointers, Ends, Hypothesis, extend_beam
from repulsive.lab.systems.graphs.model import GraphWriter

_CHECK_EVERY = 4  # steps between two checks for finished graphs


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
    r"""Find the text of each graph with the best $\log p(y) / |y|^\alpha$ in a beam; the length includes the end.

    As in `layers.beam_search`, each step considers the 2 x beam best continuations: those that end and are among the
    first `beam` are finished, and the best `beam` of the others stay open. A graph is done when `beam` texts are
    finished. At `longest` words a text is forced to end.

    Args:
        model: a GraphWriter in evaluation mode.
        titles: words of the titles, as in `GraphWriter.forward`.
        entities: words of the entities, as in `GraphWriter.forward`.
        relations: relations of the graphs, as in `GraphWriter.forward`.
        types: word of each entity's type, [B, E], the decoder's input after a copy.
        ends: the words at the two ends of a text.
        beam: number of open hypotheses.
        alpha: length penalty; 0: none, 1: mean log-probability of a word.
        longest: maximum number of words in a text, end mark included.
        forbidden: words that are never generated, besides padding and the first word.

    Raises:
        ValueError: a setting is out of range.
    """
    if beam < 1 or alpha < 0 or longest < 1:
        raise ValueError(f"beam={beam}, alpha={alpha}, longest={longest}: needs beam and longest >= 1 and alpha >= 0")
    device, words = entities.device, model.config.words
    size = words + entities.shape[1]
    excluded = torch.tensor(sorted({0, ends.bos, *forbidden} - {ends.eos}), device=device)
    next_input = torch.cat([torch.arange(words, device=device).expand(len(types), -1), types], dim=1)  # [A, V + E]
    memory = model.start(titles, entities, relations)
    state = model.begin(memory)  # [A, 1, ...]
    rows = torch.arange(len(entities), device=device)  # [A]: unfinished graphs
    backpointers = Backpointers(len(entities), beam, longest)
    last = torch.full((len(entities), 1), ends.bos, device=device)  # [A, K], K = 1 at first
    open_ = torch.zeros(len(entities), 1, dtype=memory.root.dtype, device=device)  # [A, K]: log-probabilities
    finished = torch.zeros(len(entities), dtype=torch.int64, device=device)  # [A]
    for length in range(1, longest + 1):
        logs, state = model.step(last, state, memory)  # [A, K, V + E]
        logs.index_fill_(-1, excluded, NEVER)
        if length == longest:
            end = logs[..., ends.eos].clone()
            logs.fill_(NEVER)
            logs[..., ends.eos] = end
        done, places, open_, kept = extend_beam(logs + open_.unsqueeze(2), beam, ends.eos)  # [A, K]
        backpointers.add(done, places, kept)
        finished = finished + (done > NEVER).sum(1)
        unfinished = (finished < beam) & (open_[:, 0] > NEVER)
        open_ = open_.masked_fill(~unfinished.unsqueeze(1), NEVER)
        state, last = state.keep(kept // size), next_input.gather(1, kept % size)
        if length % _CHECK_EVERY and length < longest:
            continue
        left = int(unfinished.sum())
        if left > (1 - FINISHED_SHARE) * len(rows):
            continue
        backpointers.write(rows)
        if not left:
            break
        (stay,) = unfinished.nonzero(as_tuple=True)
        rows, memory, state = rows[stay], memory.take(stay), state.take(stay)
        last, open_, finished, next_input = last[stay], open_[stay], finished[stay], next_input[stay]
    return [best[0] for best in backpointers.hypotheses(1, alpha, size)]
