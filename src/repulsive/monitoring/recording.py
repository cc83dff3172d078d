r"""Measure the heads of a model in one forward pass, without changing the pass.

For head h with attention weights $a_{hts}$, logits $\ell_{hts}$ and output $o_{ht}$ before the output projection $W_h$,
with means over the queries t of a few items that are not padding:

$$H_h = -\frac1T \sum_t \sum_s a_{hts} \ln a_{hts}, \qquad
  L_h = \max_{t, s} \ell_{hts}, \qquad
  w_h = \sqrt{\tfrac{1}{T} \sum_t |W_h o_{ht}|^2 \Big/ \tfrac{1}{M T} \sum_{h', t} |W_{h'} o_{h't}|^2}.$$

The similarities of logits and of OV circuits are those of `diagnostics.circuits`. The similarity of tokens is the mean
cosine between two tokens of an item after the block that contains the attention layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.circuits import logit_similarity, ov_similarity
from repulsive.diagnostics.hooks.attention import recorded_logits
from repulsive.diagnostics.hooks.attention_layers import (
    AttentionLayer,
    find_attention_layers,
    output_weight,
    replaced_head_outputs,
)
from repulsive.diagnostics.hooks.calling import token_masks
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.diagnostics.hooks.qkv_layers import find_qkv_layers
from repulsive.diagnostics.hooks.qkv_samples import QKVSamples, check_recorded
from repulsive.diagnostics.hooks.qkv_sampling import recorded_qkv
from repulsive.diagnostics.hooks.qkv_torch import hook_torch_logits
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.similarity import token_similarity
from repulsive.errors import DivergedError, HeadLayoutError, short_message
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import clean, unwrap
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.heads.token_order import is_time_first
from repulsive.monitoring.layer_modules import blocks_of_layers, path_to_layers
from repulsive.monitoring.measurement import LayerMeasurement, Measurement
from repulsive.particles.gram import compute_dtype, full_precision

_QUANTITIES = {
    "similarity": "similarity of attention logits",
    "ov": "similarity of OV circuits",
    "entropy": "entropy and largest logit",
    "written": "output of heads",
    "tokens": "similarity of tokens",
}
_HIDDEN = 'its logits are not visible; if a fused kernel computes them, load the model with attn_implementation="sdpa"'


class HeadRecorder:
    """Hooks that measure the heads of a model in one forward pass.

    Args:
        model: any module with heads that `find_heads` finds, also inside data-parallel or compile wrappers.
        groups: heads of all parts; None calls `find_heads`.
        out: output projections by attention module, as in `find_attention_layers`.
        items: maximum number of items of a batch that are measured, from the first on.
        tokens: maximum number of tokens of these items on which logits are compared.

    Attributes:
        path: the modules from the model down to the last one that contains every attention layer.
        not_measured: name of a layer and a quantity -> why it cannot be measured.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[HeadGroup] | None = None,
        *,
        out: Mapping[str, str] | None = None,
        items: int = 8,
        tokens: int = 1024,
    ) -> None:
        groups = find_heads(model) if groups is None else groups
        self.items, self.tokens = items, tokens
        self.masks = token_masks(model)
        self.layers = find_attention_layers(model, groups, out=out)
        qkv, left_out = find_qkv_layers(model, groups)
        self.qkv = {layer.name: layer for layer in qkv}
        labels = short_names(groups)
        self.labels = {layer.name: labels[layer.name] or type(layer.attention).__name__ for layer in self.layers}
        self.not_measured = {(name, "similarity"): reason for name, reason in left_out.items()}
        self.not_measured |= {(x.name, "entropy"): reason for x in self.layers if (reason := _without_logits(x))}
        modules = {clean(name): module for name, module in unwrap(model).named_modules()}
        self.blocks = blocks_of_layers(modules, self.layers)
        self.path = path_to_layers(modules, [layer.name for layer in self.layers])

    @contextmanager
    def recording(self, batch: Mapping[str, Any], step: int) -> Iterator[Pass]:
        """Measure the forward pass that runs inside this context. The measurement is complete after its end.

        Args:
            batch: inputs of the pass by name, as far as they are known; padding is read from its masks.
            step: number of optimizer steps before the pass; also the seed of the sampled tokens.
        """
        result = Pass(self, batch, step)
        with ExitStack() as stack:
            stack.enter_context(result.of_layers.recorded(self.layers))
            samples = [*result.samples, *result.values.values()]
            sampled = recorded_qkv(samples, batch, self.masks, tokens=self.tokens, seed=step, items=self.items)
            stack.enter_context(sampled)
            stack.enter_context(recorded_logits(self.layers, result.keep_logits, self.items, result.guard_logits))
            hooked = [layer for layer in self.layers if layer.kind != "torch"]
            stack.enter_context(replaced_head_outputs(hooked, result.keep_outputs, only_reads=True))
            for layer in self.layers:
                if layer.kind == "torch" and layer.name in self.qkv:
                    guard = partial(result.guard_logits, layer)
                    hook_torch_logits(stack, self.qkv[layer.name], result.keep_torch(layer), self.items, guard)
            for layer, block in self.blocks:
                stack.callback(block.register_forward_hook(result.keep_tokens(layer)).remove)
            yield result

    def missing_values(self) -> dict[tuple[str, str], list[str]]:
        """Return (quantity that cannot be measured, reason) -> labels of its layers."""
        missing: dict[tuple[str, str], list[str]] = {}
        for (name, quantity), reason in self.not_measured.items():
            missing.setdefault((_QUANTITIES[quantity], reason), []).append(self.labels[name])
        return missing


