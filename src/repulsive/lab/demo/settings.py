"""Settings of the demo. They were fixed before it was run: nothing here was chosen by the effect of repulsion."""

from __future__ import annotations

import math
from dataclasses import dataclass

from repulsive.lab.demo.text import VOCABULARY
from repulsive.lab.systems.lm.model import DecoderConfig
from repulsive.particles.named import RuleName

RULE: RuleName = "logits"  # of the repelled models, as in `repel(model, optimizer, "logits")`
PLAIN, REPELLED, REGULARIZED = "plain", "repelled", "regularizer"
ARMS = (PLAIN, REPELLED, REGULARIZED)  # the ways of training that are compared
SEEDS = 5
PENALTY = 1.0  # weight of the disagreement regularizer, as in the recipes `*/disagreement`
BETAS = (0.9, 0.95)
DECAY = 0.1  # weight decay, of matrices only
CLIP = 1.0
FINAL = 0.1  # learning rate at the end, relative to the largest


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the training, the same for every run.

    Args:
        steps: optimizer steps.
        layers: layers of the model.
        heads: heads of a layer.
        width: size of a token's state.
        length: bytes of a window.
        batch: windows per step.
        lr: largest learning rate.
        warmup: steps of linear warm-up.
        measurements: number of measurements during training, evenly spaced.
        rule: name of the rule of the repelled models.
    """

    steps: int = 500
    layers: int = 2
    heads: int = 4
    width: int = 64
    length: int = 128
    batch: int = 8
    lr: float = 4e-3
    warmup: int = 50
    measurements: int = 20
    rule: RuleName = RULE

    @property
    def model(self) -> DecoderConfig:
        """Configuration of the language model."""
        return DecoderConfig(VOCABULARY, self.length, layers=self.layers, width=self.width, heads=self.heads)

    def rate(self, step: int) -> float:
        """Compute the learning rate of a step relative to the largest: linear warm-up, then cosine decay."""
        warmup = min(self.warmup, self.steps // 4)
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - 1 - warmup)
        return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * min(1.0, done))) / 2

    @property
    def measured(self) -> list[int]:
        """Steps after which the model is measured, counted from 1. The last step is one of them."""
        count = min(self.measurements, self.steps)
        return [self.steps * (i + 1) // count for i in range(count)]
