"""Settings shared by the recipes of all tasks: optimizer, training loop, method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from repulsive.particles.bandwidths import BandwidthName
from repulsive.particles.kernels import KernelName, Space
from repulsive.particles.ladder import Rung
from repulsive.particles.priors import PriorName
from repulsive.particles.rule import StepSize
from repulsive.repulsion.settings import NoisePlace


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its learning rate.

    Args:
        name: name of the optimizer.
        lr: learning rate.
        momentum: momentum of SGD.
        betas: decay rates of the moments of Adam and AdamW.
        eps: epsilon of Adam, AdamW and Adagrad.
        weight_decay: coupled (L2) except for AdamW.
        decay: weights that decay: all, or matrices only (no biases and norms).
        bias_correction: bias correction of Adam and AdamW; ELECTRA and BERT were trained without it.
        schedule: learning rate after the warm-up. "linear" and "cosine" end at `final`. "linear-throughout"
            falls from the first step on and is multiplied by the warm-up, as in ELECTRA. "cycle-5" falls by a fifth of
            `lr` per epoch and restarts after five epochs, as in GraphWriter's paper; "cycle-4" restarts after four, as
            in its code.
        final: fraction of `lr` at which "linear" and "cosine" end.
        warmup: number of steps in which the rate rises from zero.
        warmup_share: warm-up as a fraction of all steps; used if `warmup` is 0.
        clip: maximum norm of all gradients together; 0: no clipping.
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
            raise ValueError(f"bias_correction=false: {self.name} has no bias correction; remove the setting")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final={self.final} must lie between 0 and 1")
        if self.final and self.schedule not in ("linear", "cosine"):
            raise ValueError(f"final={self.final}: the schedule {self.schedule!r} does not use it; remove the setting")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share={self.warmup_share} must be at least 0 and below 1")


@dataclass(frozen=True)
class Training:
    """The training loop: length, precision, evaluation, checkpoints.

    Args:
        epochs: passes over the data.
        batch: items per step, summed over all processes; for translation, tokens of the longer side with padding.
        precision: "bf16" runs forward and backward under autocast; weights stay float32.
        tf32: allow TF32 for float32 matrix products on a GPU.
        capture: on one GPU, replay forward and backward of each batch shape as a CUDA graph; not with
            `space="logits"`, which samples tokens.
        compile: use torch.compile, for tasks whose batches have one shape; it takes half a minute, less if cached.
        evaluate_every: steps between two evaluations on the validation set; 0: after every epoch.
        log_every: steps between two log lines of the training loss.
        save_every: steps between two checkpoints; 0: use `save_seconds`.
        save_seconds: seconds between two checkpoints.
        keep: number of checkpoints to keep.
        checkpoint: "whole": the first rank writes, and training waits; "sharded": every rank writes its share in the
            background (torch.distributed.checkpoint), for large models; costs a copy of the state in host memory.
        average: end with the mean of this many of the last sets of weights; 0: end with the best weights.
        average_every: steps between two averaged sets of weights; 0: one epoch.
        stop_collapsed: stop a training whose model gives the same output for every input, as if it had diverged;
            False: warn only.
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
    checkpoint: Literal["whole", "sharded"] = "whole"
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
    """How heads are trained: with a rule for their gradients, a penalty on the loss, or neither.

    Defaults are those of `repel` and of the rules, except those of noise, which are the published ones.

    Args:
        rule: "none" is plain training (MA); "cosine" is the cosine ladder of the paper's appendix, see `rung`;
            "kernel-free" is the control `KernelFree`.
        stepsize: epsilon, or "heads"; see `SVGD`.
        alpha: repulsive weight; "auto" to hold |repulsion| / |drive| at `ratio`; or "data", 1 / number of training
            items, the temperature of the posterior for a mean loss.
        ratio: target of `alpha = "auto"`.
        schedule: change of alpha (or of `ratio`) over the training: "linear" and "cosine" fall to zero, "warmup" rises
            during the first tenth.
        until: repel only in the first so many steps; 0: in all.
        beta: beta of SPOS, the inverse weight of its Langevin term.
        temperature: noise temperature of SPOS and SGLD; "data" is 1 / number of training items, right for a mean loss.
        noise: see `SPOS`.
        noise_in: see `repel`; "gradient" by default, as published.
        kernel: see `SVGD`.
        bandwidth: see `SVGD`.
        prior: "uniform", or "gaussian" with standard deviation `prior_std`.
        prior_std: standard deviation of the Gaussian prior.
        smoothing: see `SVGD`; 0 together with alpha = 0 is the control "gradient x epsilon / M".
        space: see `SVGD`.
        act_every: see `SVGD`.
        rung: rung of the cosine ladder, see `CosineLadder`.
        layers: see `repel`.
        parts: see `repel`.
        where: see `repel`.
        particle: see `repel`.
        layout: see `repel`.
        order: clip gradients before the rule or after it.
        penalty: weight of the task's regularizer in the loss ("MA + R").
    """

    rule: Literal["none", "sgld", "svgd", "spos", "cosine", "kernel-free"] = "none"
    stepsize: StepSize = 0.1
    alpha: float | Literal["auto", "data"] = 0.01
    ratio: float = 0.1
    schedule: Literal["constant", "linear", "cosine", "warmup"] = "constant"
    until: int = 0
    beta: float = 1e6
    temperature: float | Literal["data"] = 1.0
    noise: Literal["langevin", "released"] = "langevin"
    noise_in: NoisePlace = "gradient"
    kernel: KernelName = "rbf"
    bandwidth: float | BandwidthName = "paper"
    prior: PriorName = "uniform"
    prior_std: float = 1.0
    smoothing: float = 1.0
    space: Space = "weights"
    act_every: int = 1
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
        _not_negative(self, "until")
        if self.until and self.schedule != "constant":
            raise ValueError(f"until={self.until} and schedule={self.schedule!r}: choose one of them")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a training. Tasks subclass it to add tables of their own.

    Args:
        task: name of the task.
        label: name in tables, such as "MA + R".
        seed: random seed of initial weights, data order, dropout and noise; from 0 to 2**32 - 1.
        optimizer: the optimizer.
        training: the training loop.
        method: how heads are trained.
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
