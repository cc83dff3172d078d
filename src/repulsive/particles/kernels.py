r"""Kernels: the similarity of two heads, and the force that drives them apart.

A kernel with a matrix form gives, from the Gram matrix alone, K and R with

$$K_{ij} = \kappa(\theta_j, \theta_i), \qquad (R\,\theta)_i = \sum_j \nabla_{\theta_j} \kappa(\theta_j, \theta_i),$$

so one update needs only two small matrices. With `space="sphere"` the kernel sees unit-norm heads u = theta / |theta|
and the force on head i is $-\nabla_{\theta_i} \sum_j \kappa(u_j, u_i)$. This force is tangential to the sphere, so it
does not change norms. A zero head has no direction: u = 0, and it neither exerts nor receives a force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from repulsive.errors import RuleError, did_you_mean
from repulsive.particles import bandwidths
from repulsive.particles.bandwidths import Bandwidth
from repulsive.particles.gram import Gram
from repulsive.particles.noise import normal

KernelName = Literal["rbf", "imq", "cosine", "hinge"]
Space = Literal["weights", "sphere", "logits"]
SPACES: tuple[str, ...] = get_args(Space)
# A head with a norm below this share of the root mean square of all norms counts as zero. Squared norms from float32
# sums are accurate to 1e-7 of the mean square: the force between two heads at this bound is then off by 0.2 %, and
# between heads ten times shorter by 9 %.
SHORTEST = 3e-3


@dataclass(frozen=True)
class Interaction:
    """Kernel values and repulsion matrices of a batch of groups.

    Args:
        values: K [..., M, M].
        repulsion: R [..., M, M].
        bandwidth: h [...]; NaN for a kernel without a bandwidth.
    """

    values: Tensor
    repulsion: Tensor
    bandwidth: Tensor


@runtime_checkable
class Kernel(Protocol):
    """Interface of a kernel whose values and forces follow from the Gram matrix alone (a matrix form)."""

    def interact(self, gram: Gram, bandwidth: Bandwidth, space: str) -> Interaction:
        """Compute K, R and the bandwidth h from the Gram matrix."""
        ...


@dataclass(frozen=True)
class Radial:
    r"""$\kappa = f(d^2 / h)$, with `profile(r)` giving f(r) and -f'(r).

    Weights: $R = 2\,(\mathrm{diag}(w 1) - w)$ with $w = -f'(d^2/h) / h$. Sphere: $R_{ij} = -2 w_{ij} / (|\theta_i|
    |\theta_j|)$ and $R_{ii} = \sum_{j \ne i} 2 w_{ij} \cos_{ij} / |\theta_i|^2$.

    Args:
        name: name of the kernel.
        profile: r [..., M, M] -> (f(r), -f'(r)).
    """

    name: str
    profile: Callable[[Tensor], tuple[Tensor, Tensor]]

    def interact(self, gram: Gram, bandwidth: Bandwidth, space: str) -> Interaction:
        if space != "weights":
            return self._on_sphere(gram, bandwidth)
        values, weight, h = self._evaluate(gram.squared_distances, bandwidth, gram.squared_norms.mean(-1))
        return Interaction(values, 2 * (torch.diag_embed(weight.sum(-1)) - weight), h)

    def _on_sphere(self, gram: Gram, bandwidth: Bandwidth) -> Interaction:
        d2, norms2 = gram.squared_distances, gram.squared_norms  # [..., M, M], [..., M]
        zero = _are_zero(norms2)
        norms = torch.where(zero, torch.ones_like(norms2), norms2).sqrt()
        outer = norms.unsqueeze(-1) * norms.unsqueeze(-2)
        # |u_i - u_j|^2 from d2, not from 2 - 2 cos, which loses its digits for nearly equal heads.
        d2 = ((d2 - (norms.unsqueeze(-1) - norms.unsqueeze(-2)).square()) / outer).clamp(min=0)
        one_zero = zero.unsqueeze(-1) != zero.unsqueeze(-2)  # their distance is 1
        any_zero = zero.unsqueeze(-1) | zero.unsqueeze(-2)
        d2 = torch.where(any_zero, one_zero.to(d2), d2)
        scale2 = torch.full_like(norms2[..., 0], max(1.0, gram.resolution / bandwidths.FLOOR) ** 2)
        values, weight, h = self._evaluate(d2, bandwidth, scale2)
        weight = torch.where(any_zero, torch.zeros_like(weight), weight)
        own = (2 * weight * (1 - d2 / 2)).sum(-1) / norms.square()  # 1 - d2 / 2 is the cosine
        return Interaction(values, torch.diag_embed(own) - 2 * weight / outer, h)

    def _evaluate(self, d2: Tensor, bandwidth: Bandwidth, scale2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute K and w [..., M, M], with zeros on the diagonal of w, and h [...]; `scale2` as in `resolve`."""
        h = bandwidths.resolve(bandwidth, d2, scale2)
        all_zero = (h == 0)[..., None, None]  # all particles are zero: there is no force
        safe = torch.where(all_zero, torch.ones_like(d2), h[..., None, None])
        values, slope = self.profile(d2 / safe)
        weight = torch.where(all_zero, torch.zeros_like(d2), slope / safe)
        return values, weight - torch.diag_embed(weight.diagonal(dim1=-2, dim2=-1)), h


def _rbf(ratio: Tensor) -> tuple[Tensor, Tensor]:
    value = torch.exp(-ratio)
    return value, value


def _imq(ratio: Tensor) -> tuple[Tensor, Tensor]:
    base = 1 + ratio
    return base.pow(-0.5), 0.5 * base.pow(-1.5)


RBF = Radial("rbf", _rbf)
IMQ = Radial("imq", _imq)


@dataclass(frozen=True)
class Cosine:
    r"""$\kappa = \cos(\theta_i, \theta_j)$, the kernel of the appendix's ladder; it has no bandwidth.

    Weights: $\nabla_{\theta_j}\kappa = (u_i - \cos_{ij} u_j) / |\theta_j|$. Sphere: the force of head j on head i is
    $-(u_j - \cos_{ij} u_i) / |\theta_i|$. A zero head has cosine 0 with all others and receives no force.
    """

    name: str = "cosine"

    def interact(self, gram: Gram, bandwidth: Bandwidth, space: str) -> Interaction:
        inverse, pair, cosine = _cosines(gram)
        eye = torch.eye(cosine.shape[-1], dtype=cosine.dtype, device=cosine.device)
        off = 1 - eye
        if space == "weights":
            own = (off * pair).sum(-1)
            repulsion = torch.diag_embed(own) - off * cosine * inverse.square().unsqueeze(-2)
        else:
            repulsion = _along_sphere(off, inverse, pair, cosine)
        return Interaction(off * cosine + eye, repulsion, torch.full_like(inverse[..., 0], torch.nan))


@dataclass(frozen=True)
class Hinge:
    r"""$\kappa = \max(0, \cos(\theta_i, \theta_j) - t)$: repulsion between near-duplicates only, along the sphere.

    Heads with a cosine of at most t do not interact. Above t the force of head j on head i is that of `Cosine`,
    $-(u_j - \cos_{ij} u_i) / |\theta_i|$. The kernel has no bandwidth.

    Args:
        threshold: t, the largest cosine at which two heads are left alone.

    Raises:
        RuleError: the threshold is not between 0 and 1.
    """

    threshold: float = 0.5
    name: str = "hinge"

    def __post_init__(self) -> None:
        try:
            is_valid = bool(0 <= self.threshold < 1)
        except TypeError:
            is_valid = False
        if not is_valid:
            raise RuleError(f"Hinge(threshold={self.threshold!r}): must be a number, at least 0 and below 1")

    def interact(self, gram: Gram, bandwidth: Bandwidth, space: str) -> Interaction:
        if space == "weights":
            raise RuleError("kernel='hinge' compares directions: choose space='sphere' or space='logits'")
        inverse, pair, cosine = _cosines(gram)
        off = 1 - torch.eye(cosine.shape[-1], dtype=cosine.dtype, device=cosine.device)
        # Products instead of torch.where: zero times NaN is NaN, so a NaN in a head is not hidden.
        near = off * (cosine > self.threshold)
        values = (cosine - self.threshold).clamp(min=0)
        repulsion = _along_sphere(near, inverse, pair, cosine)
        return Interaction(values, repulsion, torch.full_like(inverse[..., 0], torch.nan))


@dataclass(frozen=True)
class Differentiable:
    """A kernel without a matrix form: a callable whose force is computed by autograd.

    It needs the particles themselves, so it is slower than kernels with a matrix form. Use it to try new kernels.

    Args:
        function: k(x, y) on broadcastable [..., D] tensors, which returns [...].
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def pairs(self, theta: Tensor, space: str) -> tuple[Tensor, Tensor]:
        """Compute K [..., M, M] and the force [..., M, D] on each particle.

        Many kernels exert no force between a head and itself or an equal one, up to rounding errors. These are left
        out: if no other heads interact, they are all that alpha="auto" would scale up.
        """
        values, forces = [], []
        theta = theta.detach()
        zero = _are_zero(theta.square().sum(-1)).unsqueeze(-1)  # [..., M, 1]
        theta = torch.where(zero, 0, theta) if space == "sphere" else theta
        for i in range(theta.shape[-2]):
            own = theta[..., i : i + 1, :].expand_as(theta)
            with torch.enable_grad():
                varied = (own if space == "sphere" else theta).clone().requires_grad_()  # [..., M, D]
                row = self.function(_unit(theta), _unit(varied)) if space == "sphere" else self.function(varied, own)
                (slope,) = torch.autograd.grad(row.sum(), varied)  # [..., M, D], one slope per pair
            is_equal = (theta == own).all(-1, keepdim=True)
            force = torch.where(is_equal, _without_rounding(slope, theta, row.detach()), slope).sum(-2)
            values.append(row.detach())
            forces.append(torch.where(zero[..., i, :], 0, -force) if space == "sphere" else force)
        return torch.stack(values, dim=-2), torch.stack(forces, dim=-2)

    def rounding_of(self, theta: Tensor, space: str, force: Tensor) -> Tensor:
        """Estimate the norm of `force` below which it is rounding error: [..., M, D] -> [...].

        It is twice the change of the force if every number of the particles changes by a few rounding errors. The force
        that a cosine exerts between parallel heads, for example, changes by as much as itself.
        """
        bits = theta.detach().contiguous().view(torch.int64 if theta.dtype == torch.float64 else torch.int32)
        noise = normal(0, bits, dtype=theta.dtype)  # a function of the number, so equal heads stay equal
        near = theta * (1 + 4 * torch.finfo(theta.dtype).eps * noise)
        change: Tensor = (self.pairs(near, space)[1] - force).flatten(-2).norm(dim=-1)
        return 2 * change


NAMED: dict[str, Kernel] = {"rbf": RBF, "imq": IMQ, "cosine": Cosine(), "hinge": Hinge()}


AnyKernel = KernelName | Kernel | Callable[[Tensor, Tensor], Tensor]


def resolve(kernel: AnyKernel) -> Kernel | Differentiable:
    """Resolve a kernel setting: look up a name, wrap a plain callable, and return a kernel unchanged.

    Raises:
        RuleError: the name is unknown, or the setting is neither a name, a kernel nor a callable; a class is not.
    """
    if isinstance(kernel, str):
        if kernel not in NAMED:
            hint = did_you_mean(kernel, NAMED)
            known = sorted(NAMED)
            raise RuleError(f"kernel={kernel!r} is unknown; {hint}choose one of {known} or give a callable k(x, y)")
        return NAMED[kernel]
    if isinstance(kernel, type):
        raise RuleError(f"kernel={kernel.__name__}: expected a kernel, got a class; write {kernel.__name__}(...)")
    if isinstance(kernel, Differentiable | Kernel):
        return kernel
    if callable(kernel):
        return Differentiable(kernel)
    raise RuleError(f"kernel={kernel!r} is neither a name, a kernel nor a callable k(x, y)")


def _are_zero(norms2: Tensor) -> Tensor:
    """Find heads that count as zero, as a mask [..., M], from squared norms that contain rounding errors."""
    return norms2 <= SHORTEST**2 * norms2.mean(-1, keepdim=True).clamp(min=0)


def _cosines(gram: Gram) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 / |theta_i| [..., M], 1 / (|theta_i| |theta_j|) and cosines [..., M, M]; all are 0 for a zero head."""
    norms2 = gram.squared_norms  # [..., M]
    zero = _are_zero(norms2)
    inverse = torch.where(zero, 0, 1 / torch.where(zero, 1, norms2).sqrt())
    pair = inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    return inverse, pair, gram.inner * pair


def _along_sphere(chosen: Tensor, inverse: Tensor, pair: Tensor, cosine: Tensor) -> Tensor:
    """Compute R of the cosine on the sphere over the chosen pairs, [..., M, M]; the others are as in `_cosines`."""
    own = (chosen * cosine).sum(-1) * inverse.square()
    return torch.diag_embed(own) - chosen * pair


def _without_rounding(slope: Tensor, theta: Tensor, row: Tensor) -> Tensor:
    """Set slopes of a kernel to zero that change its values by less than their rounding errors.

    Args:
        slope: slopes by particles [..., M, D].
        theta: the particles [..., M, D].
        row: values of the kernel [..., M].
    """
    change = slope.norm(dim=-1) * theta.norm(dim=-1)  # [..., M]
    error = 64 * torch.finfo(row.dtype).eps * row.abs().amax(-1, keepdim=True)
    return torch.where((change <= error).unsqueeze(-1), 0, slope)


def _unit(x: Tensor) -> Tensor:
    """Normalise rows to unit length; keep zero rows, because new adapters start at zero."""
    norm = x.norm(dim=-1, keepdim=True)
    return x / torch.where(norm == 0, 1, norm)
