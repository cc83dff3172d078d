"""Choose the heads that remain after portable pruning: the same number in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.smaller_config import ADVICE, accepts, config_with_heads
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import module_of


@dataclass(frozen=True)
class Selection:
    """The heads that remain after pruning.

    Args:
        kept: for each layer, the query heads that remain, in order.
        kept_kv: for each layer, the key-value heads that remain, in order.
        heads: number of query heads per layer, before and after.
        kv_heads: number of key-value heads per layer, before and after.
    """

    kept: tuple[tuple[int, ...], ...]
    kept_kv: tuple[tuple[int, ...], ...]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def removed(self) -> list[tuple[int, int]]:
        """(layer, head) of every query head that is removed."""
        every = range(self.heads[0])
        return [(layer, head) for layer, kept in enumerate(self.kept) for head in every if head not in kept]


def select_heads(heads: Heads, scores: Tensor, keep: float, kv_heads: int | None = None) -> Selection:
    """Choose the heads to keep: the same number in every layer and for every key-value head.

    Several combinations (key-value heads, query heads per key-value head) may come equally close to `keep`. Of these,
    the one whose heads have the largest scores is taken. Combinations that the config rejects are not considered.

    Args:
        heads: the heads of a transformers model.
        scores: importance of each head [layers, heads].
        keep: share of the query heads that stay, above 0 and below 1.
        kv_heads: key-value heads that stay in every layer; None: as many as the scores favour.

    Raises:
        SelectionError: the share leaves no head, removes none, does not fit `kv_heads`, or layers differ in their
            number of heads.
        HeadLayoutError: the model has no config in which the number of heads can change.
    """
    if not 0 < keep < 1:
        raise SelectionError(f"keep={keep:g}: choose a share of the heads above 0 and below 1, such as 0.75")
    config = config_with_heads(heads.model)
    sharing = [_sharing(heads, layer) for layer in heads.layers]
    counts = {(layer.num_heads, max(pairs) + 1) for layer, pairs in zip(heads.layers, sharing, strict=True)}
    if len(counts) != 1:
        shown = ", ".join(f"{a} heads with {b} key-value heads" for a, b in sorted(counts))
        raise SelectionError(f"layers have different numbers of heads ({shown}); portable pruning needs equal ones")
    (total, kv_total) = counts.pop()
    group = total // kv_total
    if kv_heads is not None and not 1 <= kv_heads <= kv_total:
        raise SelectionError(f"kv_heads={kv_heads}: every layer has {kv_total} key-value heads; choose 1 to {kv_total}")
    accepted: dict[tuple[int, int], float] = {}
    for kv in range(1, kv_total + 1) if kv_heads is None else [kv_heads]:
        for each in range(1, group + 1):
            if kv * each < total and accepts(config, kv * each, kv):
                accepted[kv, each] = abs(kv * each - keep * total)
    if not accepted:
        fixed = "" if kv_heads is None else f" with {kv_heads} key-value heads"
        raise SelectionError(f"the config accepts no smaller number of heads than {total}{fixed}. {ADVICE}")
    nearest = min(accepted.values())
    if nearest > max(1.0, 0.25 * total):
        numbers = ", ".join(str(number) for number in sorted({kv * each for kv, each in accepted}))
        raise SelectionError(f"keep={keep:g} of {total} heads: the config accepts only {numbers} heads")
    shared = _scores_shared_by_layers(heads, scores) if _shares_position_bias(heads.model) else scores
    options = [
        _choose(sharing, shared, kv, each, (total, kv_total))
        for (kv, each), distance in accepted.items()
        if distance == nearest
    ]
    return max(options, key=lambda option: float(sum(scores[i, list(k)].sum() for i, k in enumerate(option.kept))))


def groups_of_layer(heads: Heads, layer: AttentionLayer) -> list[HeadGroup]:
    """Return the groups of heads (q, k, v) of one attention layer."""
    return [group for group in heads.groups if module_of(group) == layer.name]


def _sharing(heads: Heads, layer: AttentionLayer) -> tuple[int, ...]:
    """Find the key-value head of each query head."""
    query = next((group for group in groups_of_layer(heads, layer) if group.part == "q"), None)
    if query is None:
        raise HeadLayoutError(f"{layer.name}: has no queries of its own; portable pruning needs q, k and v")
    serves = query.serves or tuple(range(layer.num_heads))
    group = layer.num_heads // (max(serves) + 1)
    if serves != tuple(head // group for head in range(layer.num_heads)):
        raise HeadLayoutError(
            f"{layer.name}: key-value heads are not shared by neighbouring query heads; not supported"
        )
    return serves


def _choose(
    sharing: Sequence[tuple[int, ...]], scores: Tensor, kv: int, each: int, totals: tuple[int, int]
) -> Selection:
    kept, kept_kv = [], []
    for row, serves in enumerate(sharing):
        best: dict[int, list[int]] = {}
        for head in sorted(range(totals[0]), key=lambda head: -float(scores[row, head])):
            best.setdefault(serves[head], [])
            if len(best[serves[head]]) < each:
                best[serves[head]].append(head)
        worth = {group: sum(float(scores[row, head]) for head in members) for group, members in best.items()}
        groups = sorted(sorted(worth, key=lambda group: -worth[group])[:kv])
        kept_kv.append(tuple(groups))
        kept.append(tuple(sorted(head for group in groups for head in best[group])))
    return Selection(tuple(kept), tuple(kept_kv), (totals[0], kv * each), (totals[1], kv))


def _shares_position_bias(model: nn.Module) -> bool:
    """Check for T5, which computes one position bias per head in the first layer and uses it in all layers."""
    return any(name.endswith("relative_attention_bias") for name, _ in model.named_modules())


def _scores_shared_by_layers(heads: Heads, scores: Tensor) -> Tensor:
    """Sum scores over the layers of each stack, so that all layers of a stack keep the same heads."""
    shared = scores.clone()
    stacks = [(layer.where, groups_of_layer(heads, layer)[0].stack) for layer in heads.layers]
    for stack in set(stacks):
        rows = [row for row, other in enumerate(stacks) if other == stack]
        shared[rows] = scores[rows].sum(0)
    return shared
