"""Settings of the logits study: the size of a model, what an arm adds to plain training, and one run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Shape of a model and of its training.

    Args:
        layers, heads, width: of the decoder; the feed-forward block is 8/3 of the width.
        batch, length: sequences per step, bytes per sequence.
        steps: optimizer steps of a run without `extra`.
        sequences, positions: the force is computed from `positions` tokens of each of `sequences` sequences.
        kv_heads: number of key-value heads; 0 for as many as query heads.
        tied: use the embedding as the output matrix, too.
    """

    layers: int
    heads: int
    width: int
    batch: int
    length: int
    steps: int
    sequences: int = 8
    positions: int = 64
    kv_heads: int = 0
    warmup: int = 100
    tied: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def keys(self) -> int:
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        return (8 * self.width // 3 + 31) // 32 * 32


@dataclass(frozen=True)
class Arm:
    """What a run adds to plain training.

    Args:
        name: row of the table.
        qk: weight of the mean cosine between logit functions; negative attracts.
        ov: the same for value-output circuits.
        ratio: instead of a fixed weight, hold |force| / |gradient| of q and k at this value (sign as `qk`).
        centred: subtract the mean key of a sequence, to which softmax is invariant.
        partner: "own" layer, "next" layer (the wrong partner), or "noise": a random force of the same norm.
        pairs: which pairs count: "all", "positive" (cosine > 0), "near" (cosine > 0.5), "rbf" (kernel weights).
        rotated: compare logits after RoPE, at distances drawn from the data, not at distance 0.
        parts: projections that receive the force.
        layers: "all", "first" half, "last" half.
        phase: share of training in which the force acts, (from, to).
        every: steps for which a force is reused before it is computed again.
        qk_rate, qk_decay: factors on learning rate and weight decay of q and k.
        rate_phase: share of training in which `qk_rate` holds, (from, to).
        qk_scale: factor on the initial q and k.
        decay: weight decay.
        norm: RMSNorm on each head's q and k.
        drop: DropHead probability.
        extra: additional steps, as a share of the steps.
    """

    name: str
    qk: float = 0.0
    ov: float = 0.0
    ratio: float = 0.0
    centred: bool = True
    partner: str = "own"
    pairs: str = "all"
    rotated: bool = False
    parts: str = "qk"
    layers: str = "all"
    phase: tuple[float, float] = (0.0, 1.0)
    every: int = 1
    qk_rate: float = 1.0
    rate_phase: tuple[float, float] = (0.0, 1.0)
    qk_decay: float = 1.0
    qk_scale: float = 1.0
    decay: float = 0.1
    norm: bool = False
    drop: float = 0.0
    extra: float = 0.0


@dataclass(frozen=True)
class Run:
    """One model of a wave."""

    arm: Arm
    rate: float
    seed: int
