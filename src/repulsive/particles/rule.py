r"""The base class of rules: two small matrices and a noise scale.

$$\text{what the optimizer descends} = -\epsilon\,\phi = A\,\nabla U + B\,\theta + \sigma\,\xi$$

with one [M, M] matrix A and one [M, M] matrix B per group. A rule computes A, B and sigma. Reading particles and
writing gradients is the same for all rules; `repulsion` does both.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from repulsive.errors import RuleError, is_number
from repulsive.particles.gram import Gram, apply_matrix, compute_dtype, full_precision, gram


@dataclass(frozen=True)
class Measure:
    """Measured quantities of an update: each field is a tensor [...] with one number per group.

    Args:
        drive: |A grad|, the norm of the part that follows the loss.
        repulsion: norm of the repulsive part, in the same units.
        bandwidth: h of the kernel; NaN for a kernel without one.
        distance: mean distance between two heads.
        alpha: repulsive weight.
        similarity: mean cosine between two heads: of their weights, or of their logits under `space="logits"`.
        largest: largest cosine between two heads, of the same kind as `similarity`.
    """

    drive: Tensor
    repulsion: Tensor
    bandwidth: Tensor
    distance: Tensor
    alpha: Tensor
    similarity: Tensor
    largest: Tensor


@dataclass(frozen=True)
class Coefficients:
    """The matrices of one update, [..., M, M] each: `drive` is A; `force` is B, or None if B is zero."""

    drive: Tensor
    force: Tensor | None
    measure: Measure | None


StepSize = float | Literal["heads"]
FormKernel = Literal["rbf", "imq", "constant", "cosine", "hinge", "none"]


@dataclass(frozen=True)
class RadialForm:
    r"""The settings of one update that follows SVGD's formula, for backends with that formula built in.

    $A = \epsilon\,((s K + (1 - s) I) / M + w I)$ and $B = p A - (\epsilon\,\alpha / M) R$, with K and R as in
    `particles.kernels`. With `ratio`, $\alpha$ is that of `SVGD.weight_of`. Without a kernel, $A = \epsilon\,w I$ and
    $B = p A$.

    Args:
        kernel: name of the kernel; "constant" is that of `KernelFree`.
        bandwidth: a name, or h itself; kernels without a bandwidth ignore it.
        on_sphere: whether heads are compared as unit vectors.
        stepsize: epsilon, or "heads" for the number of heads M.
        alpha: repulsive weight at this step; not used with `ratio`.
        own_drive: w, the weight of a head's own gradient, which is added to the smoothed gradients.
        smoothing: s, how much gradients are averaged over similar heads: 0 not at all, 1 as published.
        precision: p, the precision of the prior.
        ratio: target of |repulsion| / |drive| at this step, which determines alpha; None with a given alpha.
        threshold: t of the hinge kernel.
    """

    kernel: FormKernel
    bandwidth: Literal["paper", "released", "released-lower"] | float
    on_sphere: bool
    stepsize: StepSize
    alpha: float
    own_drive: float
    smoothing: float
    precision: float
    ratio: float | None = None
    threshold: float = 0.0

    @property
    def has_force(self) -> bool:
        """Whether B can differ from zero."""
        return self.kernel != "none" or self.precision != 0

    @property
    def mixes_gradients(self) -> bool:
        """Whether A can differ from a multiple of the identity."""
        return self.kernel != "none" and self.smoothing != 0

    def drive(self, heads: int) -> float:
        """Return the factor on a head's own gradient, for a form that does not mix gradients: A is that times I."""
        shared = 0.0 if self.kernel == "none" else 1 / heads
        return epsilon(self.stepsize, heads) * (shared + self.own_drive)


AnyRule = TypeVar("AnyRule", bound="Rule")


