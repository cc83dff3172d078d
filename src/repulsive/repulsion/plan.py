"""Which slices one fused update covers and where they lie: built once, checked at every step, without host waits.

`REPULSIVE_KERNELS=eager|triton` chooses between this and the reference in `blocks`; by default CUDA takes Triton.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from torch import Tensor

from repulsive.errors import RuleError
from repulsive.heads.layout import HeadSlice
from repulsive.particles import bandwidths, kernels, noise, priors
from repulsive.particles.gram import Gram
from repulsive.particles.rule import Coefficients, Measure, Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.blocks import Piece

SPLITS = 16  # programs a slice: a power of two, enough that a dozen slices fill a GPU
MOST_HEADS = 64
COLUMNS = 14  # of the table of slices; `particles.fused` says what they are
_KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def wanted(device: torch.device) -> bool:
    """Whether updates on `device` go through Triton.

    Raises:
        RuleError: `REPULSIVE_KERNELS` is misspelt, or asks for Triton where there is none.
    """
    choice = os.environ.get("REPULSIVE_KERNELS", "")
    if choice not in ("", "eager", "triton"):
        raise RuleError(f"REPULSIVE_KERNELS={choice!r}: choose eager or triton")
    if choice == "eager" or (choice == "" and device.type != "cuda"):
        return False
    if not _has_triton():
        if choice == "triton":
            raise RuleError("REPULSIVE_KERNELS=triton, but the package triton is not installed")
        return False
    if device.type == "cuda":
        return True
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    raise RuleError("REPULSIVE_KERNELS=triton needs CUDA weights, or TRITON_INTERPRET=1 for Triton's interpreter")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def supports(rule: Rule | None) -> bool:
    """Rules of two matrices and plain noise; others go through the reference."""
    return rule is not None and rule.has_matrix_form and getattr(rule, "noise", "langevin") == "langevin"


def _solves(rule: Rule) -> TypeGuard[SVGD]:
    """Radial kernels, a named or fixed bandwidth, a given alpha: then the coefficients are one launch as well."""
    return (
        isinstance(rule, SVGD)
        and type(rule).drive is SVGD.drive
        and kernels.resolve(rule.kernel) in (kernels.RBF, kernels.IMQ)
        and not callable(rule.bandwidth)
        and rule.alpha != "auto"
    )


@dataclass(frozen=True)
class Row:
    """One slice: its parameter, offsets from the parameter's and the gradient's start (bytes), strides (elements)."""

    parameter: int
    offset: int
    strides: tuple[int, int, int]
    inner: int
    size: int
    elements: tuple[int, int]
    flat: bool


class Plan:
    """The table of one set of slices with equally many heads of one dtype on one device."""

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[int], seed: int) -> None:
        """Lay out `pieces`, sorted by group; `groups` are the groups they belong to, in order."""
        self.pieces = list(pieces)
        self.groups = list(groups)
        self.heads = pieces[0].slice.num_heads
        first = pieces[0].slice.parameter()
        self.device, self.dtype = first.device, first.dtype
        owners: dict[tuple[int, str], int] = {}
        self._owners = [piece.slice for piece in pieces if _is_new(owners, piece.slice)]
        self._rows = [_row(piece.slice, owners[id(piece.slice.module), piece.slice.attribute]) for piece in pieces]
        self._layout = [(s.parameter().shape, s.parameter().stride(), s.parameter().dtype) for s in self._owners]
        number = {group: index for index, group in enumerate(groups)}
        counts = [0] * (len(groups) + 1)
        for piece in pieces:
            counts[number[piece.group] + 1] += 1
        self.starts = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
        self._static = torch.tensor(
            [
                [0, *row.strides, 0, *row.strides, row.inner, row.size, *row.elements, number[piece.group],
                 noise.stream(seed, piece.noise_name)]
                for row, piece in zip(self._rows, pieces, strict=True)
            ]
        )  # fmt: skip
        self._index = torch.tensor([row.parameter for row in self._rows])
        self._offsets = torch.tensor([row.offset for row in self._rows])
        self._pointers: list[int] = []
        self.flat = all(row.flat for row in self._rows)
        self.aligned = False
        self.table = self._static.to(self.device)
        self._sigmas: list[float] = []
        self.sigmas = torch.zeros(len(pieces), device=self.device)
        self.steps = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        self._step = -1
        self.padded = max(2, 1 << (self.heads - 1).bit_length())
        heads, many = self.padded, len(pieces)
        self.products = torch.empty(many, SPLITS, heads, heads, device=self.device)
        self.to_mean = torch.empty(many, SPLITS, heads, device=self.device)
        self.mean2 = torch.empty(many, SPLITS, device=self.device)
        self.drive, self.force = torch.empty(2, len(groups), heads, heads, device=self.device)
        self.row_sums = torch.empty(len(groups), heads, device=self.device)

    def refresh(self) -> bool:
        """Point the table at where weights and gradients are now; False where they no longer fit the plan."""
        pointers: list[int] = []
        for owner, layout in zip(self._owners, self._layout, strict=True):
            parameter = owner.parameter()
            grad = parameter.grad
            if grad is None or (parameter.shape, parameter.stride(), parameter.dtype) != layout:
                return False
            if grad.stride() != layout[1] or grad.dtype != layout[2] or grad.layout != torch.strided:
                return False
            pointers += (parameter.data_ptr(), grad.data_ptr())
        if pointers != self._pointers:
            where = torch.tensor(pointers).view(-1, 2)[self._index]  # [pieces, 2]
            fresh = self._static.clone()
            fresh[:, 0] = where[:, 0] + self._offsets
            fresh[:, 4] = where[:, 1] + self._offsets
            self.aligned = self._is_aligned(fresh)
            if self.device.type == "cuda":
                fresh = fresh.pin_memory()
            self.table.copy_(fresh, non_blocking=True)
            self._pointers = pointers
        return True

    def _is_aligned(self, table: Tensor) -> bool:
        return bool((table[:, [0, 4]] % 16 == 0).all() and (table[:, [1, 5]] % 16 == 0).all())

    def run(
        self,
        rule: Rule,
        *,
        step: int,
        scale: Tensor | None = None,
        rates: Sequence[float] = (),
        draw_noise: bool = True,
        measure: bool = False,
    ) -> Measure | None:
        """Replace the gradients of all slices by what `rule` makes of them.

        Args:
            rule: what to do.
            step: optimiser steps taken so far.
            scale: what gradients are multiplied with right now, on the device.
            rates: learning rate of each slice, for the noise.
            draw_noise: False where the noise is added to parameters instead.
            measure: also measure every group.

        Returns:
            Tensors [groups], on the device, if asked for.
        """
        self._gram("THETA")
        measured = None
        if measure or not _solves(rule):
            found = self._coefficients(rule, step, scale, measure or rule.needs_gradient_products)
            measured = found.measure
        if _solves(rule):
            self._solve(rule, step)
        self._combine(scale, noisy=draw_noise and self._set_noise(rule, rates, step))
        return measured

    @property
    def _shape(self) -> dict[str, Any]:
        return {"M": self.heads, "MP": self.padded, "SPLITS": SPLITS}

    @property
    def _access(self) -> dict[str, Any]:
        return {"COLUMNS": COLUMNS, "FLAT": self.flat, "ALIGNED": self.aligned}

    @property
    def _kind(self) -> Any:
        import triton.language as tl

        return getattr(tl, _KINDS[self.dtype])

    def _gram(self, source: str) -> None:
        """Partial products of all slices, of their weights ("THETA") or gradients ("GRAD")."""
        from repulsive.particles import fused

        fused.gram_kernel[(len(self.pieces), SPLITS)](
            self.table, self.products, self.to_mean, self.mean2, SOURCE=getattr(fused, source), KIND=self._kind,
            BLOCK=_gram_block(self.padded), **self._shape, **self._access,
        )  # fmt: skip

    def _solve(self, rule: SVGD, step: int) -> None:
        """A, B and the row sums of B, in one launch."""
        from repulsive.particles import fused

        alpha = rule.alpha(step) if callable(rule.alpha) else rule.alpha
        fixed = 0.0 if isinstance(rule.bandwidth, str) else rule.bandwidth
        log = math.log(self.heads + (rule.bandwidth == "released")) if self.heads > 1 else 1.0
        fused.solve_kernel[(len(self.groups),)](
            self.products, self.to_mean, self.mean2, self.starts, self.drive, self.force, self.row_sums,
            rule.stepsize, alpha, rule.own_drive, rule.smoothing, priors.resolve(rule.prior).precision, fixed,
            bandwidths.FLOOR**2, log,
            BANDWIDTH={"paper": fused.PAPER, "released": fused.RELEASED}.get(str(rule.bandwidth), fused.FIXED),
            PROFILE=fused.RBF if kernels.resolve(rule.kernel) is kernels.RBF else fused.IMQ,
            SPHERE=rule.space == "sphere", num_warps=1 if self.padded <= 8 else 4, **self._shape,
        )  # fmt: skip

    def _combine(self, scale: Tensor | None, *, noisy: bool) -> None:
        """Write the new gradients."""
        from repulsive.particles import fused

        fused.combine_kernel[(len(self.pieces), SPLITS)](
            self.table, self.drive, self.force, self.row_sums, self.sigmas if scale is None else scale,
            self.sigmas, self.steps, T_KIND=self._kind, G_KIND=self._kind, BLOCK=_combine_block(self.padded),
            FORCE=True, SCALED=scale is not None, NOISE=noisy, **self._shape, **self._access,
        )  # fmt: skip

    def _coefficients(self, rule: Rule, step: int, scale: Tensor | None, with_gradients: bool) -> Coefficients:
        """The rule's own coefficients from the products, in eager torch; also into the buffers of `_combine`."""
        theta, grad = Gram(self._assembled()), None
        if with_gradients:
            self._gram("GRAD")
            products = self._assembled()
            grad = Gram(products if scale is None else products / scale.double().square())
            self._gram("THETA")  # the buffers hold one of the two
        found = rule.coefficients(theta, grad, step=step)
        inside = (slice(None), slice(self.heads), slice(self.heads))
        self.drive.zero_()[inside] = found.drive.float()
        self.force.zero_()
        self.row_sums.zero_()
        if found.force is not None:
            self.force[inside] = found.force.float()
            self.row_sums[:, : self.heads] = found.force.sum(-1).float()
        return found

    def _assembled(self) -> Tensor:
        """The products of every group [groups, M + 1, M + 1], from the partial ones of its slices."""
        heads = self.heads
        parts = torch.zeros(len(self.pieces), heads + 1, heads + 1, dtype=torch.float64, device=self.device)
        parts[:, :-1, :-1] = self.products[:, :, :heads, :heads].double().sum(1)
        parts[:, :-1, -1] = parts[:, -1, :-1] = self.to_mean[:, :, :heads].double().sum(1)
        parts[:, -1, -1] = self.mean2.double().sum(1)
        total = torch.zeros(len(self.groups), heads + 1, heads + 1, dtype=torch.float64, device=self.device)
        return total.index_add_(0, self.table[:, 12], parts)

    def _set_noise(self, rule: Rule, rates: Sequence[float], step: int) -> bool:
        """Bring sigma of every slice and the step counter to the device, if there is noise at all."""
        sigmas = [rule.noise_scale(rate) for rate in rates]
        if not any(sigmas):
            return False
        if sigmas != self._sigmas:
            self.sigmas.copy_(torch.tensor(sigmas), non_blocking=True)
            self._sigmas = sigmas
        self.steps.add_(1)  # inside a captured graph this goes on counting at every replay
        if step != self._step + 1:
            self.steps.fill_(step)
        self._step = step
        return True


