"""Stein variational gradient descent (Liu and Wang, 2016), equation 4 of the paper, with the repulsive weight alpha."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from repulsive.errors import RuleError
from repulsive.particles import bandwidths, kernels, priors
from repulsive.particles.bandwidths import Bandwidth
from repulsive.particles.collapse import warn_if_equal
from repulsive.particles.gram import Gram, gram
from repulsive.particles.kernels import AnyKernel, Cosine, Differentiable, Hinge, Interaction, Space
from repulsive.particles.logits import cosines, mean_and_largest
from repulsive.particles.priors import Prior, PriorName
from repulsive.particles.rule import (
    Coefficients,
    FormKernel,
    Measure,
    RadialForm,
    Rule,
    StepSize,
    epsilon,
    mean_distance,
)
from repulsive.particles.svgd_settings import TOKENS, CircuitsName, Unset, check_settings

Alpha = float | Literal["auto"] | Callable[[int], float]
Ratio = float | Callable[[int], float]

RATIO = Unset(0.1)  # default with alpha="auto"
_FORMULA = ("coefficients", "drive", "interact", "weight_of")  # the methods that `radial_form` stands for


@dataclass(frozen=True)
class SVGD(Rule):
    r"""Stein variational gradient descent: heads follow gradients averaged over similar heads, and repel each other.

    $$\phi_i = \frac1M \sum_j \left[ -(s K_{ij} + (1 - s)\,\delta_{ij})\,\nabla U_j
      + \alpha\,\nabla_{\theta_j} \kappa(\theta_j, \theta_i) \right]$$

    and the optimizer receives $-\epsilon\,\phi_i$. For the RBF kernel in weight space the second term is
    $\alpha\,(2/h)\,K_{ij} (\theta_i - \theta_j)$.

    Args:
        stepsize: epsilon. Under Adam a factor on the whole direction nearly cancels. "heads" is the number of heads M:
            with smoothing=0 a head's own gradient then keeps its length.
        alpha: repulsive weight: a number, a schedule step -> number, or "auto", which sets it for each group and step
            so that |repulsion| / |drive| equals `ratio`. With alpha = T the particles sample exp(-U / T).
        kernel: "rbf", "imq", "cosine", "hinge" (only heads with a cosine above 0.5 repel each other), a `Kernel`, or
            a differentiable callable k(x, y).
        bandwidth: "paper", "released", "released-lower", a number h, or a callable from the squared distances of one
            group, [M, M], to h. "cosine", "hinge" and callable kernels have none: it is an error to set it there.
        prior: "uniform", "gaussian", or `Gaussian(std, num_data)`.
        smoothing: s: 1 as published; 0 lets every head follow its own gradient only (divided by M). None means 0 for
            `space="logits"` and `kernel="hinge"`, which allow nothing else, and 1 otherwise.
        space: "weights" as published; "sphere" compares unit-norm heads and does not change norms; "logits" compares
            heads by their attention logits on the layer's own tokens, and moves q and k.
        ratio: the target of |repulsion| / |drive| with alpha="auto", a number or a schedule; 0.1 by default. It is an
            error to set it without alpha="auto".
        circuits: with `space="logits"`: "qk" compares logits only; "qk+ov" also repels the outputs of heads, and moves
            v and the output projection.
        tokens: with `space="logits"`: number of tokens of a training pass on which logits are compared.
        every: with `space="logits"`: optimizer steps between two computations of the force, which is reused in between
            with the same weight; "auto" computes it in every step at first, then less and less often.
        act_every: repel in one of this many optimizer steps, with a force that is as many times as strong; gradients of
            the other steps stay as they are. This costs less. It needs stepsize="heads", smoothing=0 and no prior.

    Raises:
        RuleError: a setting is out of range or unknown.

    Example:
        >>> theta, grad = torch.randn(4, 8), torch.zeros(4, 8)
        >>> SVGD(stepsize=0.1, alpha=0.01).gradient(theta, grad).shape
        torch.Size([4, 8])
    """

    stepsize: StepSize = 0.1
    alpha: Alpha = 0.01
    kernel: AnyKernel = field(default="rbf", kw_only=True)
    bandwidth: Bandwidth = field(default="paper", kw_only=True)
    prior: PriorName | Prior = field(default="uniform", kw_only=True)
    smoothing: float = field(default=None, kw_only=True)  # type: ignore[assignment]  # __post_init__ sets it
    space: Space = field(default="weights", kw_only=True)
    ratio: Ratio = field(default=RATIO, kw_only=True)
    circuits: CircuitsName = field(default="qk", kw_only=True, repr=False)
    tokens: int = field(default=TOKENS, kw_only=True, repr=False)
    every: int | Literal["auto"] = field(default="auto", kw_only=True, repr=False)
    act_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.smoothing is None:
            object.__setattr__(self, "smoothing", self.default_smoothing)
        object.__setattr__(self, "bandwidth", bandwidths.check(self.bandwidth))
        check_settings(self)

    @property
    def only_adds_repulsion(self) -> bool:
        """Whether the drive is the gradient itself, so that a step without repulsion needs no rule."""
        return self.stepsize == "heads" and self.smoothing == 0 and not priors.resolve(self.prior).precision

    def acts(self, step: int) -> bool:
        if step % self.act_every != 0:
            return False
        is_scheduled = callable(self.alpha) or callable(self.ratio)
        return not (is_scheduled and self.only_adds_repulsion and self.is_off(step))

    def is_off(self, step: int) -> bool:
        name: Literal["alpha", "ratio"] = "ratio" if self.holds_ratio else "alpha"
        return callable(getattr(self, name)) and self.value_at(name, step) == 0

    def value_at(self, name: Literal["alpha", "ratio"], step: int) -> float:
        """Return alpha (a number or a schedule) or the target ratio in a step.

        Raises:
            RuleError: a schedule gives a negative number, which would attract heads to each other, or NaN.
        """
        setting = self.alpha if name == "alpha" else self.ratio
        if not callable(setting):
            return float(setting)
        value = float(setting(step))
        if not value >= 0:
            raise RuleError(
                f"{type(self).__name__}({name}={setting!r}): the schedule gives {value:g} at step {step}; it must give "
                "numbers >= 0, because negative ones would attract heads to each other"
            )
        return value

    @property
    def default_smoothing(self) -> float:
        """The value of `smoothing` if the user does not set it."""
        return 0.0 if self.reads_tokens or isinstance(kernels.resolve(self.kernel), Hinge) else 1.0

    @property
    def reads_tokens(self) -> bool:
        return self.space == "logits"

    @property
    def has_interaction(self) -> bool:
        return True

    @property
    def moves_values(self) -> bool:
        return self.circuits == "qk+ov"

    @property
    def holds_ratio(self) -> bool:
        return self.alpha == "auto"

    @property
    def has_matrix_form(self) -> bool:
        return isinstance(self.kernel, str) or not isinstance(kernels.resolve(self.kernel), Differentiable)

    @property
    def needs_gradient_products(self) -> bool:
        return self.holds_ratio

    @property
    def own_drive(self) -> float:
        """Weight of a head's own, unsmoothed gradient, in addition to the interaction; 1 / beta for SPOS."""
        return 0.0

    def drive(self, values: Tensor) -> Tensor:
        """Compute A [..., M, M] from the kernel matrix K."""
        heads = values.shape[-1]
        eye = torch.eye(heads, dtype=values.dtype, device=values.device)
        smooth = self.smoothing * values + (1 - self.smoothing) * eye
        own = epsilon(self.stepsize, heads) * self.own_drive
        return self.force_scale(heads) * smooth + own * eye

    def interact(self, theta: Gram) -> Interaction:
        """Compute kernel values and forces of a batch of groups; logits are compared as unit vectors."""
        kernel = kernels.resolve(self.kernel)
        assert not isinstance(kernel, Differentiable)
        return kernel.interact(theta, self.bandwidth, "sphere" if self.reads_tokens else self.space)

    def drive_scale(self, heads: int) -> float:
        return float(self.drive(torch.eye(heads, dtype=torch.float64, device="cpu"))[0, 0])

    def force_scale(self, heads: int) -> float:
        """Return epsilon / M, the factor on the sum of forces at alpha = 1."""
        return epsilon(self.stepsize, heads) / heads

    def radial_form(self, step: int) -> RadialForm | None:
        kernel = kernels.resolve(self.kernel)
        if kernel is kernels.RBF:
            return self._form(SVGD, "rbf", step)
        if kernel is kernels.IMQ:
            return self._form(SVGD, "imq", step)
        if type(kernel) is Cosine:
            return self._form(SVGD, "cosine", step)
        if type(kernel) is Hinge:
            return self._form(SVGD, "hinge", step, kernel.threshold)
        return None

    @property
    def is_scheduled(self) -> bool:
        return callable(self.alpha) or callable(self.ratio)

    def _form(self, owner: type[SVGD], kernel: FormKernel, step: int, threshold: float = 0.0) -> RadialForm | None:
        """Build the form of this rule; None if a subclass of `owner`, the class of the formula, has another formula."""
        bandwidth, kind = self.bandwidth, type(self)
        if self.reads_tokens or callable(bandwidth):
            return None
        if kind is not owner and any(getattr(kind, name) is not getattr(owner, name) for name in _FORMULA):
            return None
        return RadialForm(
            kernel=kernel,
            bandwidth=bandwidth,
            on_sphere=self.space == "sphere",
            stepsize=self.stepsize,
            alpha=0.0 if self.holds_ratio else self.act_every * self.value_at("alpha", step),
            own_drive=self.own_drive,
            smoothing=self.smoothing,
            precision=priors.resolve(self.prior).precision,
            ratio=self.act_every * self.value_at("ratio", step) if self.holds_ratio else None,
            threshold=threshold,
        )

    def coefficients(self, theta: Gram, grad: Gram | None = None, *, step: int = 0) -> Coefficients:
        kernel = kernels.resolve(self.kernel)
        if isinstance(kernel, Differentiable):
            raise RuleError("a callable kernel has no matrix form; use rule.gradient(theta, grad)")
        interaction = self.interact(theta)
        drive = self.drive(interaction.values)
        unit = self.force_scale(theta.num_particles) * interaction.repulsion  # the repulsive part at alpha = 1
        drive_norm = None if grad is None else grad.norm_of(drive)
        are_equal = theta.squared_distances.amax((-2, -1)) == 0  # the norm of no force contains rounding errors
        unit_norm = torch.where(are_equal, 0, theta.norm_of(unit))
        rounding = theta.rounding_of(unit) if self.holds_ratio else 0.0
        alpha = self.weight_of(step, drive_norm, unit_norm, rounding)
        force = priors.resolve(self.prior).precision * drive - alpha[..., None, None] * unit
        return Coefficients(drive, force, self._measure(theta, interaction.bandwidth, drive_norm, alpha, unit_norm))

    def weight_of(
        self, step: int, drive_norm: Tensor | None, unit_norm: Tensor, rounding: Tensor | float = 0.0
    ) -> Tensor:
        """Compute the repulsive weight of each group, [...], in a step in which the rule acts.

        With alpha="auto" it is ratio * drive_norm / unit_norm, or zero if `unit_norm` is a rounding error, as between
        duplicate heads: it must not be scaled up to the target ratio.

        Args:
            step: optimizer steps taken so far, for schedules.
            drive_norm: |A grad| of each group; needed with alpha="auto".
            unit_norm: norm of the repulsive part at alpha = 1.
            rounding: largest `unit_norm` that is rounding error, see `Gram.rounding_of`.
        """
        if not self.holds_ratio:
            return torch.full_like(unit_norm, self.act_every * self.value_at("alpha", step))
        if drive_norm is None:
            raise RuleError("alpha='auto' needs the Gram matrix of the gradients; pass grad to coefficients")
        ratio = self.value_at("ratio", step)
        no_force = unit_norm <= rounding  # equal or parallel heads, or a single one
        weight = self.act_every * ratio * drive_norm / torch.where(no_force, 1.0, unit_norm)
        return torch.where(no_force, torch.zeros_like(unit_norm), weight)

    def _measure(
        self, theta: Gram, bandwidth: Tensor, drive_norm: Tensor | None, alpha: Tensor, unit_norm: Tensor
    ) -> Measure | None:
        if drive_norm is None:
            return None
        distance = mean_distance(theta.squared_distances)
        similarity = mean_and_largest(cosines(theta.inner, kernels.SHORTEST))
        return Measure(drive_norm, alpha * unit_norm, bandwidth, distance, alpha, *similarity)

    def gradient(
        self, theta: Tensor, grad: Tensor, generator: torch.Generator | None = None, *, lr: float = 1.0, step: int = 0
    ) -> Tensor:
        result = super().gradient(theta, grad, generator, lr=lr, step=step)
        warn_if_equal(theta)
        return result

    def direction(self, theta: Tensor, grad: Tensor, step: int) -> Tensor:
        if self.has_matrix_form:
            return super().direction(theta, grad, step)
        return self._by_autograd(theta, grad, step)[0]

    def measured_direction(self, theta: Tensor, grad: Tensor, step: int) -> tuple[Tensor, Measure | None]:
        if self.has_matrix_form:
            return super().measured_direction(theta, grad, step)
        result, drive_norm, alpha, unit_norm = self._by_autograd(theta, grad, step)
        no_bandwidth = torch.full_like(alpha, torch.nan)
        return result, self._measure(gram(theta), no_bandwidth, drive_norm, alpha, unit_norm)

    def repulsion_by_autograd(self, theta: Tensor) -> tuple[Tensor, Tensor, Tensor | float]:
        """Compute K [..., M, M] of a callable kernel, the repulsive part at alpha = 1 [..., M, D], and its error.

        Returns:
            The error is the norm [...] below which the repulsive part is rounding error, or 0 if alpha is a number:
            then rounding errors are not scaled up.
        """
        kernel = kernels.resolve(self.kernel)
        assert isinstance(kernel, Differentiable)
        scale = self.force_scale(theta.shape[-2])
        values, force = kernel.pairs(theta, self.space)
        return values, scale * force, scale * kernel.rounding_of(theta, self.space, force) if self.holds_ratio else 0.0

    def _by_autograd(self, theta: Tensor, grad: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the direction with a callable kernel, |drive|, alpha, and the repulsive norm at alpha = 1."""
        values, unit, rounding = self.repulsion_by_autograd(theta)
        matrix = self.drive(values)
        drive = matrix @ grad
        drive_norm, unit_norm = drive.flatten(-2).norm(dim=-1), unit.flatten(-2).norm(dim=-1)
        alpha = self.weight_of(step, drive_norm, unit_norm, rounding)
        prior = priors.resolve(self.prior).precision * (matrix @ theta)  # excluded from the ratio
        return drive + prior - alpha[..., None, None] * unit, drive_norm, alpha, unit_norm
