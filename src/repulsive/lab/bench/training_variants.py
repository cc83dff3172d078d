"""Training variants: ways to train one model, plainly or with a rule, that are timed in alternation.

All variants share the model, its optimizer and the memory of both, so that their step times differ by the rule
alone. Each rule has a handle of its own, which is attached for the turns of its variant only.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from repulsive import Handle, repel
from repulsive.lab.bench.clock import synchronise, time_each
from repulsive.lab.bench.rules import Case
from repulsive.lab.bench.turns import TRAINING, TurnTimes
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.logits.renewal import is_renewed

LEARNING_RATE = 1e-4


class SharedModel:
    """The model that all variants train, with its optimizer.

    Args:
        model: a model of transformers in training mode, on its device.
        inputs: arguments of the model in every step, with labels.
        compiled: train through `torch.compile`.
        cuda_graphs: let the compiled model run as CUDA graphs.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Tensor], *, compiled: bool = False, cuda_graphs: bool = False
    ) -> None:
        self.model = model
        self.inputs = dict(inputs)
        self.is_compiled = compiled
        self._with_graphs = cuda_graphs
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=self.on_gpu)
        self.forward = self.compile() if compiled else model

    def compile(self) -> nn.Module:
        """Compile the model into graphs of its own, with the hooks that it has now."""
        return compile_apart(self.model, cuda_graphs=self._with_graphs)

    def step(self, forward: nn.Module, clip: Callable[[], None] | None = None) -> Tensor:
        """Take one training step through `forward`, and return its loss.

        Gradients are freed at the end of a step, so that every step finds the same free memory: gradients keep their
        addresses, also for a handle that was detached in between.
        """
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.on_gpu):
            loss: Tensor = forward(**self.inputs).loss
        loss.backward()
        if clip is not None:
            clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class TrainingVariant:
    """One way to train the shared model.

    A turn is a sequence of periods. A period has `act_every` steps, and the rule acts in the first of them; a plain
    step and a step of most rules is a period by itself. The first period of a turn measures. If the rule renews a force
    in some steps, the second period renews it; for this the step counter of the handle is set to the same step of a
    training at the start of every turn.

    A rule that reads tokens adds hooks to the model, and compiled graphs contain the hooks of the time of compilation.
    Therefore such a rule compiles the model again, with the same weights, and runs its own graph.

    Args:
        shared: the model and its optimizer.
        case: the rule to attach; None trains without `repel`.
        steps: smallest number of ordinary steps of a turn.
        max_norm: without a case: clip gradients to this norm.
    """

    def __init__(
        self, shared: SharedModel, case: Case | None = None, *, steps: int, max_norm: float | None = None
    ) -> None:
        self.shared = shared
        self.max_norm = max_norm if case is None else None  # otherwise the handle clips
        self.act_every: int = 1 if case is None else case.rule.act_every
        self.ordinary = -(-steps // self.act_every)  # ordinary periods of a turn
        self.forward = shared.forward
        self.handle: Handle | None = None
        self.start: int | None = None
        self.renewals = 0
        self.has_own_graph = False
        self.active = TRAINING  # steps of a training until a schedule switches the rule off
        if case is None:
            return
        self.active = _active_steps(case.rule, self.act_every)
        if isinstance(case.rule, SVGD) and case.rule.reads_tokens:
            self._plan_renewals(case.rule.every)
        if shared.is_compiled and case.rule.reads_tokens:
            self.forward, self.has_own_graph = shared.compile(), True
        self.handle = repel(
            self.forward,
            shared.optimizer,
            case.rule,
            measure_every=self.start or self.act_every * len(self.periods),  # in the first step of a turn
            max_norm=case.max_norm,
            noise_in=case.noise_in,
            verbose=False,
        )
        _detach(self.handle)

    def _plan_renewals(self, every: int | str) -> None:
        """Choose the step of a training that turns start with, so that they renew a force in their second period.

        A force that is renewed too often for this is renewed in ordinary periods, in as many as in a training.
        """
        self.start = first_step(every, self.ordinary, self.act_every)
        if self.start is not None:
            self.renewals = sum(is_renewed(step, every, self.act_every) for step in range(self.active))
        elif isinstance(every, int):
            cycle = math.lcm(every, self.act_every) // self.act_every  # periods from one renewal to the next
            self.ordinary = -(-self.ordinary // cycle) * cycle

    @property
    def periods(self) -> list[str]:
        """The kinds of periods of a turn, in order."""
        off = self.ordinary if self.active < TRAINING else 0
        return ["measuring", *["renewing"] * bool(self.renewals), *["ordinary"] * self.ordinary, *["off"] * off]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the rule for one turn, and set the step counter of a rule that renews its force."""
        if self.handle is None:
            yield
            return
        if self.start is not None:
            self.handle.steps = self.start
        self.handle.attach()
        try:
            yield
        finally:
            _detach(self.handle)

    def step(self) -> Tensor:
        """Take one training step and return its loss."""
        return self.shared.step(self.forward, None if self.max_norm is None else self.clip)

    def clip(self) -> None:
        """Clip all gradients, as a plain training loop does."""
        assert self.max_norm is not None
        torch.nn.utils.clip_grad_norm_(self.shared.model.parameters(), self.max_norm)

    def take_period(self, kind: str = "ordinary") -> None:
        """Take the steps of one period."""
        with self._switched_off() if kind == "off" else nullcontext():
            for _ in range(self.act_every):
                self.step()

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        """Go to a step that the rule leaves alone and that does not measure; the next turn finds the forces again."""
        assert self.handle is not None
        self.handle.steps = self.active + -self.active % self.handle.settings.measure_every + self.act_every
        logits = self.handle._logits
        if logits is None:
            yield
            return
        forces, logits.held = logits.held, {}
        logits.expect(self.handle.steps)  # otherwise a pass may be sampled for the step that is left out
        yield
        logits.held = forces

    def run_turn(self) -> TurnTimes:
        """Run one turn, and time it without attaching and detaching.

        On a GPU an untimed plain step comes first, so that the host is ahead of the device, if it is fast enough, as in
        a training that never waits for the device.
        """
        counts = Counter(self.periods)  # in the order of the periods
        synchronise(self.shared.device)
        if self.shared.on_gpu:
            self.shared.step(self.shared.forward)
        with self.attached():
            seconds = time_each(
                [partial(self._take, kind, count) for kind, count in counts.items()], self.shared.device
            )
        mean = {kind: time / (self.act_every * counts[kind]) for kind, time in zip(counts, seconds, strict=True)}
        return TurnTimes(
            mean["measuring"],
            mean["ordinary"],
            mean.get("renewing"),
            self.renewals,
            self.act_every,
            mean.get("off"),
            self.active,
        )

    def _take(self, kind: str, count: int) -> None:
        for _ in range(count):
            self.take_period(kind)


def _detach(handle: Handle) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="repulsion was attached, but the optimizer never took a step")
        handle.remove()


def compile_apart(model: nn.Module, *, cuda_graphs: bool = False) -> nn.Module:
    """Compile a model into graphs of its own, even if the same model has been compiled before.

    TorchDynamo looks up graphs by code and backend, and by default it does not check hooks of modules. A backend object
    of its own therefore makes it trace the model again, with the hooks of that time.

    Args:
        model: any model.
        cuda_graphs: record the compiled code in CUDA graphs, as torch.compile(mode="reduce-overhead") does.
    """
    from torch._dynamo import lookup_backend

    inductor: Callable[..., Any] = lookup_backend("inductor")
    settings = {"triton.cudagraphs": cuda_graphs}
    return cast(nn.Module, torch.compile(model, backend=partial(inductor, config_patches=settings)))


def first_step(every: int | str, ordinary: int, act_every: int = 1) -> int | None:
    """Find a step of a training that starts a turn: a period that does not renew, one that does, and ordinary ones.

    Args:
        every: setting of the rule, see `is_renewed`.
        ordinary: number of ordinary periods.
        act_every: steps of a period.

    Returns:
        The step, at least the number of steps of a turn; None if there is no such step in a training, because the force
        is renewed too often.
    """
    wanted = [False, True, *[False] * ordinary]
    for step in range(act_every * (ordinary + 2), TRAINING, act_every):
        if [is_renewed(step + act_every * place, every, act_every) for place in range(ordinary + 2)] == wanted:
            return step
    return None


def _active_steps(rule: Rule, act_every: int) -> int:
    """Count the steps of a training until a schedule switches a rule off for good; all of them for most rules."""
    last = max((step for step in range(0, TRAINING, act_every) if rule.acts(step)), default=0)
    return min(TRAINING, last + act_every)
