r"""Similarity of heads in their attention logits (QK circuit) and in their writes to the residual stream (OV circuit).

Head i has the logit $f_i(x, y) = q_i(x) \cdot k_i(y)$ for a query token x and a key token y, and adds
$g_i(y) = W_O^i v_i(y)$ to the residual stream for a token y that it attends to. With means over sampled tokens

$$\cos(f_i, f_j) = \frac{\langle f_i, f_j \rangle}{|f_i|\,|f_j|}, \qquad
  \langle f_i, f_j \rangle = \frac{1}{N N'} \sum_{x, y} f_i(x, y)\, f_j(x, y), \qquad
  \langle g_i, g_j \rangle = \frac{1}{N'} \sum_y g_i(y) \cdot g_j(y).$$

Keys are centred per sequence, since softmax ignores a constant over keys. All pairs of query and key tokens count,
including those that a causal mask excludes. Positions do not count: with rotary embeddings this is the logit at
distance 0, and additive position biases are left out. In latent attention (DeepSeek) the rotary features of queries and
keys are left out.

Heads can have orthogonal weights and still compute the same function: q and k (v and o) are determined only up to an
invertible matrix. These similarities do not depend on that matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers, output_weight
from repulsive.diagnostics.hooks.calling import TokenMask
from repulsive.diagnostics.hooks.measured_layers import find_measured_heads
from repulsive.diagnostics.hooks.qkv_layers import find_qkv_layers
from repulsive.diagnostics.hooks.qkv_samples import QKVSamples
from repulsive.diagnostics.hooks.qkv_sampling import sample_qkv
from repulsive.diagnostics.permuted_heads import BetweenLayers, LayerHeads, Permuted, evenly_spaced
from repulsive.diagnostics.sequence_jackknife import count_groups, jackknife_interval
from repulsive.diagnostics.similarity import Pair
from repulsive.errors import DivergedError, HeadLayoutError, RuleError
from repulsive.heads import HeadGroup
from repulsive.heads.module_paths import module_of
from repulsive.particles.gram import full_precision, wide_dtype
from repulsive.particles.logits import Circuits, cosines, mean_and_largest

TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Similarity:
    """Similarity of the heads of one attention layer, compared as functions of tokens.

    Args:
        name: the attention module's dotted name.
        circuit: "logits" (QK) or "ov"; or "attention", "outputs" or "cka" (see `Heads.similarity`).
        cosine: cosine between every two heads, float64 [M, M].
        tokens: number of sampled tokens.
        left_out: the same without each group of sequences [K, M, M]; K is 0 if there is only one sequence. None if
            sequences were not resampled.
        permuted: scores of draws of heads from different layers; None if there is no comparable layer.
    """

    name: str
    circuit: str
    cosine: Tensor
    tokens: int
    left_out: Tensor | None = None
    permuted: Permuted | None = None

    def __repr__(self) -> str:
        return (
            f"Similarity({self.name!r}, {self.circuit!r}, num_heads={self.num_heads}, mean={self.mean:+.3f}, "
            f"largest={self.largest:+.3f}, tokens={self.tokens})"
        )

    @property
    def num_heads(self) -> int:
        return len(self.cosine)

    @property
    def mean(self) -> float:
        """Mean cosine over pairs i < j; nan for a single head."""
        return float(mean_and_largest(self.cosine)[0])

    @property
    def largest(self) -> float:
        """Largest cosine of a pair i < j; nan for a single head."""
        return float(mean_and_largest(self.cosine)[1])

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean over sequences; None for one sequence or one head."""
        if self.left_out is None:
            return None
        return jackknife_interval(self.mean, mean_and_largest(self.left_out)[0])

    @property
    def pair_interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the cosine of the most similar pair; None for one sequence or one head."""
        pair = self.pair
        if self.left_out is None or pair is None:
            return None
        return jackknife_interval(pair.cosine, self.left_out[:, pair.first, pair.second])

    @property
    def pair(self) -> Pair | None:
        """The most similar pair of heads; None for a single head."""
        if self.num_heads < 2:
            return None
        upper = torch.ones_like(self.cosine, dtype=torch.bool).triu(1)
        first, second = divmod(int(self.cosine.masked_fill(~upper, -torch.inf).argmax()), self.num_heads)
        return Pair(self.name, first, second, float(self.cosine[first, second]))


@dataclass(frozen=True, eq=False)
class Similarities:
    """Similarity of heads in every attention layer of a model.

    Args:
        logits: one entry per layer whose queries and keys can be recorded.
        ov: one entry per layer with values and an output projection.
        left_out: name of each layer that is not measured -> the reason.
    """

    logits: list[Similarity] = field(default_factory=list)
    ov: list[Similarity] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def circuit_similarity(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    groups: Sequence[HeadGroup] | None = None,
    queries: TokenMask | None = None,
    keys: TokenMask | None = None,
    draws: int = 0,
    out: Mapping[str, str] | None = None,
) -> Similarities:
    """Measure the similarity of heads in their attention logits and OV circuits.

    The model runs once on every batch, in evaluation mode and without gradients; it does not change.

    Args:
        model: any module with heads that `find_heads` finds.
        batches: inputs, each a tensor, a tuple of arguments or a mapping of keyword arguments. Padding, as given by
            their masks, does not count.
        tokens: maximum number of tokens to sample.
        seed: random seed of the sample.
        groups: the result of `find_heads` for all parts; None finds them, and proves guesses on the first batch.
        queries: called with a batch and "encoder", "decoder" or "cross"; returns which query tokens count, bool [B, T],
            or None for all. By default padding is left out.
        keys: like `queries`, for the tokens of keys and values.
        draws: number of draws of permuted heads (see `permuted_heads.py`); 0: none.
        out: as in `find_attention_layers`, for OV circuits.

    Raises:
        HeadLayoutError: no layer has queries and keys that can be recorded; the message gives the reasons.

    Example:
        >>> x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
        >>> result = circuit_similarity(nn.MultiheadAttention(8, 2, batch_first=True), [(x, x, x)])
        >>> result.logits[0].cosine.shape, result.ov[0].tokens
        (torch.Size([2, 2]), 18)
    """
    if tokens < 1 or not len(batches):
        raise ValueError(f"{len(batches)} batches and tokens={tokens}: need at least one of each")
    groups = find_measured_heads(model, batches[0]) if groups is None else groups
    layers, left_out = find_qkv_layers(model, groups)
    result = Similarities(left_out=left_out)
    across: dict[str, list[LayerHeads]] = {"logits": [], "ov": []}
    for samples in sample_qkv(model, batches, layers, tokens=tokens, seed=seed, queries=queries, keys=keys):
        name = samples.layer.name
        try:
            if samples.problem:
                raise HeadLayoutError(samples.problem)
            result.logits.append(logit_similarity(samples))
            if draws:
                across["logits"].append(_logit_features(samples))
        except (HeadLayoutError, RuleError) as error:
            left_out[name] = str(error)
            continue
        try:
            own = [group for group in groups if module_of(group) == name]
            weight = output_weight(find_attention_layers(model, own, out=out)[0])
            result.ov.append(ov_similarity(samples, weight))
            if draws:
                across["ov"].append(_ov_features(samples, weight))
        except (HeadLayoutError, RuleError) as error:
            left_out[name] = f"OV circuit: {error}"
    if not result.logits:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in left_out.items())
        raise HeadLayoutError(f"attention logits cannot be compared: {reasons}")
    logits, ov = (_with_draws(getattr(result, name), across[name], draws, seed) for name in ("logits", "ov"))
    return replace(result, logits=logits, ov=ov)


def logit_similarity(samples: QKVSamples) -> Similarity:
    """Compute the cosines between the attention logits of the heads of one layer.

    Raises:
        DivergedError: the queries or keys contain NaN or infinity.
    """
    circuits = Circuits(_wide(samples.part("q")), _wide(samples.part("k")), right_of=samples.layer.serves)
    sequences = samples.sequences_of("q"), samples.sequences_of("k")
    return Similarity(samples.layer.name, "logits", *_cosines(circuits, samples.layer.name, *sequences))


def ov_similarity(samples: QKVSamples, weight: Tensor) -> Similarity:
    """Compute the cosines between the OV circuits of the heads of one layer.

    Args:
        samples: sampled values.
        weight: the result of `output_weight`, [d_model, M d].

    Raises:
        HeadLayoutError: the layer does not have its own values.
        DivergedError: the values or the weight contain NaN or infinity.
    """
    if "v" not in samples.layer.parts:
        raise HeadLayoutError("the layer does not have its own values")
    values = samples.part("v")
    heads = weight.to(values.device).unflatten(-1, (-1, values.shape[-1]))  # [d_model, M, d]
    circuits = Circuits(_wide(values), _wide(heads), left_of=samples.layer.serves)
    return Similarity(samples.layer.name, "ov", *_cosines(circuits, samples.layer.name, samples.sequences_of("v")))


def _with_draws(own: Sequence[Similarity], layers: Sequence[LayerHeads], draws: int, seed: int) -> list[Similarity]:
    between = BetweenLayers()
    between.add(layers)
    scores = between.scores(draws, seed)
    return [replace(each, permuted=scores.get(each.name)) for each in own]


def _logit_features(samples: QKVSamples) -> LayerHeads:
    """Describe the heads of one layer by their logits for all pairs of at most 256 tokens."""
    queries, keys = (_evenly(samples.part(part)) for part in "qk")  # [N, M, d], [N', M', d]
    keys = keys if samples.layer.serves is None else keys[:, list(samples.layer.serves)]

    def logits(part: slice) -> Tensor:
        return torch.einsum("xmd,ymd->mxy", queries[part], keys).flatten(1)

    tokens = len(queries), len(keys), samples.count("q"), samples.count("k")
    return _layer_heads(samples, queries.shape[1], tokens, logits, len(keys))


def _ov_features(samples: QKVSamples, weight: Tensor) -> LayerHeads:
    """Describe the heads of one layer by what they add to the residual stream for at most 256 tokens."""
    values = _evenly(samples.part("v"))  # [N, M', d]
    values = values if samples.layer.serves is None else values[:, list(samples.layer.serves)]
    blocks = weight.to(values).unflatten(-1, (values.shape[1], -1))  # [d_model, M, d]

    def writes(part: slice) -> Tensor:
        return torch.einsum("ymd,omd->myo", values[part], blocks).flatten(1)

    return _layer_heads(samples, values.shape[1], (len(values), len(weight), samples.count("v")), writes, len(weight))


def _layer_heads(
    samples: QKVSamples, heads: int, tokens: tuple[int, ...], features: Callable[[slice], Tensor], width: int
) -> LayerHeads:
    layer = samples.layer
    order = layer.name if samples.has_windows else ""  # windows of another layer hold other tokens
    return LayerHeads(layer.name, heads, tokens[0], (layer.where, order, *tokens), features, width, layer.serves)


def _evenly(x: Tensor) -> Tensor:
    return x[evenly_spaced(len(x)).to(x.device)]


@torch.no_grad()
def _cosines(
    circuits: Circuits, name: str, left_of: Tensor, right_of: Tensor | None = None
) -> tuple[Tensor, int, Tensor]:
    """Compute cosines of all sequences [M, M], the number of tokens, and cosines without each group [K, M, M].

    Args:
        circuits: the heads on sampled tokens.
        name: name of the layer.
        left_of: sequence of each token of the left factor [N].
        right_of: sequence of each token of the right factor [N']; None if that factor is a weight.
    """
    with full_precision(circuits.left.device):
        left, right = circuits.moments()
        products = (left * right).sum((-3, -1))
        if not products.isfinite().all():
            raise DivergedError(f"{name}: projections contain NaN or infinity; load an earlier checkpoint")
        count = count_groups(int(left_of.max()) + 1)
        left_out = []
        for group in range(count if count > 1 else 0):
            in_left = left_of % count == group
            in_right = (
                torch.zeros(len(circuits.right), dtype=torch.bool, device="cpu")
                if right_of is None
                else right_of % count == group
            )
            left_out.append(_products_without(circuits, left, right, in_left, in_right.to(in_left.device)))
    stacked = torch.stack(left_out) if left_out else products.new_zeros(0, *products.shape)
    both = torch.cat([products.unsqueeze(0), stacked])
    result = cosines(both).clamp(-1, 1).double().cpu()  # [1 + K, M, M]
    return result[0], len(circuits.left), result[1:]


def _products_without(circuits: Circuits, left: Tensor, right: Tensor, in_left: Tensor, in_right: Tensor) -> Tensor:
    """Compute inner products without some tokens, up to a factor: their sums of squares are subtracted.

    The result is nan if no token would remain.
    """
    if in_left.all() or in_right.all():
        return torch.full_like(left[:, 0, :, 0], torch.nan)
    if in_left.any():
        own = Circuits(circuits.left[in_left], circuits.right, circuits.left_of, circuits.right_of)
        left = left - own.left_moments() * (int(in_left.sum()) / len(in_left))
    if in_right.any():
        own = Circuits(circuits.left, circuits.right[in_right], circuits.left_of, circuits.right_of)
        right = right - own.right_moments() * (int(in_right.sum()) / len(in_right))
    return (left * right).sum((-3, -1))


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.device))