class Rule(ABC):
    """Base class of rules, which turn the loss gradients of a group's heads into what the optimizer descends.

    A subclass has to define `coefficients`. The properties tell the rest of the package what the rule needs; their
    defaults suit a rule without noise that reads weights and gradients only.
    """

    stepsize: StepSize
    # The rule acts in one of this many optimizer steps; the gradients of the others stay as they are.
    act_every: int = 1

    @property
    def has_interaction(self) -> bool:
        """Whether heads of a group act on each other; such a rule has no effect on a group with one head."""
        return False

    @property
    def has_matrix_form(self) -> bool:
        """Whether `coefficients` is available. If not, use `gradient` or `direction`, which read the particles."""
        return True

    @property
    def reads_tokens(self) -> bool:
        """Whether particles are functions of a layer's tokens, so that weights and gradients alone are not enough."""
        return False

    @property
    def moves_values(self) -> bool:
        """Whether a rule that reads tokens changes v and the output projection as well as q and k."""
        return False

    @property
    def holds_ratio(self) -> bool:
        """Whether the repulsive weight is set at every step to keep |repulsion| / |drive| at a target."""
        return False

    @property
    def needs_gradient_products(self) -> bool:
        """Whether the matrices A and B of the rule depend on inner products of the loss gradients."""
        return False

    @abstractmethod
    def coefficients(self, theta: Gram, grad: Gram | None = None, *, step: int = 0) -> Coefficients:
        """Compute the matrices A and B of one update.

        Args:
            theta: inner products of the particles.
            grad: inner products of the gradients; needed for `needs_gradient_products` and for a `measure`.
            step: optimizer steps taken so far, for schedules.
        """

    def drive_scale(self, heads: int) -> float | None:
        """Return the factor on a head's own gradient when gradients are not smoothed over heads; None if unknown.

        Args:
            heads: M, the number of heads in the group.
        """
        return None

    def radial_form(self, step: int) -> RadialForm | None:
        """Return the settings of SVGD's formula if `coefficients` computes exactly that; else None.

        Args:
            step: optimizer steps taken so far, for schedules.
        """
        return None

    @property
    def is_scheduled(self) -> bool:
        """Whether `radial_form` depends on the step. If not, it is called once instead of in every step."""
        return True

    def acts(self, step: int) -> bool:
        """Check whether the rule changes the gradients of a step.

        Args:
            step: optimizer steps taken so far.
        """
        return step % self.act_every == 0

    def is_off(self, step: int) -> bool:
        """Check whether a schedule has set the repulsive weight, or the target ratio, to zero in a step.

        Args:
            step: optimizer steps taken so far.
        """
        return False

    def acting_always(self) -> Self:
        """Return the same rule with `act_every=1`: the same force on average, in every step."""
        return self if self.act_every == 1 else copy_with(self, act_every=1)

    def noise_scale(self, lr: float) -> float:
        """Return sigma, the factor on the standard normal noise that is added to the gradient; zero for no noise."""
        return 0.0

    @property
    def has_noise(self) -> bool:
        """Whether the rule adds noise at any positive learning rate."""
        return self.noise_scale(1.0) != 0

    @property
    def scales_noise(self) -> bool:
        """Whether noise is multiplied by `noise_factor`, which depends on the gradients."""
        return False

    def noise_factor(self, grad: Tensor) -> Tensor:
        """Compute an extra factor on each group's noise from the group's gradients: [..., M, D] -> [...]."""
        return grad.new_ones(grad.shape[:-2])

    def gradient(
        self, theta: Tensor, grad: Tensor, generator: torch.Generator | None = None, *, lr: float = 1.0, step: int = 0
    ) -> Tensor:
        """Compute what the optimizer descends, from particles and their loss gradients.

        NaN or infinity in a particle or its gradient gives NaN in its group. For a rule with `act_every`, this is the
        result of a step in which it acts: in a loop of your own, call it only if `acts(step)`.

        Args:
            theta: particles [..., M, D].
            grad: loss gradients [..., M, D].
            generator: random generator for the noise of SPOS and SGLD; None for torch's default one.
            lr: learning rate that the result will be multiplied by; the noise depends on it.
            step: optimizer steps taken so far, for schedules.

        Returns:
            [..., M, D] in the dtype of `grad`.
        """
        _check_particles(theta, grad)
        if self.reads_tokens:
            raise RuleError(
                f"{type(self).__name__}(space='logits') compares heads by their logits on the tokens of a layer, which "
                "plain tensors do not have; use repel(model, optimizer, rule), or space='sphere' for plain tensors"
            )
        dtype = compute_dtype(theta)
        with torch.no_grad(), full_precision(theta.device):
            particles, gradients = theta.to(dtype), grad.to(dtype)
            result = self.direction(particles, gradients, step)
            sigma = self.noise_scale(lr)
            if sigma:
                noise = sigma * torch.randn(theta.shape, generator=generator, device=theta.device, dtype=dtype)
                if self.scales_noise:
                    noise = noise * self.noise_factor(gradients)[..., None, None]
                result = result + noise
            return result.to(grad.dtype)

    def direction(self, theta: Tensor, grad: Tensor, step: int) -> Tensor:
        """Compute A grad + B theta, [..., M, D]: `gradient` without checks, casts and noise."""
        grad_gram = gram(grad) if self.needs_gradient_products else None
        coefficients = self.coefficients(gram(theta), grad_gram, step=step)
        result = coefficients.drive.to(grad.dtype) @ grad
        return result if coefficients.force is None else result + apply_matrix(coefficients.force, theta)

    def measured_direction(self, theta: Tensor, grad: Tensor, step: int) -> tuple[Tensor, Measure | None]:
        """Compute `direction` and measure it, for a rule without a matrix form; None if the rule cannot measure."""
        return self.direction(theta, grad, step), None