@dataclass
class _Sums:
    """What one layer has shown so far in a pass."""

    entropy: list[Tensor] = field(default_factory=list)  # [M] each
    largest: list[Tensor] = field(default_factory=list)  # [M] each
    moments: list[Tensor] = field(default_factory=list)  # mean of o o^T, [M, d, d] each
    tokens: list[float] = field(default_factory=list)

    @property
    def has_run(self) -> bool:
        return bool(self.entropy or self.moments or self.tokens)


class Pass:
    """One recorded forward pass.

    Args:
        recorder: the recorder that runs it.
        batch: its inputs by name.
        step: number of optimizer steps before it.
    """

    def __init__(self, recorder: HeadRecorder, batch: Mapping[str, Any], step: int) -> None:
        self._recorder, self._batch, self.step = recorder, batch, step
        self.of_layers = LayerMasks()
        self._sums = {layer.name: _Sums() for layer in recorder.layers}
        scored = [replace(layer, parts={p: layer.parts[p] for p in "qk"}) for layer in recorder.qkv.values()]
        self.samples = [QKVSamples(layer) for layer in scored]
        # Apart from q and k, so that logits are also measured in layers whose values cannot be.
        written = [layer.name for layer in recorder.layers if layer.projection]
        valued = {name: layer for name, layer in recorder.qkv.items() if name in written and "v" in layer.parts}
        self.values = {name: QKVSamples(replace(x, parts={"v": x.parts["v"]})) for name, x in valued.items()}

    # -- hooks --------------------------------------------------------------------------------------------------

    def keep_logits(self, layer: AttentionLayer, logits: Tensor, queries: Tensor | None = None) -> None:
        """Add the entropy and the largest logit of each head; logits are [B, M, T, S] of some queries [T]."""
        with self._guard(layer, "entropy"):
            real = self._real(layer, logits.shape[0], logits.shape[2], logits.device, queries)  # [B, T]
            rows = logits.transpose(1, 2)[real]  # [N, M, S]
            is_masked = (rows == -math.inf).all(-1)  # [N, M]; a query whose keys are all masked attends to nothing
            rows, is_masked = rows[~is_masked.all(-1)], is_masked[~is_masked.all(-1)]
            if len(rows):
                entropy = torch.special.entr(rows.softmax(-1)).sum(-1).masked_fill(is_masked, 0)  # [N, M]
                self._sums[layer.name].entropy.append(entropy.mean(0))
                self._sums[layer.name].largest.append(rows.amax((0, 2)))

    @torch.no_grad()
    def keep_outputs(self, layer: AttentionLayer, heads: Tensor, queries: Tensor | None = None) -> None:
        """Add the second moments of head outputs [B, T, M, d] of some queries [T]."""
        with self._guard(layer, "written"), full_precision(heads.device):
            heads = heads.detach()[: self._recorder.items]
            rows = heads[self._real(layer, heads.shape[0], heads.shape[1], heads.device, queries)]  # [N, M, d]
            rows = rows.to(compute_dtype(rows)).transpose(0, 1)  # [M, N, d]
            if rows.shape[1]:
                self._sums[layer.name].moments.append(rows.mT @ rows / rows.shape[1])

    def keep_torch(self, layer: AttentionLayer) -> Callable[[Tensor, Tensor, Tensor | None], None]:
        """Make the callback of `hook_torch_logits`."""

        def keep(logits: Tensor, outputs: Tensor, queries: Tensor | None) -> None:
            self.keep_logits(layer, logits, queries)
            self.keep_outputs(layer, outputs, queries)

        return keep

    def keep_tokens(self, layer: AttentionLayer) -> Callable[..., None]:
        """Make the forward hook of the block that contains a layer."""
        is_tokens_first = is_time_first(layer.attention)

        @torch.no_grad()
        def after_block(_module: nn.Module, _args: object, result: Any) -> None:
            with self._guard(layer, "tokens"):
                x = result if isinstance(result, Tensor) else next(iter(_values(result)), None)
                if not isinstance(x, Tensor) or x.ndim != 3:
                    return
                x = (x.transpose(0, 1) if is_tokens_first else x).detach()[: self._recorder.items]  # [B, T, D]
                real = self._real(layer, x.shape[0], x.shape[1], x.device)
                if bool(x.isfinite().all()) and bool(real.any()):
                    self._sums[layer.name].tokens.append(token_similarity(x.unsqueeze(1), real))

        return after_block

    # -- result -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> Measurement:
        """Compute the measurement, after the pass."""
        check_recorded([*self.samples, *self.values.values()])
        cosines = self._cosines()
        layers = []
        for layer in self._recorder.layers:
            sums = self._sums[layer.name]
            if not sums.has_run and layer.name not in cosines:
                continue
            if sums.moments and not sums.entropy:
                self._recorder.not_measured.setdefault((layer.name, "entropy"), _HIDDEN)
            layers.append(
                LayerMeasurement(
                    layer.name,
                    self._recorder.labels[layer.name],
                    _floats(torch.stack(sums.entropy).mean(0)) if sums.entropy else (),
                    _floats(torch.stack(sums.largest).amax(0)) if sums.largest else (),
                    self._written(layer, sums.moments),
                    cosines.get(layer.name, ()),
                    sum(sums.tokens) / len(sums.tokens) if sums.tokens else math.nan,
                    *self._ov(layer),
                )
            )
        return Measurement(self.step, tuple(layers))

    def _cosines(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        cosines = {}
        for samples in self.samples:
            name = samples.layer.name
            if samples.problem:
                if self._sums[name].has_run:
                    self._recorder.not_measured.setdefault((name, "similarity"), samples.problem)
                continue
            try:
                cosines[name] = tuple(_floats(row) for row in logit_similarity(samples).cosine)
            except DivergedError:
                continue  # the largest logit shows it
            except Exception as error:
                self._recorder.not_measured.setdefault((name, "similarity"), short_message(error))
        return cosines

    def _ov(self, layer: AttentionLayer) -> tuple[float, float]:
        """Compute the mean and the largest cosine between the OV circuits of two heads."""
        unknown = math.nan, math.nan
        samples = self.values.get(layer.name)
        if samples is None:
            return unknown
        with self._guard(layer, "ov"):
            if samples.problem:
                raise HeadLayoutError(samples.problem)
            try:
                similarity = ov_similarity(samples, _whole_output_weight(layer))
            except DivergedError:
                return unknown  # the largest logit shows it
            return similarity.mean, similarity.largest
        return unknown

    def _written(self, layer: AttentionLayer, moments: Sequence[Tensor]) -> tuple[float, ...]:
        """Compute the norm of each head's write, relative to the layer, [M]."""
        if not moments:
            return ()
        with self._guard(layer, "written"):
            moment = torch.stack(list(moments)).mean(0)  # [M, d, d]
            if layer.projection:
                weight = _whole_output_weight(layer)  # [d_model, M d]
                weight = weight.to(moment).unflatten(-1, moment.shape[:2]).transpose(0, 1)  # [M, d_model, d]
                with full_precision(moment.device):
                    power = (weight.mT @ weight * moment).sum((-2, -1)).clamp(min=0)  # [M]
            else:
                power = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
            total = power.mean()
            return _floats((power / total).sqrt() if float(total) != 0 else power)
        return ()

    def _real(
        self, layer: AttentionLayer, batch: int, length: int, device: torch.device, chosen: Tensor | None = None
    ) -> Tensor:
        """Return which tokens of the first items count, bool [B, T]; `chosen` [T] are positions in longer items."""
        queries, _ = self._recorder.masks
        mask = queries(self._batch, layer.where)
        mask = self.of_layers.queries(layer) if mask is None else mask
        if mask is not None and chosen is not None and mask.shape[1] > int(chosen.max()):
            mask = mask[:, chosen.to(mask.device)]
        if mask is not None and mask.shape[1] == length and len(mask) >= batch:
            return mask[:batch].to(device)
        return torch.ones(batch, length, dtype=torch.bool, device=device)

    def guard_logits(self, layer: AttentionLayer) -> AbstractContextManager[None]:
        """Make the context that records why the logits of a layer cannot be measured."""
        return self._guard(layer, "entropy")

    @contextmanager
    def _guard(self, layer: AttentionLayer, quantity: str) -> Iterator[None]:
        """Record why a quantity cannot be measured; a monitor must never stop the training."""
        try:
            yield
        except Exception as error:
            self._recorder.not_measured.setdefault((layer.name, quantity), short_message(error))


def _without_logits(layer: AttentionLayer) -> str:
    """Say why a layer has no logits between all tokens; "" if it has."""
    if layer.kind == "graph":
        return "graph attention has logits along edges only"
    if layer.kind == "torch" and (layer.attention.bias_k is not None or layer.attention.add_zero_attn):
        return "bias_k or add_zero_attn adds keys that are not tokens"
    return ""


def _whole_output_weight(layer: AttentionLayer) -> Tensor:
    weight = output_weight(layer)  # [d_model, M d]
    if is_sharded(weight):
        raise TypeError("the output projection is sharded")
    return weight


def _values(result: Any) -> Iterator[Any]:
    if isinstance(result, Mapping):
        yield from result.values()
    elif isinstance(result, list | tuple):
        yield from result


def _floats(x: Tensor) -> tuple[float, ...]:
    return tuple(x.double().cpu().tolist())
