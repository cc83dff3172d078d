"""Read the tokens of weights in einsum notation, which no module projects, from products with these weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from repulsive.errors import RuleError
from repulsive.heads.products.weight_products import WeightProduct, WeightProducts
from repulsive.repulsion.logits.projections import Projection

# Called with a part ("q", "k" or "v"), its projection, tokens [..., D_in] and projected tokens [..., M d].
Take = Callable[[str, Projection, Tensor, Tensor], None]


class ParameterTokens:
    """The attention modules that run now and whose products are read."""

    def __init__(self) -> None:
        self._running: list[WeightProducts] = []

    def begin(self, module: nn.Module, projections: Mapping[str, Projection], take: Take) -> None:
        """Start to read the products of one attention module.

        Args:
            module: the attention module.
            projections: its projections by part.
            take: receives the tokens of each product.
        """
        weights = {part: p.weight for part, p in projections.items() if p.weight is not None}
        after = {weight.attribute: partial(_read, part, projections[part], take) for part, weight in weights.items()}
        self._running.append(WeightProducts(module, {}, after))
        self._running[-1].start()

    def end(self, module: nn.Module) -> None:
        """Stop to read the products of an attention module; do nothing if they are not read."""
        if self._running and self._running[-1].module is module:
            self._running.pop().stop()

    def abandon(self) -> None:
        """Forget the modules of an earlier pass, which an interrupt has ended without calling `end`."""
        for products in self._running:
            products.is_active = False
        self._running.clear()


@torch.no_grad()
def _read(part: str, projection: Projection, take: Take, product: WeightProduct, result: Tensor) -> None:
    weight = projection.weight
    assert weight is not None
    tokens = product.tokens_in(weight.axis, weight.along)
    heads = product.heads_out(result, weight.axis, weight.along)
    if tokens is None or heads is None:
        raise RuleError(
            f"{projection.group.name}: space='logits' needs a product of {weight.parameter_name} with tokens [..., "
            f"{weight.inputs}] that are the same for all heads, got {list(product.other.shape)}. Choose space='sphere' "
            "for this layer. In TransformerLens, set use_split_qkv_input and use_attn_in to False"
        )
    if projection.bias is not None and not product.has_bias:
        heads = heads + projection.bias.take(projection.bias.parameter()).to(heads)
    take(part, projection, tokens.detach(), heads.flatten(-2))
