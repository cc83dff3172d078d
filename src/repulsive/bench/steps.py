"""Step time of the paper's Transformer-small: plain, repulsive, regularised, and repulsive as in the released code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from repulsive import SVGD, Handle, find_heads, repel
from repulsive.bench.clock import copy_rate, interleaved, median_time, wall
from repulsive.heads.layout import HeadGroup
from repulsive.models.transformer import Transformer, TransformerConfig
from repulsive.regularizers import frobenius, on_outputs
from repulsive.repulsion.update import Update

VOCABULARY = 10_000
LENGTH = 32
RULE = SVGD(stepsize=0.1, alpha=0.01)
VARIANTS = ("MA", "first layer", "all layers", "one projection at a time", "disagreement", "Frobenius")


@dataclass(frozen=True)
class Options:
    """What to measure, and how.

    Args:
        device: "cpu" or "cuda".
        tokens: target tokens a step, one table column each.
        variants: which of `VARIANTS`; "MA" is always there.
        compiled: compile the loss with torch.compile.
        rounds: rounds of interleaved timing.
        steps: steps timed together in a round.
    """

    device: str = "cpu"
    tokens: Sequence[int] = (2048,)
    variants: Sequence[str] = VARIANTS
    compiled: bool = False
    rounds: int = 12
    steps: int = 1


class Workload:
    """One model, one optimiser, one batch; a variant changes what is added to the loss or to the step."""

    def __init__(self, options: Options, tokens: int) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        self.options = options
        self.model = Transformer(TransformerConfig.small(VOCABULARY, dropout=0.1)).to(self.device)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=fused)
        size = (tokens // LENGTH, LENGTH + 1)
        self.batch = torch.randint(1, VOCABULARY, size, device=self.device)
        self._losses: dict[str, Callable[[], Tensor]] = {}
        self._handles: dict[str, Handle] = {}
        self._groups = find_heads(self.model)

    def step(self, variant: str) -> None:
        self.optimizer.zero_grad()
        self._loss(variant)().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def time(self, variant: str) -> float:
        """Seconds a step, after one that does not count."""
        with self._attached(variant):
            self.step(variant)
            return wall(lambda: self.step(variant), self.device, self.options.steps)

    def warm_up(self, variant: str) -> None:
        """Compile the loss, lay out the update, capture its graph: what happens once in a training."""
        with self._attached(variant):
            for _ in range(3):
                self.step(variant)

    @contextmanager
    def _attached(self, variant: str) -> Iterator[None]:
        """Repulsion of a variant for the length of a `with` block; its layout is kept from one block to the next."""
        if variant == "one projection at a time":
            hook = self.optimizer.register_step_pre_hook(lambda *_: one_at_a_time(self._groups))
            yield
            hook.remove()
        elif variant in ("first layer", "all layers"):
            layers = "first" if variant == "first layer" else "all"
            if variant not in self._handles:
                self._handles[variant] = repel(self.model, self.optimizer, RULE, layers=layers, verbose=False)
            handle = self._handles[variant]
            handle.attach()
            handle.steps = 1  # steps that are not measured, as 49 of 50 are
            yield
            handle.remove()
        else:
            yield

    def _loss(self, variant: str) -> Callable[[], Tensor]:
        """The loss function a variant needs; variants without a penalty share one, and its compilation."""
        collect = {"disagreement": "outputs", "Frobenius": "weights"}.get(variant)
        key = collect or "plain"
        if key not in self._losses:
            function = lambda: self._compute(collect)  # noqa: E731
            self._losses[key] = torch.compile(function) if self.options.compiled else function
        return self._losses[key]

    def _compute(self, collect: str | None) -> Tensor:
        half = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")
        with half:
            found = self.model(self.batch, self.batch[:, :-1], collect)
        logits, seen = found if collect else (found, [])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten(), label_smoothing=0.1)
        if collect == "outputs":
            loss = loss + torch.stack([on_outputs(x) for x in seen]).mean()
        elif collect == "weights":  # [B, M, T, S] -> heads over words for every query
            loss = loss + torch.stack([frobenius(x.transpose(1, 2)) for x in seen]).mean()
        return loss


def one_at_a_time(groups: Sequence[HeadGroup]) -> None:
    """The rule as the released code applies it: a separate kernel, median and product for every projection."""
    for group in groups:
        part = group.slices[0]
        grad = part.parameter().grad
        assert grad is not None
        part.put(grad, RULE.gradient(part.take(part.parameter().detach()), part.take(grad)))


def measure_steps(options: Options, tokens: int, progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Step times of one batch size: variant -> seconds, ratio and its interval."""
    chosen = ["MA", *(name for name in options.variants if name != "MA")]
    work = Workload(options, tokens)
    for name in chosen:
        started = time.perf_counter()
        work.warm_up(name)
        progress(f"{tokens} tokens, {name}: warmed up in {time.perf_counter() - started:.1f} s")
    found = interleaved({name: partial(work.time, name) for name in chosen}, options.rounds, baseline="MA")
    return {name: asdict(ratio) for name, ratio in found.items()}


def measure_update(device: str) -> dict[str, Any]:
    """The update of all layers alone: seconds eager and fused, its floor, and the memory it adds."""
    place = torch.device(device)
    torch.manual_seed(0)
    model = Transformer(TransformerConfig.small(VOCABULARY)).to(place)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    groups = find_heads(model)
    numbers = sum(group.num_heads * group.dim for group in groups)
    rate = copy_rate(place)
    update = Update(groups, 0)
    for step in range(1, 4):
        update.run(RULE, {}, step=step)
    facts: dict[str, Any] = {
        "groups": len(groups),
        "numbers": numbers,
        "copy_bytes_per_second": rate,
        "floor_seconds": 4 * 4 * numbers / rate,
        "update_seconds": median_time(lambda: update.run(RULE, {}, step=3), place),
        "one_at_a_time_seconds": median_time(lambda: one_at_a_time(groups), place, repeats=5, warm_up=1),
    }
    if device == "cuda":
        facts["update_device_seconds"] = _replayed(lambda: update.run(RULE, {}, step=3))
        fresh = Update(groups, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in range(3):
            fresh.run(RULE, {}, step=step, measure=step == 0)
        facts["extra_bytes"] = torch.cuda.max_memory_allocated() - before
        facts["particle_bytes"] = 4 * numbers
    return facts


def _replayed(function: Callable[[], object], times: int = 10) -> float:
    """Seconds on the device alone: `times` calls captured in one graph, replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(times):
            function()
    return median_time(graph.replay, torch.device("cuda")) / times
