"""Kernel bandwidths: the h of exp(-d2 / h). Conventions differ by a factor of up to 3.2 at M = 2; each has a name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from repulsive.errors import RuleError, did_you_mean

BandwidthName = Literal["paper", "released", "released-lower"]
Bandwidth = BandwidthName | float | Callable[[Tensor], Tensor]

# A median bandwidth never falls below (FLOOR x root mean square norm of the particles)^2: repulsion grows as
# 1 / distance, and heads closer than this differ by little more than rounding.
FLOOR = 1e-4


def paper(d2: Tensor) -> Tensor:
    r"""Compute $h = \mathrm{med}^2 / \log M$; med is the median of the distances i < j (appendix B of the paper).

    For an even number of distances, the two middle distances are averaged before squaring.

    Args:
        d2: squared distances [..., M, M].

    Returns:
        [...]
    """
    heads = d2.shape[-1]
    row, column = torch.triu_indices(heads, heads, offset=1, device=d2.device)
    median = _middle(d2[..., row, column].sqrt())
    return median.square() / math.log(heads)


def released(d2: Tensor) -> Tensor:
    r"""Compute $h = \mathrm{med}(d^2) / \log(M + 1)$ over the whole matrix with zero diagonal (authors' ELECTRA code).

    For an even count, the two middle values are averaged, as in TensorFlow's percentile with midpoints.

    Args:
        d2: squared distances [..., M, M].

    Returns:
        [...]
    """
    return _middle(d2.flatten(-2)) / math.log(d2.shape[-1] + 1)


def released_lower(d2: Tensor) -> Tensor:
    r"""Compute $h = \mathrm{med}(d^2) / \log(M + 1)$ with torch's lower median (the authors' early PyTorch code).

    For an even count `torch.median` takes the lower of the two middle values. Otherwise this equals `released`.

    Args:
        d2: squared distances [..., M, M].

    Returns:
        [...]
    """
    return d2.flatten(-2).median(dim=-1).values / math.log(d2.shape[-1] + 1)


NAMED: dict[str, Callable[[Tensor], Tensor]] = {
    "paper": paper,
    "released": released,
    "released-lower": released_lower,
}


def check(bandwidth: Bandwidth) -> Bandwidth:
    """Check a bandwidth setting; return a name or a callable unchanged, and a number as a float.

    Raises:
        RuleError: the bandwidth is neither a known name, a callable nor a positive number.
    """
    if callable(bandwidth):
        return bandwidth
    if isinstance(bandwidth, str):
        if bandwidth not in NAMED:
            hint = did_you_mean(bandwidth, NAMED)
            raise RuleError(f"bandwidth={bandwidth!r} is unknown; {hint}choose {sorted(NAMED)}, a number or a callable")
        return bandwidth
    try:
        number = math.nan if isinstance(bandwidth, bool) else float(bandwidth)  # also converts numpy and torch scalars
    except (TypeError, ValueError, RuntimeError):
        raise RuleError(f"bandwidth={bandwidth!r}: choose one of {sorted(NAMED)}, a number or a callable") from None
    if not (number > 0 and math.isfinite(number)):
        raise RuleError(f"bandwidth={bandwidth!r}: must be a positive number, the h of exp(-d2 / h)")
    return number


def resolve(bandwidth: Bandwidth, d2: Tensor, scale2: Tensor) -> Tensor:
    """Compute the bandwidth of each group.

    Args:
        bandwidth: a name, a number, or a callable from the squared distances of one group, [M, M], to its h.
        d2: squared distances [..., M, M].
        scale2: mean squared norm of the particles [...], for the lower bound of median bandwidths.

    Returns:
        h [...]; zero only where all particles are zero.
    """
    if isinstance(bandwidth, int | float):
        return torch.full_like(scale2, float(bandwidth))
    if d2.shape[-1] == 1:
        return torch.ones_like(scale2)  # one particle has no distance; any h gives the same update
    if callable(bandwidth):
        return _call_per_group(bandwidth, d2)
    h = NAMED[bandwidth](d2)
    return torch.maximum(h, FLOOR**2 * scale2)


def _call_per_group(bandwidth: Callable[[Tensor], Tensor | float], d2: Tensor) -> Tensor:
    """Call a user's bandwidth function once per group: it expects the distances of one group, and `d2` holds many."""
    values = []
    for group in d2.reshape(-1, *d2.shape[-2:]):
        h = torch.as_tensor(bandwidth(group), dtype=d2.dtype, device=d2.device)
        if h.numel() != 1:
            raise RuleError(f"bandwidth returned shape {list(h.shape)} for one group; it has to return one number, h")
        values.append(h.reshape(()))
    return torch.stack(values).reshape(d2.shape[:-2])


def _middle(values: Tensor) -> Tensor:
    """Compute the median over the last axis; for an even count, average the two middle values."""
    ordered = values.sort(dim=-1).values
    count = ordered.shape[-1]
    return (ordered[..., (count - 1) // 2] + ordered[..., count // 2]) / 2
