r"""Similarity of heads as functions: of their attention logits (QK circuit) and of what they write (OV circuit).

Head i has the logit $f_i(x, y) = q_i(x) \cdot k_i(y)$ for a query token x and a key token y, and adds
$g_i(y) = W_O^i v_i(y)$ to the residual stream for a token y that it attends to. With means over sampled tokens

$$\cos(f_i, f_j) = \frac{\langle f_i, f_j \rangle}{|f_i|\,|f_j|}, \qquad
  \langle f_i, f_j \rangle = \frac{1}{N N'} \sum_{x, y} f_i(x, y)\, f_j(x, y), \qquad
  \langle g_i, g_j \rangle = \frac{1}{N'} \sum_y g_i(y) \cdot g_j(y).$$

Keys are centred per sequence, since softmax ignores what all keys share. Query and key tokens are all pairs, those
that a causal mask bars included. Terms of position are not counted: with rotary embeddings this is the logit at
distance 0, and additive position biases are left out.

Weights of heads can be orthogonal while the heads compute the same: q and k (v and o) are free up to an invertible
map, which changes weights and not these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.diversity import Pair
from repulsive.diagnostics.hooks.calling import real_keys, real_queries
from repulsive.diagnostics.hooks.outlets import find_outlets
from repulsive.diagnostics.hooks.projected import Projected, project
from repulsive.diagnostics.hooks.qkv import find_layers
from repulsive.diagnostics.hooks.running import Real
from repulsive.errors import DivergedError, HeadLayoutError, RuleError
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import module_of
from repulsive.particles.gram import full_precision, wide_dtype
from repulsive.particles.logits import Circuits, cosines, mean_and_largest

TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Similarity:
    """How alike the heads of one attention layer are as functions.

    Args:
        name: the attention module's dotted name.
        circuit: "logits" (QK) or "ov".
        cosine: between every two heads, float64 [M, M].
        tokens: how many tokens were sampled.
    """

    name: str
    circuit: str
    cosine: Tensor
    tokens: int

    @property
    def num_heads(self) -> int:
        return len(self.cosine)

    @property
    def mean(self) -> float:
        """Over pairs i < j; nan for one head, which has no pairs."""
        return float(mean_and_largest(self.cosine)[0])

    @property
    def largest(self) -> float:
        """Of the pairs i < j; nan for one head, which has no pairs."""
        return float(mean_and_largest(self.cosine)[1])

    @property
    def pair(self) -> Pair | None:
        """The two heads with the largest cosine; None for one head."""
        if self.num_heads < 2:
            return None
        upper = torch.ones_like(self.cosine, dtype=torch.bool).triu(1)
        first, second = divmod(int(self.cosine.masked_fill(~upper, -torch.inf).argmax()), self.num_heads)
        return Pair(self.name, first, second, float(self.cosine[first, second]))


@dataclass(frozen=True, eq=False)
class Similarities:
    """Similarity of heads in every attention layer of a model.

    Args:
        logits: one entry per layer with queries and keys that can be read.
        ov: one entry per layer with values and an output projection.
        left_out: for each layer that is not measured, why.
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
    queries: Real = real_queries,
    keys: Real = real_keys,
) -> Similarities:
    """Measure how alike heads are in their attention logits and OV circuits.

    The model runs once on every batch, in evaluation mode and without gradients; it stays as it is.

    Args:
        model: any module with heads that `find_heads` finds.
        batches: inputs, each a tensor, a tuple of arguments or a mapping of keyword arguments. Tokens that their masks
            call padding do not count.
        tokens: how many tokens to sample, at most.
        seed: chooses the tokens.
        groups: what `find_heads` returned for all parts; None: found here.
        queries: which query tokens of a batch count: called with the batch and "encoder", "decoder" or "cross", returns
            bool [B, T] or None for all. The default leaves out padding.
        keys: the same for the tokens of keys and values.

    Raises:
        HeadLayoutError: no layer has queries and keys that can be read; the message says why for each.

    Example:
        >>> x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0))
        >>> found = circuit_similarity(nn.MultiheadAttention(8, 2, batch_first=True), [(x, x, x)])
        >>> found.logits[0].cosine.shape, found.ov[0].tokens
        (torch.Size([2, 2]), 18)
    """
    if tokens < 1 or not len(batches):
        raise ValueError(f"{len(batches)} batches and tokens={tokens}: need at least one of each")
    groups = find_heads(model) if groups is None else groups
    layers, left_out = find_layers(model, groups)
    result = Similarities(left_out=left_out)
    for projected in project(model, batches, layers, tokens=tokens, seed=seed, queries=queries, keys=keys):
        name = projected.layer.name
        try:
            if projected.problem:
                raise HeadLayoutError(projected.problem)
            result.logits.append(_logits(projected))
        except (HeadLayoutError, RuleError) as error:
            left_out[name] = str(error)
            continue
        try:
            own = [group for group in groups if module_of(group) == name]
            result.ov.append(_ov(projected, _output_weight(model, own)))
        except (HeadLayoutError, RuleError) as error:
            left_out[name] = f"OV circuit: {error}"
    if not result.logits:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in left_out.items())
        raise HeadLayoutError(f"attention logits cannot be compared: {reasons}")
    return result


def _logits(tokens: Projected) -> Similarity:
    circuits = Circuits(_wide(tokens.part("q")), _wide(tokens.part("k")), right_of=tokens.layer.serves)
    return Similarity(tokens.layer.name, "logits", _cosines(circuits, tokens.layer.name), tokens.count("q"))


def _ov(tokens: Projected, weight: Tensor) -> Similarity:
    if "v" not in tokens.layer.parts:
        raise HeadLayoutError("the layer has no values of its own")
    values = tokens.part("v")
    heads = weight.to(values.device).unflatten(-1, (-1, values.shape[-1]))  # [d_model, M, d]
    circuits = Circuits(_wide(values), _wide(heads), left_of=tokens.layer.serves)
    return Similarity(tokens.layer.name, "ov", _cosines(circuits, tokens.layer.name), tokens.count("v"))


@torch.no_grad()
def _cosines(circuits: Circuits, name: str) -> Tensor:
    with full_precision(circuits.left.device):
        products = circuits.products()
    if not products.isfinite().all():
        raise DivergedError(f"{name}: projections give NaN or infinity; load an earlier checkpoint")
    return cosines(products).clamp(-1, 1).double().cpu()


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.device))


@torch.no_grad()
def _output_weight(model: nn.Module, groups: Sequence[HeadGroup]) -> Tensor:
    """Weight of the output projection, [d_model, M d]; of an adapter, what it computes together with its base."""
    outlet = find_outlets(model, groups)[0]
    width = outlet.num_heads * outlet.head_dim
    projection: nn.Module = outlet.attention.out_proj if outlet.kind == "torch" else outlet.module  # type: ignore[assignment]
    weight = getattr(projection, "weight", None)
    if isinstance(projection, nn.Linear) and isinstance(weight, Tensor) and weight.shape[-1] == width:
        return weight.detach()
    if type(projection).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.detach().mT
    first = next(projection.parameters())
    unit = torch.eye(width, device=first.device, dtype=first.dtype if first.is_floating_point() else torch.float32)
    training = projection.training
    try:
        response = projection.eval()(unit) - projection(torch.zeros_like(unit[:1]))  # [M d, d_model]
    finally:
        projection.train(training)
    return response.mT
