"""What repulsion costs past one machine: bytes on the wire and time, by formula. Prints the table of docs/scaling.md.

    python -m studies.speed.scaling

Nothing is measured here. Measured elsewhere, on one H200 (results/bench): a copy moves 4.18 TB/s, and at width 4,096,
with 8 heads, the fused update takes 1.8 times what four passes at that speed would take. All else is an assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COPY = 4.18e12  # bytes/s, measured
FUSED = 4 * 1.8  # passes over weights of the fused update: four, and its measured distance from that floor
PLAIN = 33  # passes of the reference in plain torch, counted from its operators; sharded weights take it today
NUMBER = 4  # bytes: FSDP2 keeps float32 shards, whatever it computes in
PRODUCT = 8  # bytes: products are float64

# Assumptions.
INSIDE, BETWEEN = 300e9, 40e9  # bytes/s a GPU sends to others of its node (NVLink) and beyond (one 400 Gb/s card each)
NODE = 8  # GPUs
HOP = 10e-6  # s, one message of an all-reduce, which takes 2 log2(n) of them
PEER = 2e-6  # s, one message of an all-to-all, which takes n - 1 of them
TOKENS = 8192  # per GPU and step
FLOPS = 0.4 * 989e12  # bf16, at 40 % of the peak
HELD = 2**28  # bytes of weights and gradients in one all-to-all, as in repulsion/backends/eager.py


@dataclass(frozen=True)
class Model:
    """A decoder of Llama's shape: q, k and v are its weights of heads."""

    name: str
    parameters: float
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    fewest: int  # GPUs that hold weights, gradients and Adam's state, 16 bytes a parameter

    @property
    def numbers(self) -> int:
        """Weights of all heads."""
        return self.layers * self.width * self.head * (self.heads + 2 * self.kv_heads)

    @property
    def groups(self) -> dict[int, int]:
        """Number of heads -> groups of so many: one batch, one all-reduce each."""
        found = {self.heads: self.layers}
        found[self.kv_heads] = found.get(self.kv_heads, 0) + 2 * self.layers
        return found

    @property
    def products(self) -> int:
        """Bytes of all products, sum of groups * (M + 1)^2 * 8."""
        return sum(count * (heads + 1) ** 2 * PRODUCT for heads, count in self.groups.items())


MODELS = (
    Model("7B", 6.7e9, 32, 4096, 32, 32, 128, fewest=8),
    Model("70B", 69e9, 80, 8192, 64, 8, 128, fewest=32),
)


@dataclass(frozen=True)
class Cost:
    """One step on one of n GPUs: bytes sent, seconds."""

    sent: float
    wire: float
    local: float

    @property
    def total(self) -> float:
        return self.wire + self.local


def columns(model: Model, gpus: int, passes: float) -> Cost:
    """Every rank has a piece of every head: one all-reduce of products for each number of heads."""
    sent = model.products * 2 * (gpus - 1) / gpus
    latency = len(model.groups) * 2 * math.log2(gpus) * HOP
    return Cost(sent, latency + sent / bandwidth(gpus), local(model, gpus, passes))


def rows(model: Model, gpus: int, passes: float) -> Cost:
    """FSDP2's default: also an all-to-all of weights and gradients, and one of gradients back, in bunches."""
    share = model.numbers * NUMBER / gpus
    sent = 3 * share * (gpus - 1) / gpus
    bunches = max(len(model.groups), math.ceil(2 * share / HELD))
    latency = bunches * (2 * (gpus - 1) * PEER + 2 * math.log2(gpus) * HOP)
    products = columns(model, gpus, passes).sent
    return Cost(sent + products, latency + (sent + products) / bandwidth(gpus), local(model, gpus, passes))


def local(model: Model, gpus: int, passes: float) -> float:
    """Seconds of the update itself, on this rank's share."""
    return passes * model.numbers * NUMBER / gpus / COPY


def bandwidth(gpus: int) -> float:
    return INSIDE if gpus <= NODE else BETWEEN


def step(model: Model) -> float:
    """Seconds of forward and backward: 6 operations per parameter and token."""
    return 6 * model.parameters * TOKENS / FLOPS


def table() -> str:
    """Markdown, one line per model and number of GPUs."""
    titles = "model, GPUs, columns: sent, wire, fused update, plain update, of a step, rows: sent, wire, of a step"
    lines = [f"| {titles.replace(', ', ' | ')} |", 10 * "| --- " + "|"]
    for model in MODELS:
        for gpus in (8, 32, 128, 512):
            if gpus < model.fewest:
                continue
            fused, plain, moved = columns(model, gpus, FUSED), columns(model, gpus, PLAIN), rows(model, gpus, PLAIN)
            cells = [model.name, str(gpus), size(fused.sent), ms(fused.wire), ms(fused.local), ms(plain.local)]
            cells += [f"{share(fused, model)} to {share(plain, model)}"]
            cells += [size(moved.sent), ms(moved.wire), share(moved, model)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def size(count: float) -> str:
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= u)
    return f"{count / unit:.1f} {name}"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"


def share(cost: Cost, model: Model) -> str:
    return f"{100 * cost.total / step(model):.2g} %"


if __name__ == "__main__":
    print(table())
