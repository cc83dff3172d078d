"""Twins: models with equal weights that train in turns, plain or with a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from repulsive import Handle, repel
from repulsive.lab.bench.clock import laps, synchronise
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.turns import TRAINING, Turn
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.logits.renewal import is_renewed
from repulsive.repulsion.settings import Settings

LEARNING_RATE = 1e-4


class Twin:
    """A model with its optimizer, trained plainly or with a rule.

    A turn starts with a step that measures. If the rule renews a force in some steps, the second step of a turn renews;
    for this the step counter of the handle is set to the same step of a training at the start of every turn.

    Args:
        model: a model of transformers in training mode, on its device.
        inputs: arguments of the model in every step, with labels.
        case: the rule to attach; None trains without `repel`.
        steps: ordinary steps of a turn.
        compiled: train through `torch.compile(model)`.
        max_norm: without a case: clip gradients to this norm.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        case: Case | None,
        *,
        steps: int,
        compiled: bool = False,
        max_norm: float | None = None,
    ) -> None:
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.is_compiled = compiled
        self.model = cast(nn.Module, torch.compile(model)) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=self.on_gpu)
        self.inputs = dict(inputs)
        self.steps = steps
        self.handle: Handle | None = None
        self.max_norm = max_norm if case is None else None  # otherwise the handle clips
        every = _every(case)
        self.start = None if every is None else first_step(every, steps)
        self.renewals = 0 if self.start is None else sum(is_renewed(step, every or 1) for step in range(TRAINING))
        if case is not None:
            # Without a start, the handle counts on, and measures in the first step of every turn.
            measure_every = steps + 1 if self.start is None else Settings().measure_every
            self.handle = repel(
                self.model,
                self.optimizer,
                case.rule,
                measure_every=measure_every,
                max_norm=case.max_norm,
                verbose=False,
            )

    @property
    def kinds(self) -> list[str]:
        """The kinds of steps of a turn, in order."""
        return ["measuring", *(["renewing"] if self.renewals else []), *["ordinary"] * self.steps]

    def step(self) -> Tensor:
        """Take one training step and return its loss.

        Gradients are freed at the end of a step, so a waiting twin holds none and every step finds the same free
        memory: gradients keep their addresses, as in a training that has the GPU to itself.
        """
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
            loss: Tensor = self.model(**self.inputs).loss
        loss.backward()
        if self.max_norm is not None:
            self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def clip(self) -> None:
        """Clip all gradients, as a plain training loop does."""
        assert self.max_norm is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def begin_turn(self) -> None:
        """Set the step counter of a rule that renews its force."""
        if self.handle is not None and self.start is not None:
            self.handle.steps = self.start
            assert self.handle._logits is not None
            self.handle._logits.expect(self.start)

    def turn(self) -> Turn:
        """Take the steps of a turn, and time them."""
        self.begin_turn()
        parts = [self.step] * (len(self.kinds) - self.steps)
        measuring, *renewing, others = laps([*parts, self._take_ordinary_steps], self.device)
        return Turn(measuring, others / self.steps, renewing[0] if renewing else None, self.renewals)

    def _take_ordinary_steps(self) -> None:
        for _ in range(self.steps):
            self.step()


def first_step(every: int | str, steps: int) -> int | None:
    """Find a step of a training that measures without renewing, before one that renews and `steps` ordinary ones.

    Args:
        every: setting of the rule, see `is_renewed`.
        steps: number of ordinary steps.

    Returns:
        The step, or None if there is no such step in a training, because the force is renewed too often.
    """
    period = Settings().measure_every
    for step in range(period, TRAINING, period):
        renewed = [is_renewed(step + shift, every) for shift in range(steps + 2)]
        if renewed == [False, True, *[False] * steps] and steps + 2 <= period:
            return step
    return None


def _every(case: Case | None) -> int | str | None:
    rule = None if case is None else case.rule
    return rule.every if isinstance(rule, SVGD) and rule.reads_tokens else None


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
