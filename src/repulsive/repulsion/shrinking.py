"""Rules make the gradients of heads smaller. Warn where the optimizer does not make up for it.

SVGD multiplies a head's own gradient by about stepsize / M, 0.025 at the defaults and four heads. Adam divides by the
size of gradients, so that such a factor cancels; plain SGD does not, and constants beside the gradient (Adam's eps,
coupled weight decay) grow in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule

_SMALL_EPS = 1e-4  # an eps above this share of the gradient's factor is no longer small beside most gradients
_MUCH = 0.5  # heads that keep less than this of their gradient are warned about
# Optimizers that add weight_decay * weight to the gradient, unless `decoupled_weight_decay` is set.
_COUPLED = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)


def warnings_about(rule: Rule | None, groups: Sequence[HeadGroup], optimizer: Optimizer) -> Iterator[str]:
    """Yield a warning for each way in which this optimizer treats smaller gradients of heads differently.

    Args:
        rule: the rule.
        groups: the heads that it acts on.
        optimizer: the torch optimizer itself.
    """
    heads = max(group.num_heads for group in groups)
    share = None if rule is None else rule.drive_scale(heads)
    if rule is None or share is None:
        return
    whole = rule.stepsize / share  # the stepsize that leaves gradients as large as they are
    owned = {id(parameter) for group in groups for parameter in group.parameters()}
    entries = [entry for entry in optimizer.param_groups if any(id(p) in owned for p in entry["params"])]
    eps = _largest(entries, "eps")
    if eps and eps >= _SMALL_EPS * share:
        yield (
            f"heads get about {share:.2g} of their gradient, so that eps={eps:g} of the optimizer acts on them like "
            f"{eps / share:.2g} and slows them down; choose a larger stepsize ({whole:.3g} gives them all of it), or a "
            "smaller eps"
        )
    if not rule.has_interaction or share >= _MUCH:  # SGLD's noise is made for the step that SGD takes
        return
    name, rate = type(optimizer).__name__, _largest(entries, "lr")
    if isinstance(optimizer, torch.optim.SGD):
        yield (
            f"heads get about {share:.2g} of their gradient (stepsize {rule.stepsize:g}, {heads} heads), and {name} "
            f"does not rescale it: with lr={rate:g} they learn as with {rate * share:.2g}. Choose "
            f"stepsize={whole:.3g} to keep the size of gradients, or Adam"
        )
    coupled = [entry for entry in entries if not entry.get("decoupled_weight_decay", False)]
    decay = _largest(coupled, "weight_decay") if isinstance(optimizer, _COUPLED) else 0.0
    if decay:
        yield (
            f"heads get about {share:.2g} of their gradient, and {name} adds weight_decay={decay:g} to it: for heads "
            f"that is like {decay / share:.2g}. Choose AdamW, or stepsize={whole:.3g} to keep the size of gradients"
        )


def _largest(entries: Sequence[dict[str, Any]], name: str) -> float:
    values = [entry.get(name) for entry in entries]
    return max((float(value) for value in values if isinstance(value, float | int | torch.Tensor)), default=0.0)
