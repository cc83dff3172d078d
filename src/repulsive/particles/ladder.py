r"""The ladder from a cosine regularizer to SVGD in three steps ("rungs"): appendix C.6 of the paper.

The appendix prints rung 1 with the sign that *attracts*; here every rung reduces the similarity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles.svgd import SVGD

Rung = Literal["regulariser", "derivative", "smoothing"]
RUNGS: tuple[str, ...] = get_args(Rung)


@dataclass(frozen=True)
class CosineLadder(SVGD):
    r"""Repulsion by the cosine similarity between the weights of heads, as one of the ladder's three rungs.

    | rung | direction $\phi_i$ |
    | --- | --- |
    | "regulariser" | $-\nabla U_i - \alpha\,\nabla_{\theta_i} \frac1M \sum_j \cos(\theta_i, \theta_j)$ |
    | "derivative" | $-\nabla U_i + \alpha\,\frac1M \sum_j \nabla_{\theta_j} \cos(\theta_i, \theta_j)$ |
    | "smoothing" | $\frac1M \sum_j [-\cos_{ij} \nabla U_j + \alpha\,\nabla_{\theta_j} \cos(\theta_i, \theta_j)]$ |

    With `space="logits"` the rung "regulariser" uses the cosines between the logits of heads instead.

    Args:
        rung: one of the three names above.

    Raises:
        RuleError: the rung is unknown, or a kernel, smoothing or space is given that the rung does not allow.
    """

    rung: Rung = field(default="regulariser", kw_only=True)

    def __post_init__(self) -> None:
        if self.rung not in RUNGS:
            raise RuleError(f"CosineLadder(rung={self.rung!r}): choose one of {RUNGS}")
        # -grad_i cos is tangential to the sphere, so the regularizer equals the cosine kernel's force on the sphere.
        space = "sphere" if self.rung == "regulariser" else "weights"
        if self.kernel not in ("rbf", "cosine") or self.smoothing not in (None, float(self.space != "logits")):
            raise RuleError("CosineLadder sets kernel and smoothing itself; leave them out")
        if isinstance(self.stepsize, str) or self.act_every != 1:
            raise RuleError("CosineLadder acts in every step with a stepsize that is a number; leave act_every out")
        if self.space == "logits" and self.rung == "regulariser":
            space = "logits"
        elif self.space not in ("weights", space):
            raise RuleError(f"CosineLadder(rung={self.rung!r}) acts in space={space!r}; leave space out")
        object.__setattr__(self, "kernel", "cosine")
        object.__setattr__(self, "space", space)
        super().__post_init__()

    def drive(self, values: Tensor) -> Tensor:
        if self.rung == "smoothing":
            return super().drive(values)
        eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        return float(self.stepsize) * eye.expand_as(values)