def fits(part: HeadSlice) -> bool:
    """Whether a slice can be read in place by the fused kernels."""
    parameter = part.parameter()
    view = part.view(parameter)
    return (
        view is not None
        and parameter.dtype in _KINDS
        and part.num_heads <= MOST_HEADS
        and parameter.ndim == 2
        and part.dim < 2**31
    )


def _is_new(owners: dict[tuple[int, str], int], part: HeadSlice) -> bool:
    key = (id(part.module), part.attribute)
    if key in owners:
        return False
    owners[key] = len(owners)
    return True


def _row(part: HeadSlice, owner: int) -> Row:
    """Strides of a slice, its smaller one innermost so that neighbours in memory are read together."""
    parameter = part.parameter()
    view = part.view(parameter)
    assert view is not None
    heads_stride, row_stride, column_stride = view.stride()
    rows, columns = view.shape[1:]
    offset = int(view.storage_offset() - parameter.storage_offset()) * parameter.element_size()
    size = rows * columns
    if column_stride == 1 and (row_stride == columns or rows == 1):
        return Row(owner, offset, (heads_stride, 0, 1), size, size, (0, 1), True)
    if column_stride <= row_stride:
        return Row(owner, offset, (heads_stride, row_stride, column_stride), columns, size, (columns, 1), False)
    return Row(owner, offset, (heads_stride, column_stride, row_stride), rows, size, (1, columns), False)


def _gram_block(padded: int) -> int:
    """Columns a program reads at once: about 4,096 accumulators, as many as registers hold comfortably."""
    return {2: 1024, 4: 256, 8: 64}.get(padded, 128)


def _combine_block(padded: int) -> int:
    return max(64, 2048 // padded)
