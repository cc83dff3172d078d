"""What every recipe says, whatever the task: how long, with which optimiser, by which method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from repulsive.particles.bandwidths import BandwidthName
from repulsive.particles.kernels import KernelName, Space
from repulsive.particles.ladder import Rung
from repulsive.particles.priors import PriorName


@dataclass(frozen=True)
class Optimizer:
    """The optimiser and its learning rate.

    Args:
        name: which.
        lr: learning rate.
        momentum: of SGD.
        betas: of Adam and AdamW.
        eps: of Adam, AdamW and Adagrad.
        weight_decay: coupled (L2) except for AdamW.
        decay: of which weights: all, or matrices alone, not biases and norms.
        bias_correction: of Adam's running means; ELECTRA and BERT were trained without.
        schedule: of the learning rate after the warm-up; linear and cosine end at `final`. "linear-throughout" falls
            from the first step on and is multiplied with the warm-up, as ELECTRA's. "cycle-5" falls by a fifth of `lr`
            from epoch to epoch and starts over after five, as GraphWriter's paper has it; "cycle-4" after four, as its
            code.
        final: share of `lr` at which linear and cosine end.
        warmup: steps in which it rises from zero.
        warmup_share: the same as a share of all steps; it counts where `warmup` is 0.
        clip: largest joint norm of all gradients; 0: none.
    """

    name: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["all", "matrices"] = "all"
    bias_correction: bool = True
    schedule: Literal["constant", "linear", "linear-throughout", "cosine", "inverse-sqrt", "cycle-4", "cycle-5"] = (
        "constant"
    )
    final: float = 0.0
    warmup: int = 0
    warmup_share: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr={self.lr} must be positive and finite")
        for name in ("momentum", "eps", "weight_decay", "warmup", "clip"):
            _not_negative(self, name)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={list(self.betas)} must be at least 0 and below 1")
        if not self.bias_correction and self.name not in ("adam", "adamw"):
            raise ValueError(f"bias_correction=false: {self.name} has none; leave it out")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final={self.final} must lie between 0 and 1")
        if self.final and self.schedule not in ("linear", "cosine"):
            raise ValueError(f"final={self.final}: the schedule {self.schedule!r} does not use it; leave it out")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share={self.warmup_share} must be at least 0 and below 1")


@dataclass(frozen=True)
class Training:
    """How long, how precisely, and how often to look and to save.

    Args:
        epochs: passes over the data.
        batch: items a step, over all processes together; of translation, tokens of the longer side, padding included.
        precision: "bf16" computes forward and backward under autocast; weights stay float32.
        tf32: let a GPU multiply float32 matrices with shorter mantissas.
        capture: on one GPU, replay forward and backward of each batch shape as a CUDA graph.
        compile: let torch's compiler fuse what lies between the matrix products, where batches have one shape; it takes
            half a minute, less when it has been done before.
        evaluate_every: steps between two looks at the development set; 0: after every epoch.
        log_every: steps between two lines of training loss.
        save_every: steps between two checkpoints; 0: by time.
        save_seconds: seconds between two checkpoints.
        keep: checkpoints that stay.
        average: end with the mean of so many of the last weights instead of the best ones; 0: with the best.
        average_every: steps between two weights that are averaged; 0: one of every epoch.
        stop_collapsed: end a training whose model answers every input alike, as one that diverged; False: warn.
    """

    epochs: int = 4
    batch: int = 64
    precision: Literal["fp32", "bf16"] = "fp32"
    tf32: bool = True
    capture: bool = True
    compile: bool = False
    evaluate_every: int = 0
    log_every: int = 50
    save_every: int = 0
    save_seconds: float = 60.0
    keep: int = 2
    average: int = 0
    average_every: int = 0
    stop_collapsed: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("evaluate_every", "save_every", "save_seconds", "average", "average_every"):
            _not_negative(self, name)


@dataclass(frozen=True)
class Method:
    """What is done about the heads: a rule on their gradients, or a penalty on the loss, or nothing.

    Args:
        rule: "none" is plain training (MA); "cosine" is the ladder of the paper's appendix, see `rung`.
        stepsize: epsilon.
        alpha: repulsive weight, or "auto" to hold |repulsion| / |drive| at `ratio`.
        ratio: the target of alpha = "auto".
        schedule: of alpha (or of `ratio`) over the whole training: linear and cosine fall to zero, warmup rises for a
            tenth of it.
        beta: SPOS's inverse weight of the Langevin line.
        temperature: of the noise and the prior; "data" is 1 / number of training items, right for a mean loss.
        noise: SPOS's noise, see `SPOS`.
        noise_in: where noise goes in, see `repel`.
        kernel: see `SVGD`.
        bandwidth: see `SVGD`.
        prior: "gaussian" has standard deviation `prior_std`.
        prior_std: of the Gaussian prior.
        smoothing: see `SVGD`; 0 with alpha = 0 is the control "gradient x epsilon / M".
        space: see `SVGD`.
        rung: of the cosine ladder.
        layers: see `repel`.
        parts: see `repel`.
        where: see `repel`.
        particle: see `repel`.
        layout: see `repel`.
        order: clip before the rule or after it.
        penalty: weight of the task's regulariser in the loss ("MA + R").
    """

    rule: Literal["none", "sgld", "svgd", "spos", "cosine"] = "none"
    stepsize: float = 0.1
    alpha: float | Literal["auto"] = 0.01
    ratio: float = 0.1
    schedule: Literal["constant", "linear", "cosine", "warmup"] = "constant"
    beta: float = 1e6
    temperature: float | Literal["data"] = 1.0
    noise: Literal["langevin", "released"] = "langevin"
    noise_in: Literal["gradient", "parameter"] = "gradient"
    kernel: KernelName = "rbf"
    bandwidth: float | BandwidthName = "paper"
    prior: PriorName = "uniform"
    prior_std: float = 1.0
    smoothing: float = 1.0
    space: Space = "weights"
    rung: Rung = "regulariser"
    layers: Literal["all", "first", "last"] | tuple[int, ...] = "all"
    parts: str = "qkv"
    where: Literal["all", "encoder", "decoder", "cross"] = "all"
    particle: Literal["projection", "head"] = "projection"
    layout: Literal["heads", "strided"] = "heads"
    order: Literal["clip-repel", "repel-clip"] = "clip-repel"
    penalty: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(self, "penalty")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training, whole. Tasks add tables of their own.

    Args:
        task: name of the task.
        label: what tables call it, such as "MA + R".
        seed: of weights, order, dropout and noise; from 0 to 2**32 - 1.
        optimizer: the optimiser.
        training: the loop.
        method: what is done about the heads.
    """

    task: str
    label: str = ""
    seed: int = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    method: Method = field(default_factory=Method)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must lie between 0 and {2**32 - 1}")


def _not_negative(table: object, name: str) -> None:
    if getattr(table, name) < 0:
        raise ValueError(f"{name}={getattr(table, name)} must not be negative")
