r"""Null distribution of permuted heads: how similar heads are that sit in different layers of the same model.

A draw replaces the M heads of a layer by M heads of different layers, chosen at random, and computes the same score:
the mean and the largest similarity over pairs of heads. Query heads that share a key-value head stay together, since
they are alike for that reason; so a draw has as many pairs that share one as the layer has. Layers are comparable if
they are in the same stack, read the same tokens (and keys), and share key-value heads in the same way. With fewer
comparable layers than key-value heads, a draw takes heads of every layer as evenly as possible, and pairs of one layer
that do not share a key-value head are left out of the mean; the largest similarity then has no null.

Similarities between layers are those within a layer, written as an inner product $S_{ij} = \langle \phi_i, \phi_j
\rangle$ of features over sampled tokens:

- logits: $\phi_i = f_i / |f_i|$ with $f_i(x, y) = q_i(x) \cdot k_i(y)$ for all pairs of tokens,
- OV circuits: $\phi_i = g_i / |g_i|$ with $g_i(y) = W_O^i v_i(y)$,
- attention and outputs: $\phi_i = (u_{1i}, ..., u_{Pi}) / \sqrt P$ with the unit vector $u_{pi}$ at position p,
- CKA: $\phi_i = H X_i X_i^\top H$, divided by its norm, with outputs $X_i$ [N, d] and the centring matrix H.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repulsive.particles.gram import full_precision
from repulsive.particles.logits import cosines, mean_and_largest

TOKENS = 256  # largest number of tokens of a batch that layers are compared on
DRAWS = 200
_BLOCK = 1 << 24  # largest number of features that are computed at once


@dataclass(frozen=True)
class Permuted:
    """Scores of draws of heads from different layers, and the layer's own scores on the same tokens.

    Args:
        mean: mean similarity of the layer's own heads.
        largest: largest similarity of two of the layer's own heads.
        means: mean similarity of the heads of each draw.
        largests: largest similarity of each draw; empty if there are fewer layers than heads.
        layers: number of layers that heads were drawn from.
    """

    mean: float
    largest: float
    means: tuple[float, ...]
    largests: tuple[float, ...]
    layers: int


@dataclass(frozen=True)
class LayerHeads:
    """Heads of one layer as features over tokens.

    Args:
        name: name of the layer.
        num_heads: M.
        tokens: number of tokens N; features are computed for some tokens at a time.
        comparable: layers with equal values read the same tokens, such as (stack, items, tokens of an item).
        features: slice of the tokens -> features of each head [M, F].
        width: number of features per token.
        serves: the key-value head of each query head; None if each has its own.
        is_unit: the features of a head have length 1 at each token, and similarity is a mean over tokens. Otherwise
            features are divided by their norm over all tokens.
    """

    name: str
    num_heads: int
    tokens: int
    comparable: tuple[object, ...]
    features: Callable[[slice], Tensor]
    width: int
    serves: tuple[int, ...] | None = None
    is_unit: bool = False


def evenly_spaced(count: int, most: int = TOKENS) -> Tensor:
    """Return the indices of at most `most` of `count` tokens, int64.

    Example:
        >>> evenly_spaced(5, 3).tolist()
        [0, 2, 4]
    """
    if count <= most:
        return torch.arange(count, device="cpu")
    return torch.linspace(0, count - 1, most, dtype=torch.float32, device="cpu").long()


@torch.no_grad()
def similarity_between_layers(layers: Sequence[LayerHeads]) -> Tensor:
    """Compute the similarity of all heads of comparable layers, float64 [H, H], in the order of the layers."""
    heads = sum(layer.num_heads for layer in layers)
    step = max(1, _BLOCK // max(1, heads * layers[0].width))
    products = torch.zeros(heads, heads, dtype=torch.float64, device="cpu")
    for start in range(0, layers[0].tokens, step):
        features = torch.cat([layer.features(slice(start, start + step)) for layer in layers])  # [H, F]
        with full_precision(features.device):
            products += (features @ features.mT).cpu().double()
    return (products / layers[0].tokens if layers[0].is_unit else cosines(products)).clamp(-1, 1)


def groups_of_layers(layers: Sequence[LayerHeads]) -> list[list[LayerHeads]]:
    """Group comparable layers; layers without another comparable one are left out."""
    groups: dict[tuple[object, ...], list[LayerHeads]] = {}
    for layer in layers:
        shares = Counter(layer.serves or range(layer.num_heads))
        if len(shares) > 1 and len(set(shares.values())) == 1:  # a single key-value head stays with all of the heads
            key = (*layer.comparable, layer.tokens, layer.width, layer.serves)
            groups.setdefault(key, []).append(layer)
    return [group for group in groups.values() if len(group) > 1]


def permuted_heads(
    similarity: Tensor,
    counts: Sequence[int],
    draws: int = DRAWS,
    seed: int = 0,
    serves: Sequence[int] | None = None,
) -> list[Permuted]:
    """Draw heads from different layers, and score each draw like a layer.

    Args:
        similarity: similarity of all heads of L layers [H, H], as `similarity_between_layers` gives it.
        counts: number of heads of each of the layers, with the sum H.
        draws: number of draws for each number of heads.
        seed: random seed of the draws.
        serves: in all layers, the key-value head of each query head, each for the same number of query heads; None if
            each has its own.

    Returns:
        One entry per layer. Layers with equal numbers of heads share their draws.

    Example:
        >>> alike = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))  # two layers of two equal heads
        >>> first, second = permuted_heads(alike, [2, 2], draws=3)
        >>> first.mean, first.means
        (1.0, (0.0, 0.0, 0.0))
    """
    layer_of = torch.arange(len(counts), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))  # [H]
    drawn: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    result = []
    for row, size in enumerate(counts):
        if size not in drawn:
            drawn[size] = _draw_scores(similarity, counts, size, serves, draws, seed)
        own = similarity[layer_of == row][:, layer_of == row]
        mean, largest = (float(score) for score in mean_and_largest(own))
        result.append(Permuted(mean, largest, *drawn[size], len(counts)))
    return result


def draw_heads(counts: Sequence[int], size: int, draws: int, generator: torch.Generator) -> Tensor:
    """Draw heads from different layers: indices of heads, int64 [draws, size].

    Args:
        counts: number of heads of each layer.
        size: number of heads of a draw. Each layer gives at most one head, or as few as possible if there are fewer
            layers than heads.
        draws: number of draws.
        generator: CPU generator.
    """
    sizes = torch.tensor(counts, device="cpu")
    first = sizes.cumsum(0) - sizes  # [L]
    layers = torch.rand(draws, len(counts), generator=generator, dtype=torch.float32, device="cpu").argsort(1)  # [K, L]
    shuffled = torch.rand(draws, len(counts), max(counts), generator=generator, dtype=torch.float32, device="cpu")
    is_missing = torch.arange(max(counts), device="cpu") >= sizes[:, None]  # [L, most heads]
    shuffled = shuffled.masked_fill(is_missing, 2).argsort(2)  # [K, L, most heads]
    picks = []
    for slot in range(size):
        layer = layers[:, slot % len(counts)]  # [K]
        head = shuffled[torch.arange(draws, device="cpu"), layer, (slot // len(counts)) % sizes[layer]]
        picks.append(first[layer] + head)
    return torch.stack(picks, 1)


def _draw_scores(
    similarity: Tensor, counts: Sequence[int], size: int, serves: Sequence[int] | None, draws: int, seed: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute the mean and the largest similarity of each draw."""
    generator = torch.Generator().manual_seed(seed)
    if serves is None:
        chosen, unit = draw_heads(counts, size, draws, generator), torch.arange(size, device="cpu")
    else:  # draw key-value heads, then take their query heads
        kv_heads = max(serves) + 1
        order = torch.tensor(serves, device="cpu").argsort(stable=True)
        members = order.view(kv_heads, -1)  # query heads of each key-value head
        kv = draw_heads([kv_heads] * len(counts), kv_heads, draws, generator)  # [K, key-value heads]
        chosen = (kv // kv_heads * size).unsqueeze(-1) + members[kv % kv_heads]  # [K, key-value heads, query heads]
        chosen, unit = chosen.flatten(1), torch.arange(kv_heads, device="cpu").repeat_interleave(members.shape[1])
    layer_of = torch.arange(len(counts), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))  # [H]
    row, column = torch.triu_indices(size, size, 1, device="cpu")
    if not len(row):
        return (), ()
    first, second = chosen[:, row], chosen[:, column]  # [K, pairs]
    values = similarity[first, second]
    shared = unit[row] == unit[column]  # [pairs]
    differ = layer_of[first] != layer_of[second]  # [K, pairs]
    between = (values * differ).sum(1) / differ.sum(1)  # mean over pairs from different layers
    means = (values[:, shared].sum(1) + between * int((~shared).sum())) / len(row)
    is_complete = bool((differ | shared).all())
    return tuple(means.tolist()), tuple(values.amax(1).tolist()) if is_complete else ()


class BetweenLayers:
    """Mean similarity of the heads of comparable layers over batches, weighted by tokens."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], tuple[Tensor, int]] = {}
        self._shapes: dict[tuple[str, ...], tuple[list[int], tuple[int, ...] | None]] = {}

    def add(self, layers: Sequence[LayerHeads]) -> None:
        """Add the heads of all layers on one batch."""
        for group in groups_of_layers(layers):
            names = tuple(layer.name for layer in group)
            tokens = group[0].tokens
            total, before = self._sums.get(names, (torch.zeros((), device="cpu"), 0))
            self._sums[names] = total + similarity_between_layers(group) * tokens, before + tokens
            self._shapes[names] = [layer.num_heads for layer in group], group[0].serves

    def scores(self, draws: int = DRAWS, seed: int = 0) -> dict[str, Permuted]:
        """Score draws of heads for each layer that has a comparable one."""
        result: dict[str, Permuted] = {}
        for names, (total, tokens) in sorted(self._sums.items(), key=lambda item: item[1][1]):
            similarity, (counts, serves) = total / tokens, self._shapes[names]
            if similarity.isfinite().all():
                result |= dict(zip(names, permuted_heads(similarity, counts, draws, seed, serves), strict=True))
        return result
