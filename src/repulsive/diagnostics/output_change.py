r"""Change of a model's output when heads are removed: measures that need no labels.

A model with logits has a distribution p per token; the change to p' is $KL(p \| p') = \sum_c p_c \ln(p_c / p'_c)$ in
nats, averaged over an item's tokens. Any other output h is treated as hidden states; its change is $|h' - h| / |h|$.

The gradient of both is zero at no change, so first-order importance needs another loss. For logits it is $-\ln p_y$
with y drawn from p itself: by $KL \approx \frac12 E_y (\delta^\top \nabla \ln p_y)^2$, its derivative with respect to a
head's factor measures the change of the distribution. For states it is $s^\top h$ with random signs s:
$E_s (s^\top \delta)^2 = |\delta|^2$.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.calling import call, token_masks
from repulsive.diagnostics.hooks.layer_masks import LayerMasks
from repulsive.errors import DataError

_BLOCK = {"cpu": 1 << 18}  # largest number of logits that are compared at once, to stay in the cache
METRICS = {
    "logits": "mean KL divergence of the model's own output distribution, nats",
    "states": "relative change of the model's own output states",
}


@dataclass(frozen=True, eq=False)
class Output:
    """Output of a model and its kind: "logits" [B, ..., C] or "states" [B, ...]."""

    kind: str
    values: Tensor

    @property
    def metric(self) -> str:
        """Description of the metric that `output_change` computes."""
        return METRICS[self.kind]

    def by_token(self) -> Tensor:
        """Reshape the output to [B, T, E], detached; T = 1 for an output without tokens."""
        x = self.values.detach()
        if x.ndim < 3:
            return x.reshape(len(x), 1, -1)
        return x.flatten(1, -2) if self.kind == "logits" else x.flatten(2)


def read_output(result: Any) -> Output:
    """Read the logits from a model's result if they have more than one class, else the first floating-point tensor.

    Raises:
        DataError: the result has no floating-point tensor.
    """
    logits = getattr(result, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim == 2 and "ForPreTraining" in type(result).__name__:
        logits = torch.stack([torch.zeros_like(logits), logits], dim=-1)  # ELECTRA: one binary logit per token
    if isinstance(logits, Tensor) and logits.ndim > 1 and logits.shape[-1] > 1:
        return Output("logits", logits)
    values = list(result.values()) if isinstance(result, Mapping) else result
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            return Output("states", value)
    raise DataError(f"the model returned {type(result).__name__} without a floating-point tensor to compare")


def output_change(before: Output, after: Output, real: Tensor | None = None) -> Tensor:
    """Compute the output change of each item, float64 [B], as defined at the top of this file; 0 for all-padding items.

    Args:
        before: output of the complete model.
        after: output of the changed model for the same inputs.
        real: which tokens count, bool [B, T]; all if it is None or does not have the shape of the output.
    """
    old, new = before.by_token(), after.by_token()  # [B, T, E]
    if real is None or real.shape != old.shape[:2]:
        real = torch.ones(old.shape[:2], dtype=torch.bool, device=old.device)
    real = real.to(old.device)
    counts = real.double()  # [B, T]
    if before.kind == "logits":
        divergence = torch.zeros_like(counts)  # [B, T]; 0 for padding
        divergence[real] = _divergence(old[real], new[real]) if not real.all() else _divergence(old, new)[real]
        return divergence.sum(-1) / counts.sum(-1).clamp(min=1)
    squares = (new - old).double().square().sum(-1), old.double().square().sum(-1)  # [B, T] each
    moved, size = (square.masked_fill(~real, 0).sum(-1) for square in squares)  # [B]; padding may be NaN
    return (moved / size).sqrt().masked_fill(moved == 0, 0)  # zeros that stay zeros: 0, not 0 / 0


def label_free_loss(generator: torch.Generator, layers: Sequence[AttentionLayer] = ()) -> Any:
    """Make a loss for `first_order_importance` that needs no labels.

    Args:
        generator: CPU generator that draws labels from the model's distribution, or signs.
        layers: attention layers, whose masks show the padding of batches without a mask; see `real_tokens`.
    """

    def loss(model: nn.Module, batch: Any) -> Tensor:
        of_layers = LayerMasks()
        with of_layers.recorded(layers):
            output = read_output(call(model, batch))
        real = real_tokens(model, batch, output, of_layers)
        if output.kind == "states":
            signs = torch.randint(0, 2, output.values.shape, generator=generator, device="cpu") * 2 - 1
            signed = signs.to(output.values) * output.values
            if real is not None and signed.shape[:2] == real.shape:
                return signed[real.to(signed.device)].sum() / len(signed)
            return signed.sum() / len(signed)
        log_p = output.values.float().log_softmax(-1).flatten(0, -2)  # [N, C]
        drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)  # [N, 1]
        picked = log_p.gather(-1, drawn).squeeze(-1)  # [N]
        if real is not None and real.numel() == picked.numel():
            picked = picked[real.flatten()]
        return -picked.sum() / len(output.values)

    return loss


def real_tokens(model: nn.Module, batch: Any, output: Output, of_layers: LayerMasks) -> Tensor | None:
    """Return a mask of output tokens that are not padding, bool [B, T]; of the decoder's tokens if there are any.

    Args:
        model: the model.
        batch: its inputs.
        output: its output for these inputs.
        of_layers: the masks of attention layers in that pass, for batches without a mask.
    """
    queries, _ = token_masks(model)
    real = queries(batch, "decoder")
    shape = output.by_token().shape
    return real if real is not None and real.shape == shape[:2] else of_layers.output(shape)


class OutputChange:
    """Metric for `head_ablation`: the change of the model's output on given batches, one value per item.

    Args:
        model: the complete model; its outputs are stored.
        batches: inputs, each with items in its first dimension.
        layers: attention layers, whose masks show the padding of batches without a mask; see `real_tokens`.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, batches: Sequence[Any], layers: Sequence[AttentionLayer] = ()) -> None:
        self._batches = batches
        self._before: list[Output] = []
        self._real: list[Tensor | None] = []
        for batch in batches:
            of_layers = LayerMasks()
            with of_layers.recorded(layers):
                self._before.append(read_output(call(model, batch)))
            self._real.append(real_tokens(model, batch, self._before[-1], of_layers))

    def __call__(self, model: nn.Module) -> Tensor:
        changes = [
            output_change(before, read_output(call(model, batch)), real)
            for before, batch, real in zip(self._before, self._batches, self._real, strict=True)
        ]
        return torch.cat(changes)  # [N]

    @property
    def metric(self) -> str:
        """Description of the metric."""
        return self._before[0].metric


