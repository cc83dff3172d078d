"""AdamW for many models at once, each with its own settings and force between heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class StepSettings(NamedTuple):
    """Settings of every model, [E] each; `Arm` explains those that are not listed here.

    Args:
        total: optimizer steps of the run.
        rate: highest learning rate.
        noise: 1 if a random force of the same norm replaces the force on q and k.
        on_q, on_k: 1 if the projection receives the force.
        begin, end: share of training in which the force acts.
        rate_begin, rate_end: share of training in which `qk_rate` holds.
    """

    total: Tensor
    rate: Tensor
    qk_rate: Tensor
    decay: Tensor
    qk_decay: Tensor
    ratio: Tensor
    noise: Tensor
    on_q: Tensor
    on_k: Tensor
    begin: Tensor
    end: Tensor
    rate_begin: Tensor
    rate_end: Tensor


@torch.no_grad()
def adamw_step(
    params: Tensors,
    grads: Tensors,
    force: Tensors,
    first: Tensors,
    second: Tensors,
    number: Tensor,
    warmup: int,
    settings: StepSettings,
    random: Tensors,
) -> None:
    """Clip each model's gradient to norm 1, add the force, take an AdamW step with each model's own settings.

    Args:
        params: by name, with the leading axis E; updated in place.
        grads: gradients of the loss.
        force: gradients of the energy between heads, of q, k, v and the output projection.
        first: first moments of the gradients; updated in place.
        second: second moments of the gradients; updated in place.
        number: steps taken so far.
        warmup: steps in which the learning rate rises.
        settings: of every model.
        random: random directions of q and k; empty if no model needs them.
    """
    s = settings
    norm2 = sum(g.float().square().flatten(1).sum(1) for g in grads.values())
    clip = (1 / norm2.sqrt().clamp(min=1e-12)).clamp(max=1)  # [E]
    progress = (number / s.total).clamp(max=1)
    warm = ((number + 1) / warmup).clamp(max=1)
    scale = s.rate * warm * (0.1 + 0.45 * (1 + torch.cos(math.pi * progress))) * (number < s.total)
    active = ((progress >= s.begin) & (progress < s.end)).float()
    faster = (progress >= s.rate_begin) & (progress < s.rate_end)
    qk_rate = torch.where(faster, s.qk_rate, torch.ones_like(s.qk_rate))
    pair = {n: force[n] for n in ("wq", "wk")}
    size = _layer_norms(pair)
    drive = _layer_norms({n: grads[n].float() for n in pair}) * clip[:, None]
    ratio = s.ratio[:, None]
    factor = torch.where(ratio > 0, ratio * drive / size.clamp(min=1e-20), torch.ones_like(size))
    if random:
        away = _layer_norms(random).clamp(min=1e-20)
        share = (size / away)[..., None, None]
        pair = {n: torch.where(_like(s.noise, t) > 0, random[n] * share, t) for n, t in pair.items()}
    for name, p in params.items():
        g = grads[name].float() * _like(clip, p)
        if name in pair:
            part = s.on_q if name == "wq" else s.on_k
            g = g + pair[name] * factor[..., None, None] * _like(active * part, p)
        elif name in force:
            g = g + force[name] * _like(active, p)
        own = name in pair
        lr = _like(scale * (qk_rate if own else 1), p)
        first[name].mul_(0.9).add_(g, alpha=0.1)
        second[name].mul_(0.95).addcmul_(g, g, value=0.05)
        corrected = first[name] / (1 - 0.9 ** (number + 1))
        root = (second[name] / (1 - 0.95 ** (number + 1))).sqrt() + 1e-8
        if not name.startswith("norm"):
            p.mul_(1 - lr * _like(s.decay * (s.qk_decay if own else 1), p))
        p.sub_(lr * corrected / root)


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    """Add axes to [E], so that it broadcasts over `tensor`."""
    return values.view(-1, *([1] * (tensor.ndim - 1)))


def _layer_norms(tensors: Tensors) -> Tensor:
    """Compute the norm of all tensors of a layer together: [E, L, ...] each -> [E, L]."""
    return sum(t.square().sum((-2, -1)) for t in tensors.values()).sqrt()
