"""Train a small language model under one optimizer and one rule, and measure what repulsion does to the steps."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from repulsive import SVGD, Handle, find_heads, repel
from repulsive.lab.systems.lm.model import Decoder, DecoderConfig
from repulsive.lab.systems.lm.toy import lines
from repulsive.particles.named import rule_by_name

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 32, 16
PROBE_EVERY = 50
LINES, DEV_LINES = 5_000, 200


@dataclasses.dataclass(frozen=True)
class Kind:
    """One optimizer of the comparison.

    Args:
        label: name in the table.
        build: makes the optimizer of some parameters.
        stepsize: of the rules; M where the optimizer does not rescale gradients.
        matrices_only: whether other parameters than the matrices of layers are trained by AdamW.
    """

    label: str
    build: Callable[[Iterable[Tensor]], Optimizer]
    stepsize: float = 0.1
    matrices_only: bool = False


def _schedule_free(parameters: Iterable[Tensor]) -> Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer: Optimizer = AdamWScheduleFree(parameters, lr=1e-2, warmup_steps=20)
    return optimizer


KINDS = (
    Kind("SGD", lambda p: torch.optim.SGD(p, lr=0.3), stepsize=HEADS),
    Kind("SGD, momentum 0.9", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), stepsize=HEADS),
    Kind("Adam", lambda p: torch.optim.Adam(p, lr=3e-3)),
    Kind("AdamW", lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1)),
    Kind("Adafactor", lambda p: torch.optim.Adafactor(p, lr=3e-2)),
    Kind("Muon", lambda p: torch.optim.Muon(p, lr=2e-2, weight_decay=0.1), matrices_only=True),
    Kind("schedule-free AdamW", _schedule_free),
)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One rule of the comparison; `place` is the argument `force_in` of `repel`."""

    label: str
    rule: SVGD | None
    place: Any = "gradient"

    @property
    def period(self) -> int:
        """The rule acts in one of this many steps."""
        return 1 if self.rule is None else self.rule.act_every

    def scaled(self, stepsize: float) -> SVGD | None:
        """The rule with this stepsize, unless it has `stepsize="heads"`, which keeps the size of gradients."""
        if self.rule is None or self.rule.stepsize == "heads":
            return self.rule
        return dataclasses.replace(self.rule, stepsize=stepsize)

    def without_force(self, stepsize: float) -> SVGD | None:
        """The same rule without its repulsive part."""
        rule = self.scaled(stepsize)
        return None if rule is None else SVGD(rule.stepsize, 0.0, space=rule.space, smoothing=rule.smoothing)


def sphere(ratio: float) -> SVGD:
    """The default rule in every step, with another ratio."""
    return SVGD(alpha="auto", ratio=ratio, space="sphere", smoothing=0)


def _default() -> SVGD:
    rule = rule_by_name("recommended")
    assert isinstance(rule, SVGD)
    return rule


PLAIN = Arm("plain", None)
DEFAULT = Arm("default", _default(), "auto")  # repel(model, optimizer)
PUBLISHED = Arm("published", SVGD(stepsize=0.1, alpha=0.01))
ARMS = (PLAIN, DEFAULT, Arm("sphere, ratio 0.03", sphere(0.03)), PUBLISHED)
AFTER = Arm("sphere, ratio 0.03, force_in='step'", sphere(0.03), "step")
MUON = (
    PLAIN,
    DEFAULT,
    AFTER,
    Arm("sphere, ratio 0.15, force_in='step'", sphere(0.15), "step"),
    Arm("sphere, ratio 0.03, force_in='gradient'", sphere(0.03)),
    Arm("sphere, ratio 0.01, force_in='gradient'", sphere(0.01)),
    PUBLISHED,
)


def arms_of(kind: Kind) -> tuple[Arm, ...]:
    """The rules to compare under an optimizer."""
    if kind.label == "Muon":
        return MUON
    return (*ARMS, AFTER) if kind.label == "AdamW" else ARMS