def _divergence(old: Tensor, new: Tensor) -> Tensor:
    r"""Compute the KL divergence between two tensors of logits [..., C], for each row, float64 [...].

    It is $\ln(1 + \sum_c p_c (e^{d_c} - 1 - d_c))$ with d centred: $\sum_c p_c d_c = 0$. No term is negative, so a
    small divergence is not lost to cancellation, as it is in $\sum p (\ln p - \ln q)$. A large divergence uses the
    latter sum, since $e^d$ may overflow. Classes with probability zero do not count.
    """
    rows = max(1, _BLOCK.get(old.device.type, 1 << 26) // old.shape[-1])
    pairs = zip(old.flatten(0, -2).split(rows), new.flatten(0, -2).split(rows), strict=True)
    return torch.cat([_block_divergence(_wide(a), _wide(b)) for a, b in pairs]).view(old.shape[:-1])


def _block_divergence(old: Tensor, new: Tensor) -> Tensor:
    """Compute the KL divergence of some rows of logits [N, C]; few enough that they stay in the cache of the CPU."""
    p, d = old.softmax(-1), new - old
    d = d.masked_fill_(old == -torch.inf, 0)  # -inf minus -inf would be nan
    d -= (p * d).sum(-1, keepdim=True)
    small = (p * (d.expm1() - d)).sum(-1, dtype=torch.float64).clamp(min=0).log1p()  # [N]
    is_large = ~(small < 1)
    if is_large.any():
        before, after = old[is_large].double(), new[is_large].double()
        log_ratio = before.log_softmax(-1) - after.log_softmax(-1)
        q = p[is_large].double()
        small[is_large] = (q * log_ratio).masked_fill(q == 0, 0).sum(-1)
    return small


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
