r"""From a regulariser to the framework in three rungs: appendix C.6 of the paper.

The appendix prints rung 1 with the sign that *attracts*; here signs follow what they do to the similarity.
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
    r"""Cosine similarity between heads' weights, adapted step by step.

    | rung | direction $\phi_i$ |
    | --- | --- |
    | "regulariser" | $-\nabla U_i - \alpha\,\nabla_{\theta_i} \frac1M \sum_j \cos(\theta_i, \theta_j)$ |
    | "derivative" | $-\nabla U_i + \alpha\,\frac1M \sum_j \nabla_{\theta_j} \cos(\theta_i, \theta_j)$ |
    | "smoothing" | $\frac1M \sum_j [-\cos_{ij} \nabla U_j + \alpha\,\nabla_{\theta_j} \cos(\theta_i, \theta_j)]$ |

    Rung "regulariser" may act between logits, `space="logits"`: the mean cosine of a head's logits with the others'.

    Args:
        rung: one of the three names above.

    Raises:
        RuleError: an unknown rung, or another kernel or space than the ladder's own.
    """

    rung: Rung = field(default="regulariser", kw_only=True)

    def __post_init__(self) -> None:
        if self.rung not in RUNGS:
            raise RuleError(f"CosineLadder(rung={self.rung!r}): choose one of {RUNGS}")
        # -grad_i cos lies along the sphere: the regulariser is the cosine kernel's force there.
        space = "sphere" if self.rung == "regulariser" else "weights"
        if self.kernel not in ("rbf", "cosine") or self.smoothing not in (None, float(self.space != "logits")):
            raise RuleError("CosineLadder sets kernel and smoothing itself; leave them out")
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
        return self.stepsize * eye.expand_as(values)
