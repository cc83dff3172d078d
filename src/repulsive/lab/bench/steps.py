"""Step time of the paper's Transformer-small: plain, with repulsion (ours and as released), with a regularizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from repulsive import SVGD, Handle, find_heads, repel
from repulsive.heads.layout import HeadGroup
from repulsive.lab.bench.clock import interleaved, synchronise, wall_time
from repulsive.lab.systems.translation.model import Transformer, TransformerConfig
from repulsive.regularizers import frobenius, on_outputs

VOCABULARY = 10_000
LENGTH = 32
RULE = SVGD(stepsize=0.1, alpha=0.01)
LAYERS: dict[str, Literal["first", "all"]] = {"first layer": "first", "all layers": "all"}
COLLECT = {"disagreement": "outputs", "Frobenius": "weights"}  # regularizer -> tensors that it needs from attention
VARIANTS = ("MA", *LAYERS, "one projection at a time", *COLLECT)
NEVER = 10**9


@dataclass(frozen=True)
class Options:
    """Options of the measurement: device, batch sizes, variants and rounds.

    Args:
        device: "cpu" or "cuda".
        tokens: target tokens per step, one table column each.
        variants: some of `VARIANTS`; "MA" is always measured.
        compiled: compile the loss with torch.compile, once for all sizes, with a dynamic number of sentences.
        rounds: counted steps of MA and of repulsion; other variants, whose cost is large, take a tenth.
    """

    device: str = "cpu"
    tokens: Sequence[int] = (2048,)
    variants: Sequence[str] = VARIANTS
    compiled: bool = False
    rounds: int = 12

    def rounds_of(self, variant: str) -> int:
        is_cheap = variant == "MA" or variant in LAYERS
        return self.rounds if is_cheap else min(self.rounds, max(5, self.rounds // 10))


class Workload:
    """A model, its optimizer and a batch of each size; each variant adds work to the loss or to the optimizer step."""

    def __init__(self, options: Options, config: TransformerConfig | None = None) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        self.options = options
        self.model = Transformer(config or TransformerConfig.small(VOCABULARY, dropout=0.1)).to(self.device)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=fused)
        self.batches: dict[int, Tensor] = {}
        for tokens in options.tokens:
            size = (tokens // LENGTH, LENGTH + 1)
            self.batches[tokens] = torch.randint(1, VOCABULARY, size, device=self.device)
            if options.compiled and len(options.tokens) > 1:
                torch._dynamo.maybe_mark_dynamic(self.batches[tokens], 0)  # type: ignore[no-untyped-call]
        self._losses: dict[str | None, Callable[[Tensor], Tensor]] = {}
        self._handles: dict[str, Handle] = {}
        self._groups = find_heads(self.model)

    def step(self, variant: str, tokens: int) -> None:
        self.optimizer.zero_grad()
        self.loss(variant)(self.batches[tokens]).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def time(self, variant: str, tokens: int) -> float:
        """Measure the seconds of one step."""
        with self.attached(variant):
            return wall_time(lambda: self.step(variant, tokens), self.device)

    def warm_up(self, variant: str, tokens: int) -> None:
        """Take steps that compile the loss, lay out the update and capture its graph, as once in a training."""
        with self.attached(variant):
            for _ in range(4):
                self.step(variant, tokens)
        synchronise(self.device)

    @contextmanager
    def attached(self, variant: str) -> Iterator[None]:
        """Attach the repulsion of a variant for the length of a `with` block; its layout is kept between blocks."""
        with ExitStack() as after:
            if variant == "one projection at a time":
                hook = self.optimizer.register_step_pre_hook(lambda *_: one_at_a_time(self._groups))
                after.callback(hook.remove)
            elif variant in LAYERS:
                handle = self._handle(variant)
                handle.attach()
                after.callback(handle.remove)
            yield

    def _handle(self, variant: str) -> Handle:
        """Return a variant's handle, set to never measure its groups: by default 49 of 50 steps do not measure."""
        if variant not in self._handles:
            self._handles[variant] = repel(
                self.model, self.optimizer, RULE, layers=LAYERS[variant], measure_every=NEVER, verbose=False
            )
            self._handles[variant].steps = 1
        return self._handles[variant]

    def inside(self, variant: str, tokens: int, steps: int = 30) -> dict[str, float]:
        """Measure the seconds of the hook of `repel` inside training steps; see `time_inside`."""
        step = partial(self.step, variant, tokens)
        return time_inside(self.optimizer, self.attached(variant), step, self.device, steps)

    def loss(self, variant: str) -> Callable[[Tensor], Tensor]:
        """Return the loss function of a variant; variants without a regularizer share one compiled function."""
        collect = COLLECT.get(variant)
        if collect not in self._losses:
            function = lambda batch: self._compute(collect, batch)  # noqa: E731
            self._losses[collect] = torch.compile(function) if self.options.compiled else function
        return self._losses[collect]

    def _compute(self, collect: str | None, batch: Tensor) -> Tensor:
        half = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")
        with half:
            output = self.model(batch, batch[:, :-1], collect)
        logits, collected = output if collect else (output, [])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), label_smoothing=0.1)
        if collect == "outputs":
            loss = loss + torch.stack([on_outputs(x) for x in collected]).mean()
        elif collect == "weights":  # [B, M, T, S] -> heads over words for every query
            loss = loss + torch.stack([frobenius(x.transpose(1, 2)) for x in collected]).mean()
        return loss


