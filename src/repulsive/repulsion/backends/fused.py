"""Fused update: three Triton launches over a table of slices, replayed as one CUDA graph, without waiting on the host.

The environment variable `REPULSIVE_KERNELS` chooses between this backend and `eager`, which is its reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles import bandwidths
from repulsive.particles.gram import Gram
from repulsive.particles.rule import Coefficients, Measure, RadialForm, Rule
from repulsive.repulsion.backends.addresses import COLUMNS, DTYPES, SliceTable, send

SPLITS = 16  # smallest number of programs per slice; a power of two
BUSY = 528  # programs that keep a large GPU busy; a few slices are split further to get as many
LEAST = 1024  # smallest number of elements of a head per program
_HAS_CUDA = torch.backends.cuda.is_built()
PRECISION = "tf32x3"  # precision of matrix products on tensor cores

# Launch settings by number of heads, padded to a power of two: a program reads as many columns as registers hold.
GRAM: dict[int, dict[str, int]] = {
    2: {"BLOCK": 1024, "LANES": 1, "num_warps": 2},
    4: {"BLOCK": 512, "LANES": 1, "num_warps": 2},
    8: {"BLOCK": 128, "LANES": 1, "num_warps": 2},
    16: {"BLOCK": 128, "LANES": 4, "num_warps": 4},
    32: {"BLOCK": 64, "LANES": 1, "num_warps": 2, "num_stages": 3},
    64: {"BLOCK": 32, "LANES": 1, "num_warps": 4, "num_stages": 3},
}
SOLVE: dict[int, dict[str, int]] = {
    2: {"CHUNK": 16, "num_warps": 1},
    4: {"CHUNK": 16, "num_warps": 1},
    8: {"CHUNK": 16, "num_warps": 1},
    16: {"CHUNK": 1, "num_warps": 2},
    32: {"CHUNK": 1, "num_warps": 4},
    64: {"CHUNK": 1, "num_warps": 16},
}
COMBINE: dict[int, dict[str, int]] = {
    2: {"BLOCK": 2048, "num_warps": 4},
    4: {"BLOCK": 1024, "num_warps": 4},
    8: {"BLOCK": 256, "num_warps": 8},
    16: {"BLOCK": 128, "num_warps": 4, "num_stages": 3},
    32: {"BLOCK": 64, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK": 32, "num_warps": 4, "num_stages": 1},
}


def _splits(slices: int, dim: int) -> int:
    """Choose the number of programs per slice."""
    splits = SPLITS
    while slices * splits < BUSY and dim >= 2 * splits * LEAST:
        splits *= 2
    return splits


class FusedUpdate:
    """The update of groups with the same number of heads, dtype and device: table of slices, buffers and launches.

    Args:
        groups: the groups.
        seed: seed of the noise.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self.table = SliceTable(groups, seed)
        self.heads = groups[0].num_heads
        self.padded = max(2, 1 << (self.heads - 1).bit_length())
        heads, slices, device = self.padded, len(self.table.parts), self.table.device
        self.splits = _splits(slices, max(group.dim for group in groups))
        self.products = torch.empty(slices, self.splits, heads, heads, device=device)
        self.to_mean = torch.empty(slices, self.splits, heads, device=device)
        self.mean2 = torch.empty(slices, self.splits, device=device)
        self.drive, self.force = torch.empty(2, len(groups), heads, heads, device=device)
        self.row_sums = torch.empty(len(groups), heads, device=device)
        self.scale = torch.ones(1, device=device)
        self.steps = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._step = -1
        self._repeatable: tuple[bool, bool] | None = None  # (noisy, scaled) of the last run; None: not repeatable
        self._rule: Rule | None = None  # the rule that the graphs were captured with
        self._settings = _DeviceNumbers(8, device)  # settings of the rule, which a schedule may change at any step
        self._sigmas = _DeviceNumbers(slices, device)
        self.scaled_sigmas = torch.zeros(slices, device=device)  # for a rule that scales its noise by gradients
        by_size: dict[int, list[int]] = {}
        for index, group in enumerate(groups):
            by_size.setdefault(group.dim, []).append(index)
        self._same_size = list(by_size.values())  # for each size, indices of the groups of that size
        positions = torch.tensor([index for indices in self._same_size for index in indices]).argsort()
        self._position_of = positions[self.table.group_of].to(device)  # position of each slice's group in `_same_size`
        self._graphs = _GraphCache()  # graphs captured with `_rule`

    def refresh(self) -> bool:
        """Point the table at the current weights and gradients; return False if they no longer fit it."""
        return self.table.refresh()

    def graph_to_repeat(self, rule: Rule | None) -> torch.cuda.CUDAGraph | None:
        """Return a CUDA graph that repeats the last `run` on the current gradients; None if there is none.

        A run can be repeated if it depends on nothing but the addresses of weights and gradients.
        """
        if self._repeatable is None or rule is not self._rule or not self.table.refresh(quickly=True):
            return None
        return self._graphs.get((*self._repeatable, self.table.current.index, self.table.current.aligned))

    def run(
        self,
        rule: Rule,
        rates: Mapping[int, float],
        *,
        step: int,
        scale: Tensor | None = None,
        draw_noise: bool = True,
        measure: bool = False,
    ) -> Measure | None:
        """Replace the gradients of all slices by the direction of a rule; see `Update.run`.

        Returns:
            Tensors [groups], on the device, if `measure`.
        """
        self._repeatable = None
        noisy = draw_noise and self._set_noise(rule, rates, step, scale)
        if scale is not None:
            self.scale.copy_(scale)
        scaled = scale is not None
        form = None if measure else rule.radial_form(step)
        if form is None:
            coefficients = self._coefficients(rule, step, scale, measure or rule.needs_gradient_products)
            self._combine(rule, noisy=noisy, scaled=scaled)
            return coefficients.measure
        if rule is not self._rule:
            self._rule, self._graphs = rule, _GraphCache()
        self._settings.set(self._settings_of(form))

        def launch() -> None:
            self._gram("THETA")
            self._solve(form)
            self._combine(rule, noisy=noisy, scaled=scaled)

        pointers = self.table.current
        self._graphs.run(launch, (noisy, scaled, pointers.index, pointers.aligned), self.table.device)
        if not noisy and not scaled and not form.has_schedule:
            self._repeatable = noisy, scaled
        return None

    def _settings_of(self, form: RadialForm) -> list[float]:
        """List the numbers that `solve_kernel` reads, in the order in which it reads them."""
        fixed = 0.0 if isinstance(form.bandwidth, str) else form.bandwidth
        log = math.log(self.heads + (form.bandwidth == "released")) if self.heads > 1 else 1.0
        weights = [form.stepsize, form.alpha, form.own_drive, form.smoothing, form.precision]
        return [*weights, fixed, bandwidths.FLOOR**2, log]

    @property
    def _shape(self) -> dict[str, Any]:
        return {"M": self.heads, "MP": self.padded, "SPLITS": self.splits}

    @property
    def _access(self) -> dict[str, Any]:
        import triton.language as tl

        kind = getattr(tl, DTYPES[self.table.dtype])
        return {"COLUMNS": COLUMNS, "KIND": kind, "FLAT": self.table.flat, "ALIGNED": self.table.current.aligned}

    def _gram(self, source: str) -> None:
        """Compute partial products of all slices: of their weights ("THETA") or gradients ("GRAD")."""
        from repulsive.repulsion.backends import triton_kernels

        triton_kernels.gram_kernel[(len(self.table.parts), self.splits)](
            self.table.rows,
            self.table.current.pointers,
            self.products,
            self.to_mean,
            self.mean2,
            SOURCE=getattr(triton_kernels, source),
            PRECISION=PRECISION,
            **GRAM[self.padded],
            **self._shape,
            **self._access,
        )

    def _solve(self, form: RadialForm) -> None:
        """Compute A, B and the row sums of B in one launch."""
        from repulsive.repulsion.backends import triton_kernels

        medians = {"paper": triton_kernels.PAPER, "released": triton_kernels.RELEASED}
        launch = SOLVE[self.padded]
        chunk = self.splits if self.splits == launch["CHUNK"] else 1  # all at once, or one by one
        triton_kernels.solve_kernel[(len(self.groups),)](
            self.products,
            self.to_mean,
            self.mean2,
            self.table.starts,
            self._settings.tensor,
            self.drive,
            self.force,
            self.row_sums,
            BANDWIDTH=medians.get(str(form.bandwidth), triton_kernels.FIXED),
            PROFILE=triton_kernels.RBF if form.kernel == "rbf" else triton_kernels.IMQ,
            SPHERE=form.on_sphere,
            CHUNK=chunk,
            num_warps=launch["num_warps"],
            **self._shape,
        )

    def _combine(self, rule: Rule, *, noisy: bool, scaled: bool) -> None:
        """Write the new gradients, and count the step for the noise."""
        from repulsive.repulsion.backends import triton_kernels

        if noisy:
            self.steps.add_(1)  # on the device, so that replays of a captured graph count as well
        triton_kernels.combine_kernel[(len(self.table.parts), self.splits)](
            self.table.rows,
            self.table.current.pointers,
            self.drive,
            self.force,
            self.row_sums,
            self.scale,
            self.scaled_sigmas if rule.scales_noise else self._sigmas.tensor,
            self.steps,
            SCALED=scaled,
            NOISE=noisy,
            PRECISION=PRECISION,
            **COMBINE[self.padded],
            **self._shape,
            **self._access,
        )

    def _coefficients(self, rule: Rule, step: int, scale: Tensor | None, with_gradients: bool) -> Coefficients:
        """Compute the rule's own coefficients in eager torch, and copy them to the buffers that `_combine` reads."""
        self._gram("THETA")
        theta, grad = Gram(self._products_of_groups()), None
        if with_gradients:
            self._gram("GRAD")
            products = self._products_of_groups()
            grad = Gram(products if scale is None else products / scale.double().square())
        coefficients = rule.coefficients(theta, grad, step=step)
        inside = (slice(None), slice(self.heads), slice(self.heads))
        self.drive.zero_()[inside] = coefficients.drive.float()
        self.force.zero_()
        self.row_sums.zero_()
        if coefficients.force is not None:
            self.force[inside] = coefficients.force.float()
            self.row_sums[:, : self.heads] = coefficients.force.sum(-1).float()
        return coefficients

    def _products_of_groups(self) -> Tensor:
        """Sum the partial products of the slices of each group: [groups, M + 1, M + 1]."""
        heads, device = self.heads, self.table.device
        parts = torch.zeros(len(self.table.parts), heads + 1, heads + 1, dtype=torch.float64, device=device)
        parts[:, :-1, :-1] = self.products[:, :, :heads, :heads].double().sum(1)
        parts[:, :-1, -1] = parts[:, -1, :-1] = self.to_mean[:, :, :heads].double().sum(1)
        parts[:, -1, -1] = self.mean2.double().sum(1)
        total = torch.zeros(len(self.groups), heads + 1, heads + 1, dtype=torch.float64, device=device)
        return total.index_add_(0, self.table.rows[:, 7], parts)

    def _set_noise(self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None) -> bool:
        """Send sigma of every slice and the step counter to the device; return whether there is any noise."""
        if not rates:
            return False
        own = [rates.get(id(parameter), 0.0) for parameter in self.table.parameters]
        scales = {rate: rule.noise_scale(rate) for rate in set(own)}
        if not any(scales.values()):
            return False
        self._sigmas.set([scales[own[parameter]] for parameter in self.table.parameter_of])
        if rule.scales_noise:
            torch.mul(self._sigmas.tensor, self._noise_factors(rule, scale), out=self.scaled_sigmas)
        if step != self._step + 1:
            self.steps.fill_(step - 1)  # `_combine` adds one
        self._step = step
        return True

    def _noise_factors(self, rule: Rule, scale: Tensor | None) -> Tensor:
        """Compute the rule's `noise_factor` for every slice, [slices], with one call for all groups of one size."""
        factors = []
        for indices in self._same_size:
            grad = torch.stack([self.table.gradient(index) for index in indices]).float()  # [groups, M, D]
            factors.append(rule.noise_factor(grad if scale is None else grad / scale))
        return torch.cat(factors)[self._position_of]


class _DeviceNumbers:
    """A few numbers on the device, sent only when they change."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, device=device)
        self._values: list[float] = []

    def set(self, values: list[float]) -> None:
        if values != self._values:
            send(torch.tensor(values), self.tensor)
            self._values = values


class _GraphCache:
    """Cache of CUDA graphs of launches that depend on nothing but device memory.

    Three Triton launches cost the host about 0.1 ms; a graph replay costs a tenth of that.
    """

    def __init__(self) -> None:
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._compiled: set[object] = set()

    def get(self, key: object) -> torch.cuda.CUDAGraph | None:
        """Return a captured graph; None if there is none, or while the user's own graph is being captured."""
        graph = self._graphs.get(key)
        return None if graph is None or (_HAS_CUDA and torch.cuda.is_current_stream_capturing()) else graph

    def run(self, launch: Callable[[], None], key: object, device: torch.device) -> None:
        """Launch directly at the first call, which compiles; capture a graph at the second; replay it afterwards."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            launch()
        elif key in self._graphs:
            self._graphs[key].replay()
        elif key not in self._compiled:
            self._compiled.add(key)
            launch()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
            self._graphs[key] = graph
            graph.replay()
