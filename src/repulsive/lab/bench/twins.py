"""Twins: models with equal weights that train in turns, plain or with a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from repulsive import Handle, repel
from repulsive.lab.bench.clock import laps, synchronise
from repulsive.lab.bench.turns import Turn
from repulsive.particles.rule import Rule

LEARNING_RATE = 1e-4


class Twin:
    """A model with its optimizer, trained plainly or with a rule.

    Args:
        model: a model of transformers in training mode, on its device.
        inputs: arguments of the model in every step, with labels.
        rule: the rule to attach; None trains without `repel`.
        steps: ordinary steps of a turn, besides the measuring one.
        compiled: train through `torch.compile(model)`.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Tensor], rule: Rule | None, *, steps: int, compiled: bool = False
    ) -> None:
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.model = cast(nn.Module, torch.compile(model)) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=self.on_gpu)
        self.inputs = dict(inputs)
        self.steps = steps
        self.handle: Handle | None = None
        if rule is not None:
            # The handle measures in the first step of every turn.
            self.handle = repel(self.model, self.optimizer, rule, measure_every=steps + 1, verbose=False)

    def step(self) -> Tensor:
        """Take one training step and return its loss.

        Gradients are freed at the end of a step, so a waiting twin holds none and every step finds the same free
        memory: gradients keep their addresses, as in a training that has the GPU to itself.
        """
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
            loss: Tensor = self.model(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def turn(self) -> Turn:
        """Take one measuring step and `steps` ordinary ones, and time them."""
        measuring, others = laps([self.step, self._take_ordinary_steps], self.device)
        return Turn(measuring, others / self.steps)

    def _take_ordinary_steps(self) -> None:
        for _ in range(self.steps):
            self.step()


def warmed_up(make: Callable[[], Twin], turns: int, device: torch.device) -> tuple[Twin, int | None]:
    """Build a twin and take turns that are not counted, which compile, launch and lay out the update.

    Returns:
        The twin, and the peak of its additional GPU memory in bytes; None on a CPU.
    """
    if device.type != "cuda":
        twin = make()
        for _ in range(turns):
            twin.turn()
        return twin, None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    twin = make()
    for _ in range(turns):
        twin.turn()
    return twin, torch.cuda.max_memory_allocated() - before
