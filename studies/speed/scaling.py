"""Estimate the cost of repulsion on several machines: bytes sent and time. Prints the table of docs/scaling.md.

    python -m studies.speed.scaling

These are formulas, not measurements. Two inputs were measured on one H200 (results/bench): a copy moves 4.18 TB/s, and
at width 4,096 with 8 heads the fused update takes 1.8 times as long as four passes at that rate. All others are
assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from repulsive.safety.markdown import format_table

COPY = 4.18e12  # bytes/s, measured
FUSED = 4 * 1.8  # passes over the weights: four in theory, times the measured factor
PLAIN = 33  # passes of the implementation in plain torch (REPULSIVE_KERNELS=eager), counted from its operators
MOVE = 6  # passes for each share that an all-to-all moves: stack, cut and join, a read and a write each
NUMBER = 4  # bytes: FSDP2 keeps float32 shards in any compute precision
PRODUCT = 8  # bytes: products are float64

# Assumptions.
INSIDE, BETWEEN = 300e9, 40e9  # bytes/s of a GPU within its node (NVLink) and to others (400 Gb/s card per GPU)
NODE = 8  # GPUs
HOP = 10e-6  # s per message of an all-reduce, which has 2 log2(n) of them
PEER = 2e-6  # s per message of an all-to-all, which has n - 1 of them
TOKENS = 8192  # per GPU and step
FLOPS = 0.4 * 989e12  # bf16, at 40 % of the peak
HELD = 2**28  # bytes of weights and gradients in one all-to-all, as in repulsion/backends/eager.py


TITLES = (
    *("model", "GPUs", "columns: sent", "wire", "update", "of a step"),
    *("rows: sent", "wire", "update", "of a step", "rows, smoothing 0: sent", "of a step"),
)


@dataclass(frozen=True)
class Model:
    """A decoder of Llama's shape; heads repel in q, k and v."""

    name: str
    parameters: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    fewest: int  # GPUs that can hold weights, gradients and Adam's state, 16 bytes per parameter

    @property
    def numbers(self) -> int:
        """Number of weights of all heads."""
        return self.layers * self.width * self.head * (self.heads + 2 * self.kv_heads)

    @property
    def groups(self) -> dict[int, int]:
        """Number of heads -> number of groups with that many."""
        found = {self.heads: self.layers}
        found[self.kv_heads] = found.get(self.kv_heads, 0) + 2 * self.layers
        return found

    @property
    def products(self) -> int:
        """Bytes of all products, sum of groups * (M + 1) (M + 2) / 2 * 8."""
        return sum(count * (heads + 1) * (heads + 2) // 2 * PRODUCT for heads, count in self.groups.items())


MODELS = (
    Model("7B", 6.7e9, 32, 4096, 32, 32, 128, fewest=8),
    Model("70B", 69e9, 80, 8192, 64, 8, 128, fewest=32),
)


@dataclass(frozen=True)
class Cost:
    """Cost of one step on one of n GPUs: bytes sent, seconds of communication and of computation."""

    sent: float
    wire: float
    local: float

    @property
    def total(self) -> float:
        return self.wire + self.local


def columns(model: Model, gpus: int, passes: float) -> Cost:
    """Weights sharded by columns: every rank has a part of every head; one all-reduce."""
    sent = model.products * 2 * (gpus - 1) / gpus
    latency = 2 * math.log2(gpus) * HOP
    return Cost(sent, latency + sent / bandwidth(gpus), local(model, gpus, passes))


def rows(model: Model, gpus: int, passes: float, shares: int) -> Cost:
    """Weights sharded by rows, FSDP2's default: also an all-to-all, and one back.

    Args:
        model: the model.
        gpus: number of GPUs.
        passes: passes of the update itself.
        shares: 3 if weights and gradients are moved and gradients back; 2 if gradients stay on their ranks.
    """
    share = model.numbers * NUMBER / gpus
    sent = shares * share * (gpus - 1) / gpus
    batches = math.ceil(2 * share / HELD)
    latency = batches * (2 * (gpus - 1) * PEER + 2 * math.log2(gpus) * HOP)
    products = columns(model, gpus, passes).sent
    wire = latency + (sent + products) / bandwidth(gpus)
    return Cost(sent + products, wire, local(model, gpus, passes + shares * MOVE))


def local(model: Model, gpus: int, passes: float) -> float:
    """Seconds of the update itself, on one rank's share."""
    return passes * model.numbers * NUMBER / gpus / COPY


def bandwidth(gpus: int) -> float:
    return INSIDE if gpus <= NODE else BETWEEN


def step(model: Model) -> float:
    """Seconds of forward and backward: 6 operations per parameter and token."""
    return 6 * model.parameters * TOKENS / FLOPS


def table() -> str:
    """Format the table, one row for each model and number of GPUs."""
    lines = []
    for model in MODELS:
        for gpus in (8, 32, 128, 512):
            if gpus < model.fewest:
                continue
            fused = columns(model, gpus, FUSED)
            moved, kept = (rows(model, gpus, FUSED, shares) for shares in (3, 2))
            cells = [model.name, str(gpus), size(fused.sent), ms(fused.wire), ms(fused.local), share(fused, model)]
            cells += [size(moved.sent), ms(moved.wire), ms(moved.local), share(moved, model)]
            cells += [size(kept.sent), share(kept, model)]
            lines.append(cells)
    return format_table(TITLES, lines)


def size(count: float) -> str:
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= u)
    return f"{count / unit:.1f} {name}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


def share(cost: Cost, model: Model) -> str:
    return f"{100 * cost.total / step(model):.2g} %"


if __name__ == "__main__":
    print(table())