def copy_with(rule: AnyRule, **settings: object) -> AnyRule:
    """Copy a rule with other settings. `dataclasses.replace` would check settings that a subclass sets itself."""
    result = copy.copy(rule)
    for name, value in settings.items():
        object.__setattr__(result, name, value)  # rules are frozen dataclasses
    return result


def epsilon(stepsize: StepSize, heads: int) -> float:
    """Return epsilon for a group; "heads" is the number of heads, with which a head's own gradient keeps its length."""
    return float(heads if isinstance(stepsize, str) else stepsize)


def check_number(rule: object, name: str, *, above: float | None = None, least: float | None = None) -> None:
    """Raise `RuleError` unless the attribute `name` of a rule is a finite number in range."""
    value = getattr(rule, name)
    bound = f"> {above:g}" if above is not None else f">= {least:g}"
    fits = is_number(value) and math.isfinite(value)
    if not fits or (above is not None and not value > above) or (least is not None and not value >= least):
        hint = f"; write {name}=float(...)" if hasattr(value, "item") and not is_number(value) else ""  # numpy, torch
        raise RuleError(f"{type(rule).__name__}({name}={value!r}): must be a number {bound}{hint}")


def mean_distance(d2: Tensor) -> Tensor:
    """Compute the mean of the distances i < j: [..., M, M] -> [...]; NaN for one particle."""
    heads = d2.shape[-1]
    return d2.sqrt().sum((-2, -1)) / (heads * (heads - 1)) if heads > 1 else torch.full_like(d2[..., 0, 0], torch.nan)


def _check_particles(theta: Tensor, grad: Tensor) -> None:
    if theta.shape != grad.shape:
        raise RuleError(f"theta {tuple(theta.shape)} and grad {tuple(grad.shape)} must have the same shape [..., M, D]")
    if theta.ndim < 2 or theta.shape[-2] == 0:
        raise RuleError(f"theta has shape {tuple(theta.shape)}; expected [..., M, D] with at least one particle")
    if not (theta.is_floating_point() and grad.is_floating_point()):
        raise RuleError(f"theta and grad must be floating point, not {theta.dtype} and {grad.dtype}")
