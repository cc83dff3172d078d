"""Warn about optimizers that do not compensate for the smaller gradients of heads.

SVGD multiplies a head's own gradient by about stepsize / M: 0.025 for `SVGD()` with four heads. Adam divides by the
size of gradients, so this factor cancels. With plain SGD it does not cancel, and constants that are compared with or
added to the gradient (Adam's eps, coupled weight decay) have a proportionally larger effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from repulsive.heads.describe import count_of
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.trained_groups import entries_with_heads

_LARGE_EPS = 1e-4  # relative to the factor on the gradient: from here on eps is not small beside most gradients
_MUCH_SMALLER = 0.5  # warn about factors below this one
# Optimizers that add weight_decay * weight to the gradient, unless `decoupled_weight_decay` is set.
_COUPLED_DECAY = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)


def scale_warnings(rule: Rule | None, groups: Sequence[HeadGroup], optimizer: Optimizer) -> Iterator[str]:
    """Yield a warning for each setting of the optimizer that smaller gradients of heads distort.

    Args:
        rule: the rule.
        groups: the heads that the rule acts on.
        optimizer: the torch optimizer itself, not a wrapper.
    """
    heads = max(group.num_heads for group in groups)
    factor = None if rule is None else rule.drive_scale(heads)
    if rule is None or factor is None or isinstance(rule.stepsize, str):  # "heads" keeps the size of gradients
        return
    neutral = rule.stepsize / factor  # the stepsize that keeps the size of gradients
    entries = entries_with_heads(optimizer, groups)
    eps = _largest(entries, "eps")
    if eps and eps >= _LARGE_EPS * factor:
        yield (
            f"heads get about {factor:.2g} of their gradient, so eps={eps:g} of the optimizer acts on them like "
            f"{eps / factor:.2g} and slows them down; choose a larger stepsize ({neutral:.3g} gives them all of it), "
            "or a smaller eps"
        )
    if not rule.has_interaction or factor >= _MUCH_SMALLER:  # SGLD's noise is made for the steps that SGD takes
        return
    name, rate = type(optimizer).__name__, _largest(entries, "lr")
    if isinstance(optimizer, torch.optim.SGD | torch.optim.ASGD):
        yield (
            f"heads get about {factor:.2g} of their gradient (stepsize {rule.stepsize:g}, {count_of(heads, 'head')}), "
            f"and {name} does not rescale it: with lr={rate:g} they learn as with {rate * factor:.2g}. Choose "
            f"stepsize={neutral:.3g} to keep the size of gradients, or Adam"
        )
    coupled = [entry for entry in entries if not entry.get("decoupled_weight_decay", False)]
    decay = _largest(coupled, "weight_decay") if isinstance(optimizer, _COUPLED_DECAY) else 0.0
    if decay:
        yield (
            f"heads get about {factor:.2g} of their gradient, and {name} adds weight_decay={decay:g} to it: for heads "
            f"that is like {decay / factor:.2g}. Choose AdamW, or stepsize={neutral:.3g} to keep the size of gradients"
        )


def _largest(entries: Sequence[dict[str, Any]], name: str) -> float:
    values = [entry.get(name) for entry in entries]
    return max((float(value) for value in values if isinstance(value, float | int | torch.Tensor)), default=0.0)
