"""The settings of a handle: the arguments of `repel` that do not select heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Order = Literal["clip-repel", "repel-clip"]
NoisePlace = Literal["auto", "gradient", "parameter", "optimizer"]
ForcePlace = Literal["auto", "gradient", "step"]
ORDERS: tuple[str, ...] = get_args(Order)
NOISE_PLACES: tuple[str, ...] = get_args(NoisePlace)
FORCE_PLACES: tuple[str, ...] = get_args(ForcePlace)


@dataclass(frozen=True)
class Settings:
    """Settings of a handle; `repel` describes each one."""

    seed: int = 0
    order: Order = "clip-repel"
    max_norm: float | None = None
    noise_in: NoisePlace = "auto"
    measure_every: int = 50
    force_in: ForcePlace = "auto"
