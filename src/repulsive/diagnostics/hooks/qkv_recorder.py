"""Hooks that record the queries, keys and values of one attention layer in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.calling import TokenMask, items_in
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.diagnostics.hooks.qkv_layers import Projection
from repulsive.diagnostics.hooks.qkv_samples import QKVSamples
from repulsive.diagnostics.hooks.qkv_torch import hook_torch
from repulsive.heads.products.weight_products import WeightProduct, intercept_products
from repulsive.heads.token_order import is_time_first, projects_time_first
from repulsive.particles.gram import compute_dtype
from repulsive.particles.logits import centre_keys


@dataclass(frozen=True)
class TokenSampler:
    """Random sampler of tokens; layers with the same number of tokens get the same sample."""

    tokens: int
    batches_left: int
    seed: int

    def share(self, kept: int) -> int:
        """Compute the number of tokens to take from this batch, given that `kept` tokens were kept before."""
        return -(-(self.tokens - kept) // self.batches_left)

    def sample(self, heads: Tensor, share: int) -> Tensor:
        """Sample at most `share` tokens of [N, M, d]."""
        if len(heads) <= share:
            return heads
        order = torch.randperm(len(heads), generator=torch.Generator().manual_seed(self.seed), device="cpu")
        return heads[order[:share].sort().values.to(heads.device)]


class QKVRecorder:
    """Records the projections of one layer in one forward pass, and samples their tokens.

    Args:
        result: where to add the tokens.
        sampler: chooses the tokens.
        batch, masks, given, items: as in `recorded_qkv`.
        of_layers: masks that the attention layers are called with.
        first_sequence: number of the first sequence of this pass.
    """

    def __init__(
        self,
        result: QKVSamples,
        sampler: TokenSampler,
        batch: Any,
        masks: tuple[TokenMask, TokenMask],
        of_layers: LayerMasks,
        given: str,
        first_sequence: int = 0,
        items: int | None = None,
    ) -> None:
        self.result, self.sampler, self.batch, self.items = result, sampler, batch, items
        queries, keys = masks
        self.masks: Mapping[str, TokenMask] = {"q": queries, "k": keys, "v": keys}
        self.of_layers, self.given = of_layers, given
        self.first_sequence = first_sequence
        self.numbers: dict[str, list[Tensor]] = {}  # sequence of each token in `blocks`
        self.blocks: dict[str, list[Tensor]] = {}
        self.pending: dict[str, Tensor] = {}  # projections whose norm has not run yet
        self.unmatched_norms: set[str] = set()  # parts whose norm had another input
        self.projected: set[str] = set()  # parts that ran in this call of a layer that also projects positions

    def real(self, part: str) -> Tensor | None:
        """Return which tokens of a part count, bool [S, n]; None for all. The batch may be filled during the pass."""
        return self.masks[part](self.batch, self.result.layer.where)

    def keep(self, part: str, heads: Tensor, real: Tensor | None) -> None:
        """Keep a sample of the tokens in `heads` [S, n, M, d]; `real` [S, n] is False for padding."""
        heads, real = heads[: self.items], None if real is None else real[: self.items]
        heads = heads.detach().to(compute_dtype(heads))
        if (limit := self.result.layer.parts[part].clip) is not None:
            heads = heads.clamp(-limit, limit)
        if part == "k":
            heads = centre_keys(heads, real)
        rows = heads.flatten(0, 1)  # [N, M, d]
        numbers = self.number_sequences(len(heads)).repeat_interleave(heads.shape[1]).to(heads.device)  # [N]
        if real is not None:
            rows, numbers = rows[real.flatten()], numbers[real.flatten()]
        share = self.sampler.share(self.result.count(part))
        self.blocks.setdefault(part, []).append(self.sampler.sample(rows, share))
        self.numbers.setdefault(part, []).append(self.sampler.sample(numbers, share))

    def number_sequences(self, count: int) -> Tensor:
        """Number the sequences of a pass [S]; windows of one item, as in Swin, are one sequence."""
        items = items_in(self.batch)
        windows = count // items if 0 < items < count and count % items == 0 else 1
        self.result.has_windows |= windows > 1
        return self.first_sequence + torch.arange(count, device="cpu") // windows

    def projection_ran(self, part: str, out: object) -> None:
        """Record the result of a projection."""
        if self.result.layer.repeats:
            if part in self.projected:
                return
            self.projected.add(part)
        projection = self.result.layer.parts[part]
        if not isinstance(out, Tensor) or out.shape[-1] != projection.features or out.ndim < 2:
            self.result.problem = f"its {part} projection does not return [..., {projection.features}]"
            return
        out = out.transpose(0, 1) if out.ndim == 3 and projects_time_first(self.result.layer.attention) else out
        out = out.unsqueeze(0) if out.ndim == 2 else out.flatten(1, -2)  # [S, n, features]
        real = self.real(part)
        if real is not None and out.shape[1] == len(real) != len(out):  # tokens come first
            if len(out) != real.shape[1]:
                self.result.problem = f"it projects {len(out)} tokens, but the mask of the inputs has {real.shape[1]}"
                return
            out = out.transpose(0, 1)
        self.heads_ran(part, out[..., projection.rows.to(out.device)])  # [S, n, M, d], a copy

    def product_ran(self, part: str, product: WeightProduct, result: Tensor) -> None:
        """Record the product of tokens with a weight in einsum notation."""
        projection = self.result.layer.parts[part]
        weight = projection.group.slices[0]
        assert weight.feature_axis is not None
        heads = product.heads_out(result, weight.axis, weight.feature_axis)
        if heads is None or heads.ndim < 3:
            self.result.problem = (
                f"{weight.parameter_name} is not multiplied as [heads, inputs, features], so its products do not show "
                "the heads; compare heads in 'attention', 'outputs' or 'cka'"
            )
            return
        heads = heads.unsqueeze(0) if heads.ndim == 3 else heads.flatten(1, -3)
        heads = heads.transpose(0, 1) if is_time_first(projection.module) else heads  # [S, n, M, d]
        if projection.bias is not None and not product.has_bias:
            heads = heads + projection.bias.take(projection.bias.parameter().detach()).to(heads)
        self.heads_ran(part, heads.clone())

    def heads_ran(self, part: str, heads: Tensor) -> None:
        """Record projected tokens [S, n, M, d], before biases of the attention module, norm and clipping."""
        projection = self.result.layer.parts[part]
        if projection.added is not None:
            heads = heads + projection.added.take(projection.added.parameter().detach()).to(heads)
        self.flush(part)
        if projection.norm is None:
            self.keep(part, heads, self.mask_of(part, heads))
        else:
            self.pending[part] = heads

    def norm_ran(self, part: str, before: Tensor, after: Tensor) -> None:
        """Replace the result of a projection by the result of its norm, if the norm's input was that projection."""
        heads = self.pending.get(part)
        if heads is None:
            return  # the norm runs before the projection
        layouts = [(before, after)]
        if before.ndim == 4:
            layouts.append((before.transpose(1, 2), after.transpose(1, 2)))  # [S, M, n, d]
        for norm_in, norm_out in layouts:
            if norm_in.numel() == heads.numel() and torch.equal(norm_in.reshape(heads.shape), heads):
                del self.pending[part]
                # A copy, because some layers change the result of a norm in place.
                self.keep(part, norm_out.reshape(heads.shape).clone(), self.mask_of(part, heads))
                return
        self.unmatched_norms.add(part)

    def flush(self, part: str) -> None:
        """Keep a projection whose norm did not run."""
        heads = self.pending.pop(part, None)
        if heads is not None and part in self.unmatched_norms:
            self.result.problem = f"its {part} norm does not take the result of the projection"
        elif heads is not None:
            self.keep(part, heads, self.mask_of(part, heads))

    def mask_of(self, part: str, heads: Tensor) -> Tensor | None:
        """Return the mask of the tokens of this part (q, k or v), bool [S, n]; None if no mask has this shape."""
        real = self.real(part)
        if (real is None or real.shape != heads.shape[:2]) and part not in self.given:
            read = self.of_layers.queries if part == "q" else self.of_layers.keys
            real = read(self.result.layer, heads.shape)
        return real.to(heads.device) if real is not None and real.shape == heads.shape[:2] else None

    def end(self) -> None:
        """Add the tokens of this pass to the samples."""
        for part in tuple(self.pending):
            self.flush(part)
        for part, blocks in self.blocks.items():
            share = self.sampler.share(self.result.count(part))
            self.result.samples.setdefault(part, []).append(self.sampler.sample(torch.cat(blocks), share))
            numbers = self.sampler.sample(torch.cat(self.numbers[part]), share)
            self.result.sequences.setdefault(part, []).append(numbers)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def hook(self, stack: ExitStack) -> None:
        """Register hooks on the modules of the layer until the stack is closed."""
        layer = self.result.layer
        if layer.repeats:
            hook = layer.attention.register_forward_pre_hook(lambda *_: self.projected.clear())
            stack.callback(hook.remove)
        for part, projection in layer.parts.items():
            if isinstance(projection.module, nn.MultiheadAttention):
                hook_torch(stack, part, projection, self.mask_of, self.keep)
            else:
                self._hook_projection(stack, part, projection)

    def _hook_projection(self, stack: ExitStack, part: str, projection: Projection) -> None:
        # Without gradients: a pass under activation checkpointing must save the same tensors with and without hooks.
        @torch.no_grad()
        def after_projection(_module: nn.Module, _args: object, out: object) -> None:
            self.projection_ran(part, out)

        @torch.no_grad()
        def after_product(product: WeightProduct, result: Tensor) -> None:
            self.product_ran(part, product, result)

        @torch.no_grad()
        def after_norm(_module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            self.norm_ran(part, args[0] if args else out, out)

        if projection.is_parameter:
            intercept_products(stack, projection.module, after={projection.group.slices[0].attribute: after_product})
        else:
            stack.callback(projection.module.register_forward_hook(after_projection).remove)
        if projection.norm is not None:
            stack.callback(projection.norm.register_forward_hook(after_norm).remove)
