"""Similarity of heads in attention weights and in outputs, with intervals over sequences and permuted heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import Similarity
from repulsive.diagnostics.cka import centre_tokens, cka_of_grams, cka_without_groups, token_grams
from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, output_weight
from repulsive.diagnostics.hooks.calling import items_in, token_masks
from repulsive.diagnostics.hooks.capture import Captured, capture
from repulsive.diagnostics.permuted_heads import TOKENS, BetweenLayers, LayerHeads, Permuted, evenly_spaced
from repulsive.diagnostics.sequence_jackknife import count_groups
from repulsive.diagnostics.similarity import mean_cosines
from repulsive.particles.gram import compute_dtype, wide_dtype

CapturedSpace = Literal["attention", "outputs", "cka"]


def captured_similarity(
    model: nn.Module,
    batches: Sequence[Any],
    layers: Sequence[AttentionLayer],
    spaces: Sequence[CapturedSpace],
    *,
    serves: Mapping[str, tuple[int, ...] | None] | None = None,
    strict: bool = True,
    draws: int = 0,
    seed: int = 0,
) -> dict[CapturedSpace, list[Similarity]]:
    """Measure the similarity of heads on batches, averaged over tokens, for each layer that ran.

    Args:
        model: any module with heads; it does not change.
        batches: inputs of the model, each a tensor, a tuple of arguments or a mapping.
        layers: the result of `find_attention_layers`.
        spaces: "attention" (attention weights minus uniform attention), "outputs" (contributions after the output
            projection) and "cka" (linear CKA of these contributions, computed for each batch).
        serves: layer name -> key-value head of each query head, for the draws; None if each has its own.
        strict: raise HeadLayoutError if attention weights of a layer cannot be captured; False leaves the layer out.
        draws: number of draws of permuted heads (see `permuted_heads.py`), on 256 tokens; 0: none.
        seed: random seed of these draws.
    """
    count = count_groups(sum(items_in(batch) for batch in batches))
    comparison = _Comparison(spaces, count, serves or {}, tokens=TOKENS if draws else 0)
    strict = strict and "attention" in spaces
    real_queries, _ = token_masks(model)
    for batch in batches:
        captured = capture(model, batch, weights=True, strict=strict, layers=layers).layers
        masks = [real_queries(batch, each.layer.where) for each in captured]
        comparison.add(captured, masks, items_in(batch))
    return comparison.similarities(draws, seed)


class _Comparison:
    """Similarities of heads in some spaces, summed over batches.

    Args:
        spaces: as in `captured_similarity`.
        groups: number of groups of sequences, for intervals.
        serves: layer name -> key-value head of each query head.
        tokens: maximum number of tokens to compare between layers.
    """

    def __init__(
        self,
        spaces: Sequence[CapturedSpace],
        groups: int,
        serves: Mapping[str, tuple[int, ...] | None],
        tokens: int,
    ) -> None:
        self._spaces, self._groups, self._serves = spaces, groups, serves
        self._sums: dict[CapturedSpace, dict[str, _Sums]] = {space: {} for space in spaces}
        self._between = {space: BetweenLayers() for space in spaces}
        self._sequences = 0  # sequences so far
        self._missing = tokens  # tokens that are still to be compared between layers

    def add(self, captured: Sequence[Captured], masks: Sequence[Tensor | None], items: int) -> None:
        """Add a batch.

        Args:
            captured: the layers that ran.
            masks: which queries of each layer count, bool [B, T]; None for all.
            items: number of sequences of the batch.
        """
        across: dict[CapturedSpace, list[LayerHeads]] = {space: [] for space in self._spaces}
        for each, mask in zip(captured, masks, strict=True):
            weight = _head_weights(each)
            for run in range(len(each.outputs)):
                for space, heads in self._add_run(each, run, mask, weight, items):
                    across[space].append(heads)
        for space in self._spaces:
            self._between[space].add([heads for heads in across[space] if heads.tokens])
        self._sequences += items
        self._missing -= max((heads.tokens for layer in across.values() for heads in layer), default=0)

    def _add_run(
        self, captured: Captured, run: int, mask: Tensor | None, weight: Tensor | None, items: int
    ) -> list[tuple[CapturedSpace, LayerHeads]]:
        """Add one run of a layer, and return its heads for the comparison between layers."""
        name, layer, outputs = captured.name, captured.layer, captured.outputs[run]  # [B, T, M, d]
        windows = len(outputs) // items if len(outputs) > items and len(outputs) % items == 0 else 1
        items_of = torch.arange(len(outputs), device="cpu") // windows  # windows of one item, as in Swin
        groups = (self._sequences + items_of) % self._groups  # [B]
        is_comparable = self._missing > 0 and windows == 1 and len(captured.outputs) == 1
        comparable = []
        for space in self._spaces:
            if space == "attention" and not captured.weights:
                continue
            own = self._sums[space].setdefault(name, _Sums(layer.num_heads, self._groups))
            x, real = _read(space, captured, run, captured.own_mask(mask, run), weight)  # [B, M, T, E]
            own.add(x, real, space, groups)
            if is_comparable:
                source = x if space == "attention" else outputs.transpose(1, 2)
                heads = _features(space, layer, source, real, weight, self._missing)
                comparable.append((space, replace(heads, serves=self._serves.get(name))))
        return comparable

    def similarities(self, draws: int, seed: int) -> dict[CapturedSpace, list[Similarity]]:
        """Return the similarity of the heads of each layer with real tokens."""
        scores = {space: self._between[space].scores(draws, seed) for space in self._spaces}
        return {
            space: [own.similarity(name, space, scores[space].get(name)) for name, own in sums.items() if own.tokens]
            for space, sums in self._sums.items()
        }


def _read(
    space: CapturedSpace, captured: Captured, run: int, real: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what is compared in a space, [B, M, T, E], and which tokens count, bool [B, T] (None: all)."""
    if space == "attention":
        return centre_attention(captured.weights[run], real)
    view = _project if space == "outputs" else _reduce
    return view(captured.outputs[run], weight).transpose(1, 2), real