def train(kind: Kind, arm: Arm, seed: int, steps: int) -> dict[str, Any]:
    """Train one model; return its loss on held-out text and measurements of its heads and steps."""
    text = as_tokens(LINES, "train")
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(256, layers=2, width=WIDTH, heads=HEADS, length=LENGTH))
    twin = copy.deepcopy(model)
    optimizers, handle = attach(model, kind, arm.scaled(kind.stepsize), arm.place, PROBE_EVERY - arm.period)
    twin_optimizers, _ = attach(twin, kind, arm.without_force(kind.stepsize), "gradient", PROBE_EVERY)
    rates = [[entry["lr"] for entry in optimizer.param_groups] for optimizer in optimizers]
    start = mean_norm(model)
    draw = torch.Generator().manual_seed(seed)
    probes: list[dict[str, float]] = []
    for step in range(steps):
        if "schedule-free" not in kind.label:
            for optimizer, own in zip([*optimizers, *twin_optimizers], rates + rates, strict=True):
                set_rates(optimizer, own, min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps))
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1), generator=draw)
        window = text[starts + torch.arange(LENGTH + 1)]  # [B, T + 1]
        model.zero_grad()
        cross_entropy(model, window).backward()
        # All steps of a period are measured, so that means over them include the steps in which the rule does not act.
        is_due = arm.rule is not None and step % PROBE_EVERY >= PROBE_EVERY - arm.period
        if arm.rule is not None:
            follow(twin, model, twin_optimizers, optimizers)
        once = one_step_ratio(model, optimizers, kind, arm) if is_due and step % arm.period == 0 else 0.0
        before = all_heads(model) if is_due else None
        for optimizer in (*optimizers, *(twin_optimizers if arm.rule is not None else ())):
            optimizer.step()
        if before is not None:
            plain = all_heads(twin) - before
            lasting = float((all_heads(model) - before - plain).norm() / plain.norm())
            probes.append({"gradient": gradient_ratio(handle), "once": once, "lasting": lasting})
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()  # schedule-free: the averaged weights
    with torch.no_grad():
        windows = as_tokens(DEV_LINES, "dev").unfold(0, LENGTH + 1, LENGTH)  # [N, T + 1]
        loss = float(cross_entropy(model, windows))
    return {
        "optimizer": kind.label,
        "rule": arm.label,
        "seed": seed,
        "loss": loss,
        "growth": mean_norm(model) / start,
        "cosine": statistics.fmean(mean_cosine(group.read()) for group in find_heads(model)),
        **{name: statistics.fmean(one[name] for one in probes) if probes else None for name in RATIOS},
    }


RATIOS = ("gradient", "once", "lasting")


def attach(
    model: nn.Module, kind: Kind, rule: SVGD | None, place: Any, measure_every: int
) -> tuple[list[Optimizer], Handle]:
    """Make the optimizers of a model; the first trains the heads, which repel each other."""
    optimizers: list[Optimizer]
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    if kind.matrices_only:
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        optimizers = [kind.build(matrices), torch.optim.AdamW(others, lr=3e-3, weight_decay=0.1)]
    else:
        optimizers = [kind.build(list(model.parameters()))]
    for optimizer in optimizers:
        if hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free optimizers need it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = repel(model, optimizers[0], rule, force_in=place, measure_every=measure_every, verbose=False)
    return optimizers, handle


def gradient_ratio(handle: Handle) -> float:
    """|repulsion| / |drive| over all heads, as the norms of steps are over all heads."""
    reports = handle.report()
    return math.hypot(*(one.repulsion for one in reports)) / math.hypot(*(one.drive for one in reports))


def set_rates(optimizer: Optimizer, rates: list[float], factor: float) -> None:
    for entry, rate in zip(optimizer.param_groups, rates, strict=True):
        entry["lr"] = rate * factor


@torch.no_grad()
def follow(twin: nn.Module, model: nn.Module, theirs: list[Optimizer], ours: list[Optimizer]) -> None:
    """Give the twin the weights and gradients of the model. Its optimizers keep their own momentum.

    The state `z` of schedule-free optimizers is a copy of the weights, and is copied as well.
    """
    pairs = list(zip(twin.parameters(), model.parameters(), strict=True))
    for copied, weight in pairs:
        copied.copy_(weight)
        copied.grad = None if weight.grad is None else weight.grad.clone()
        for their, our in zip(theirs, ours, strict=True):
            if "z" in our.state.get(weight, {}):
                their.state[copied]["z"].copy_(our.state[weight]["z"])


def one_step_ratio(model: nn.Module, optimizers: list[Optimizer], kind: Kind, arm: Arm) -> float:
    """|step with repulsion - step without| / |step without|, from the same weights and optimizer state.

    A rule that acts in one of several steps acts in this one.
    """
    before = all_heads(model)
    moved = []
    for rule, place in ((arm.scaled(kind.stepsize), arm.place), (arm.without_force(kind.stepsize), "gradient")):
        copied, optimizer = copy.deepcopy((model, optimizers[0]))
        for weight, own in zip(copied.parameters(), model.parameters(), strict=True):
            weight.grad = None if own.grad is None else own.grad.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            repel(copied, optimizer, rule, force_in=place, verbose=False)
        optimizer.step()
        moved.append(all_heads(copied) - before)
    return float((moved[0] - moved[1]).norm() / moved[1].norm())


def all_heads(model: nn.Module) -> Tensor:
    return torch.cat([group.read().flatten() for group in find_heads(model)])


def mean_norm(model: nn.Module) -> float:
    return statistics.fmean(float(group.read().norm(dim=1).mean()) for group in find_heads(model))


def mean_cosine(heads: Tensor) -> float:
    unit = F.normalize(heads, dim=1)
    return float((unit @ unit.T)[~torch.eye(len(heads), dtype=torch.bool)].mean())


@functools.cache
def as_tokens(count: int, seed: str) -> Tensor:
    return torch.tensor(list("".join(lines(count, seed)).encode()))


def cross_entropy(model: nn.Module, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
