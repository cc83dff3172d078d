r"""Label well-known kinds of heads by their attention on generated inputs.

The input is a random sequence repeated once, $r_1 \dots r_L\, r_1 \dots r_L$, so that content and position are
independent and every token of the second half has one earlier copy. Scores use the attention A of a head, averaged
over sequences and queries t:

| kind | score |
| --- | --- |
| first token | $A_{t,0}$ (attention sink) |
| previous token | $A_{t,t-1}$ |
| next token | $A_{t,t+1}$ (bidirectional models) |
| same token | $\sum A_{ts}$ over other copies s of the token at t |
| induction | $\sum A_{ts}$ over tokens s that follow an earlier copy of the token at t (Olsson et al., 2022) |
| separator | $\sum A_{ts}$ over separator tokens s |

A head gets the label of its largest score if that score exceeds 0.3 and the scores of all heads of untrained twins
(models of the same architecture with random weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.measured_layers import find_measured_heads
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.untrained_twin import untrained_twin
from repulsive.errors import SelectionError

KINDS = ("first token", "previous token", "next token", "same token", "induction", "separator")
LOWEST = 0.3  # smallest score that earns a label


@dataclass(frozen=True, eq=False)
class HeadKinds:
    """Scores of all heads for each kind, and the labels that follow from them.

    Args:
        scores: name of a kind -> scores [layers, heads], float64; nan where a layer has fewer heads.
        thresholds: name of a kind -> the score that a head must exceed.
    """

    scores: dict[str, Tensor]
    thresholds: dict[str, float]

    def label(self, layer: int, head: int) -> str:
        """Return the kind of one head; "" if no score exceeds its threshold."""
        own = {kind: float(scores[layer, head]) for kind, scores in self.scores.items()}
        passed = {kind: score for kind, score in own.items() if score > self.thresholds[kind]}
        return max(passed, key=lambda kind: passed[kind]) if passed else ""

    def labels(self) -> dict[tuple[int, int], str]:
        """(layer, head) -> kind, for all heads with a label."""
        shape = next(iter(self.scores.values())).shape
        every = {(i, j): self.label(i, j) for i in range(shape[0]) for j in range(shape[1])}
        return {place: kind for place, kind in every.items() if kind}


def head_kinds(
    model: nn.Module | Heads,
    *,
    vocabulary: int | None = None,
    separators: Sequence[int] = (),
    length: int = 24,
    batch: int = 8,
    twins: int = 3,
    seed: int = 0,
) -> HeadKinds:
    """Label the heads of a model that reads token ids.

    Args:
        model: a model called with `input_ids`, or its `Heads`.
        vocabulary: number of token ids to draw from; None: the size of the input embedding.
        separators: token ids that separate sentences; one is put at the end of each half.
        length: number of tokens in each half, including the separator.
        batch: number of sequences.
        twins: number of untrained twins that set the thresholds; 0: the threshold is 0.3 for every kind.
        seed: random seed of inputs and twins.

    Raises:
        SelectionError: the vocabulary is unknown or too small.
        NoTwin: untrained twins cannot be built; choose twins=0.
    """
    inner = model.model if isinstance(model, Heads) else model
    ids = _repeated_tokens(vocabulary or _embeddings(inner), separators, length, batch, seed)
    heads = model if isinstance(model, Heads) else _heads_on(model, ids)
    scores = score_kinds(heads, ids, separators)
    thresholds = dict.fromkeys(scores, LOWEST)
    for number in range(twins):
        untrained = score_kinds(_heads_on(untrained_twin(inner, seed + number), ids), ids, separators)
        for kind, values in untrained.items():
            thresholds[kind] = max(thresholds[kind], float(values[~values.isnan()].max()))
    return HeadKinds(scores, thresholds)


def _heads_on(model: nn.Module, ids: Tensor) -> Heads:
    """Find the heads of a model, and prove them on token ids if the family table does not list their classes."""
    inputs = {"input_ids": ids.to(next(model.parameters()).device)}
    is_listed = all(group.proof == "table" for group in find_measured_heads(model, inputs))
    return Heads(model) if is_listed else Heads(model, inputs)


def score_kinds(heads: Heads, ids: Tensor, separators: Sequence[int] = ()) -> dict[str, Tensor]:
    """Score all heads on given token ids [B, T]; layers that attend to other inputs get nan.

    Args:
        heads: the heads of a model called with `input_ids`.
        ids: token ids.
        separators: token ids that separate sentences.
    """
    device = next(heads.model.parameters()).device
    masks = pattern_masks(ids, separators)
    shape = (len(heads.layers), max(layer.num_heads for layer in heads.layers))
    scores = {kind: torch.full(shape, torch.nan, dtype=torch.float64, device="cpu") for kind in masks}
    for i, weights in enumerate(heads.attention({"input_ids": ids.to(device)})):
        if weights is None:
            continue
        weights = weights.mean(0) if weights.ndim == 5 else weights  # [B, M, T, S]
        if weights.shape[-2:] != (ids.shape[1], ids.shape[1]):
            continue
        for kind, mask in masks.items():
            queries = mask.any(-1)  # [B, T]: queries for which this pattern exists
            per_query = (weights.double().cpu() * mask[:, None]).sum(-1)  # [B, M, T]
            values = per_query.transpose(1, 2)[queries].mean(0)  # [M]
            scores[kind][i, : len(values)] = values
    return scores


def pattern_masks(ids: Tensor, separators: Sequence[int] = ()) -> dict[str, Tensor]:
    """Mark the keys that belong to each pattern, bool [B, T, T] (query, key); "separator" only if there are separators.

    Args:
        ids: token ids [B, T].
        separators: token ids that separate sentences.

    Example:
        >>> masks = pattern_masks(torch.tensor([[5, 6, 5]]))
        >>> masks["induction"].nonzero().tolist()  # token 2 is a copy of token 0, which token 1 follows
        [[0, 2, 1]]
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    distance = positions[:, None] - positions[None, :]  # [T, T]: query minus key
    inner = positions[:, None] > 0  # at the first token, sink, self and previous token cannot be distinguished
    same = ids[:, :, None] == ids[:, None, :]  # [B, T, T]
    after_copy = torch.zeros_like(same)
    after_copy[:, :, 1:] = (same & (distance > 1))[:, :, :-1]
    is_separator = torch.isin(ids, torch.tensor(list(separators), device=ids.device, dtype=ids.dtype))
    expanded = {
        "first token": (positions[None, :] == 0) & (distance > 1),
        "previous token": (distance == 1) & inner,
        "next token": distance == -1,
    }
    masks = {kind: mask.expand_as(same) for kind, mask in expanded.items()}
    masks |= {"same token": same & (distance != 0), "induction": after_copy & (distance > 0)}
    if len(separators):
        masks["separator"] = is_separator[:, None, :] & ~is_separator[:, :, None]
    return masks


def _repeated_tokens(vocabulary: int, separators: Sequence[int], length: int, batch: int, seed: int) -> Tensor:
    """Draw distinct random token ids and repeat them once, [B, 2 length]; each half ends with the first separator."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([token for token in range(vocabulary) if token not in set(separators)], device="cpu")
    words = length - bool(len(separators))
    if len(allowed) < words or words < 2:
        needed = max(words, 2)
        raise SelectionError(
            f"{len(allowed)} tokens to draw from, expected at least {needed}; choose a smaller length="
        )
    rows = [allowed[torch.randperm(len(allowed), generator=generator, device="cpu")[:words]] for _ in range(batch)]
    half = torch.stack(rows)  # [B, words]
    if len(separators):
        half = torch.cat([half, torch.full((batch, 1), separators[0], device="cpu")], 1)
    return torch.cat([half, half], 1)


def _embeddings(model: nn.Module) -> int:
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings
    raise SelectionError(f"{type(model).__name__}: the number of tokens is unknown; give vocabulary=")