def time_inside(
    optimizer: torch.optim.Optimizer,
    attached: AbstractContextManager[object],
    step: Callable[[], object],
    device: torch.device,
    steps: int = 30,
) -> dict[str, float]:
    """Time the hooks of an optimizer inside training steps: host seconds and, on a GPU, device seconds.

    Device seconds are between events before and after the hooks, and include waiting for a slower host.

    Args:
        optimizer: the optimizer, without the hooks.
        attached: context manager that registers the hooks for the length of a `with` block.
        step: function that takes one training step.
        device: device of the model.
        steps: number of steps; the median counts.
    """
    spent: list[float] = []
    events: list[torch.cuda.Event] = []
    on_gpu = device.type == "cuda"

    def mark(*_: Any) -> None:
        if on_gpu:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    def start(*_: Any) -> None:
        mark()
        spent.append(time.perf_counter())

    def stop(*_: Any) -> None:
        spent[-1] = time.perf_counter() - spent[-1]
        mark()

    with ExitStack() as after:  # hooks run in the order of their registration
        after.callback(optimizer.register_step_pre_hook(start).remove)
        after.enter_context(attached)
        after.callback(optimizer.register_step_pre_hook(stop).remove)
        for _ in range(steps):
            step()
    synchronise(device)
    seconds = {"host_seconds": statistics.median(spent)}
    if on_gpu:
        times = [a.elapsed_time(b) / 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
        seconds["device_seconds"] = statistics.median(times)
    return seconds


def one_at_a_time(groups: Sequence[HeadGroup]) -> None:
    """Apply the rule as the released code does: one projection after the other."""
    for group in groups:
        part = group.slices[0]
        grad = part.parameter().grad
        assert grad is not None
        part.put(grad, RULE.gradient(part.take(part.parameter().detach()), part.take(grad)))


def measure_steps(
    work: Workload, tokens: int, variants: Sequence[str], progress: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Measure one batch size: variant -> seconds, ratio and its interval, and time of repulsion inside a step."""
    chosen = ["MA", *(name for name in variants if name != "MA")]
    for name in chosen:
        started = time.perf_counter()
        work.warm_up(name, tokens)
        progress(f"{tokens} tokens, {name}: warmed up in {time.perf_counter() - started:.1f} s")
    rounds = {name: work.options.rounds_of(name) for name in chosen}
    rounds["MA"] = max([rounds[name] for name in chosen[1:]] or [rounds["MA"]])
    started = time.perf_counter()
    ratios = interleaved({name: partial(work.time, name, tokens) for name in chosen}, rounds, baseline="MA")
    rows = {name: asdict(ratio) for name, ratio in ratios.items()}
    for name in chosen:
        if name in LAYERS:
            rows[name] |= work.inside(name, tokens, min(30, 3 * work.options.rounds))
    progress(f"{tokens} tokens: timed in {time.perf_counter() - started:.1f} s")
    return rows