@torch.no_grad()
def centre_attention(weights: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Subtract uniform attention over the keys that a query can attend to.

    All attention weights are positive, so heads that attend nearly uniformly have cosines near 1 although they may
    have nothing else in common. Without the uniform part their cosine can be anything from -1 to 1.

    Args:
        weights: attention weights [B, M, T, S].
        real: which queries count, bool [B, T]; None: all.

    Returns:
        Centred weights [B, M, T, S], 0 for keys that no head attends to; and the queries that have at least two keys.
    """
    allowed = (weights > 0).any(1, keepdim=True)  # [B, 1, T, S]
    count = allowed.sum(-1, keepdim=True)  # [B, 1, T, 1]
    has_choice = count[:, 0, :, 0] > 1  # [B, T]
    real = has_choice if real is None else has_choice & real.to(has_choice.device)
    wide = weights.to(wide_dtype(weights.device))
    return torch.where(allowed, wide - wide.sum(-1, keepdim=True) / count.clamp(min=1), 0), real


@torch.no_grad()
def contributions(captured: Captured) -> list[Tensor]:
    """Compute head outputs after the output projection, [B, T, M, d_model] for each run."""
    weight = _head_weights(captured)
    return [_project(x, weight) for x in captured.outputs]


def _head_weights(captured: Captured) -> Tensor | None:
    """Return the output projection of each head [d_model, M, d]; None for a layer without one."""
    if captured.layer.kind in ("result", "graph"):
        return None
    return output_weight(captured.layer).unflatten(-1, (captured.layer.num_heads, -1))


def _project(outputs: Tensor, weight: Tensor | None) -> Tensor:
    return outputs if weight is None else torch.einsum("btmd,omd->btmo", outputs, weight.to(outputs))


def _reduce(outputs: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply by R of W_O = Q R: [B, T, M, d] with the inner products of the contributions of one head."""
    if weight is None:
        return outputs
    wide = outputs.to(wide_dtype(outputs.device))
    reduced = torch.linalg.qr(weight.to(wide).transpose(0, 1), mode="r").R  # [M, d', d]
    return torch.einsum("btmd,med->btme", wide, reduced)


def _features(
    space: CapturedSpace, layer: AttentionLayer, x: Tensor, real: Tensor | None, weight: Tensor | None, most: int
) -> LayerHeads:
    """Describe the heads [B, M, T, E] of one layer by features of at most `most` tokens."""
    rows = x.transpose(1, 2).flatten(0, 1)  # [B T, M, E]
    if real is not None:
        rows = rows[real.flatten().to(rows.device)]
    positions = torch.arange(len(rows), device="cpu") if real is None else real.flatten().nonzero()[:, 0].cpu()
    chosen = evenly_spaced(len(rows), most)
    rows = rows[chosen.to(rows.device)]
    rows = rows.to(compute_dtype(rows))  # [N, M, E]
    tokens, keys = len(rows), x.shape[3] if space == "attention" else 0
    comparable = (layer.where, x.shape[0], x.shape[2], keys, tuple(positions[chosen].tolist()))
    if space == "cka":
        reduced = _reduce(rows.unsqueeze(0), weight)[0].transpose(0, 1)  # [M, N, d]
        centred = centre_tokens(reduced).to(rows.dtype)

        def grams(part: slice) -> Tensor:
            return (centred[:, part] @ centred.mT).flatten(1)

        return LayerHeads(layer.name, layer.num_heads, tokens, comparable, grams, tokens)

    def unit_vectors(part: slice) -> Tensor:
        own = rows[part] if space == "attention" else _project(rows[None, part], weight)[0]
        unit = torch.nn.functional.normalize(own, dim=-1, eps=torch.finfo(own.dtype).tiny)
        return unit.transpose(0, 1).flatten(1)  # [M, n E]

    width = rows.shape[-1] if space == "attention" or weight is None else len(weight)
    return LayerHeads(layer.name, layer.num_heads, tokens, comparable, unit_vectors, width, is_unit=True)


class _Sums:
    """Similarity matrices times tokens: of all sequences, and of all but those of each of K groups."""

    def __init__(self, heads: int, groups: int) -> None:
        self.matrix = torch.zeros(heads, heads, dtype=torch.float64, device="cpu")
        self.left_out = torch.zeros(groups, heads, heads, dtype=torch.float64, device="cpu")
        self.tokens = 0
        self.tokens_left = torch.zeros(groups, dtype=torch.float64, device="cpu")

    def add(self, x: Tensor, mask: Tensor | None, space: CapturedSpace, groups: Tensor) -> None:
        """Add the heads of one run of a layer, [B, M, T, ...]; `groups` [B] is the group of each sequence."""
        if space == "cka":
            self._add_cka(x, mask, groups)
            return
        for item, group in enumerate(groups.tolist()):
            real = None if mask is None else mask[item : item + 1]
            tokens = x.shape[2] if real is None else int(real.sum())
            if tokens:
                cosine = mean_cosines(x[item : item + 1], real, space=space) * tokens
                others = torch.arange(len(self.left_out), device="cpu") != group
                self.matrix += cosine
                self.left_out[others] += cosine
                self.tokens += tokens
                self.tokens_left[others] += tokens

    def _add_cka(self, x: Tensor, mask: Tensor | None, groups: Tensor) -> None:
        """Add the CKA of all sequences of a batch, which is not a mean over sequences."""
        grams, items = token_grams(x, mask)
        tokens = x.shape[0] * x.shape[2] if mask is None else int(mask.sum())
        if not tokens:
            return
        self.matrix += cka_of_grams(grams).cpu().double() * tokens
        self.tokens += tokens
        group_of = groups.to(items.device)[items]  # [N]
        left_out = cka_without_groups(grams, group_of, len(self.left_out)).cpu().double()
        for group in range(len(self.left_out)):
            kept = int((group_of != group).sum())
            if kept:
                weight = tokens * kept / len(items)
                self.left_out[group] += left_out[group] * weight
                self.tokens_left[group] += weight

    def similarity(self, name: str, space: str, permuted: Permuted | None = None) -> Similarity:
        left_out = self.left_out / self.tokens_left[:, None, None] if len(self.left_out) > 1 else self.left_out[:0]
        return Similarity(name, space, self.matrix / self.tokens, self.tokens, left_out, permuted)
