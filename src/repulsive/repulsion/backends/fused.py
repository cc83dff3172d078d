"""The fused update: three launches over a table of slices, replayed as one graph, nothing waited for.

`REPULSIVE_KERNELS=eager|triton` chooses between this and the reference in `blocks`; by default CUDA takes Triton.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles import bandwidths
from repulsive.particles.gram import Gram
from repulsive.particles.rule import Coefficients, Measure, RadialForm, Rule
from repulsive.repulsion.backends.addresses import COLUMNS, KINDS, SliceTable, send

SPLITS = 16  # programs a slice, at least: a power of two
BUSY = 528  # programs that keep a large GPU busy; few slices are split further until there are so many
LEAST = 1024  # numbers of a head that are worth a program
_HAS_CUDA = torch.backends.cuda.is_built()
PRECISION = "tf32x3"  # of products by matrix units

# How the launches are cut, by heads padded to a power of two: as many columns at once as registers hold.
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


def supports(rule: Rule | None) -> bool:
    """Rules of two matrices; others go through the reference."""
    return rule is not None and rule.has_matrix_form


def _splits(slices: int, dim: int) -> int:
    """Programs a slice."""
    splits = SPLITS
    while slices * splits < BUSY and dim >= 2 * splits * LEAST:
        splits *= 2
    return splits


class Plan:
    """A table of slices, the small matrices of their groups, and the launches that work on them."""

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
        self._last: tuple[bool, bool] | None = (
            None  # the kind of the last launches, if they may be repeated as they are
        )
        self._rule: Rule | None = None  # whose settings were sent last
        self._numbers = _OnDevice(8, device)  # the rule's settings: a schedule may change them at any step
        self._sigmas = _OnDevice(slices, device)
        self.sigmas = torch.zeros(slices, device=device)  # those of a rule that multiplies them with its own factors
        by_size: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            by_size.setdefault(group.dim, []).append(number)
        self._alike = list(by_size.values())  # numbers of groups of one size
        ranks = torch.tensor([number for numbers in self._alike for number in numbers]).argsort()
        self._rank_of = ranks[self.table.group_of].to(device)  # of every slice: where its group stands in `_alike`
        self._graph = _Replay()  # of that rule

    def refresh(self) -> bool:
        """Point at where weights and gradients are now; False where they no longer fit the plan."""
        return self.table.refresh()

    def again(self, rule: Rule | None) -> torch.cuda.CUDAGraph | None:
        """What repeats the last `run`, if it depends on nothing but where weights and gradients are."""
        if self._last is None or rule is not self._rule or not self.table.refresh(quickly=True):
            return None
        return self._graph.known((*self._last, self.table.place.number, self.table.place.aligned))

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
        """Replace the gradients of all slices by what `rule` makes of them; see `Update.run`.

        Returns:
            Tensors [groups], on the device, if asked for.
        """
        self._last = None
        noisy = draw_noise and self._set_noise(rule, rates, step, scale)
        if scale is not None:
            self.scale.copy_(scale)
        scaled = scale is not None
        form = None if measure else rule.radial_form(step)
        if form is None:
            found = self._coefficients(rule, step, scale, measure or rule.needs_gradient_products)
            self._combine(rule, noisy=noisy, scaled=scaled)
            return found.measure
        if rule is not self._rule:
            self._rule, self._graph = rule, _Replay()
        self._numbers.set(self._settings(form))

        def launch() -> None:
            self._gram("THETA")
            self._solve(form)
            self._combine(rule, noisy=noisy, scaled=scaled)

        place = self.table.place
        self._graph.run(launch, (noisy, scaled, place.number, place.aligned), self.table.device)
        if not noisy and not scaled and not form.has_schedule:
            self._last = noisy, scaled
        return None

    def _settings(self, form: RadialForm) -> list[float]:
        """The numbers that `solve_kernel` reads, in its order."""
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

        kind = getattr(tl, KINDS[self.table.dtype])
        return {"COLUMNS": COLUMNS, "KIND": kind, "FLAT": self.table.flat, "ALIGNED": self.table.place.aligned}

    def _gram(self, source: str) -> None:
        """Partial products of all slices, of their weights ("THETA") or gradients ("GRAD")."""
        from repulsive.repulsion.backends import triton_kernels as fused

        fused.gram_kernel[(len(self.table.parts), self.splits)](
            self.table.rows,
            self.table.place.pointers,
            self.products,
            self.to_mean,
            self.mean2,
            SOURCE=getattr(fused, source),
            PRECISION=PRECISION,
            **GRAM[self.padded],
            **self._shape,
            **self._access,
        )

    def _solve(self, form: RadialForm) -> None:
        """A, B and the row sums of B, in one launch."""
        from repulsive.repulsion.backends import triton_kernels as fused

        cut = SOLVE[self.padded]
        chunk = self.splits if self.splits == cut["CHUNK"] else 1  # all at once, or one by one
        fused.solve_kernel[(len(self.groups),)](
            self.products,
            self.to_mean,
            self.mean2,
            self.table.starts,
            self._numbers.tensor,
            self.drive,
            self.force,
            self.row_sums,
            BANDWIDTH={"paper": fused.PAPER, "released": fused.RELEASED}.get(str(form.bandwidth), fused.FIXED),
            PROFILE=fused.RBF if form.kernel == "rbf" else fused.IMQ,
            SPHERE=form.on_sphere,
            CHUNK=chunk,
            num_warps=cut["num_warps"],
            **self._shape,
        )

    def _combine(self, rule: Rule, *, noisy: bool, scaled: bool) -> None:
        """Write the new gradients; count the step where noise depends on it."""
        from repulsive.repulsion.backends import triton_kernels as fused

        if noisy:
            self.steps.add_(1)  # inside a captured graph this goes on counting at every replay
        fused.combine_kernel[(len(self.table.parts), self.splits)](
            self.table.rows,
            self.table.place.pointers,
            self.drive,
            self.force,
            self.row_sums,
            self.scale,
            self.sigmas if rule.scales_noise else self._sigmas.tensor,
            self.steps,
            SCALED=scaled,
            NOISE=noisy,
            PRECISION=PRECISION,
            **COMBINE[self.padded],
            **self._shape,
            **self._access,
        )

    def _coefficients(self, rule: Rule, step: int, scale: Tensor | None, with_gradients: bool) -> Coefficients:
        """The rule's own coefficients from the products, in eager torch, into the buffers of `_combine`."""
        self._gram("THETA")
        theta, grad = Gram(self._assembled()), None
        if with_gradients:
            self._gram("GRAD")
            products = self._assembled()
            grad = Gram(products if scale is None else products / scale.double().square())
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
        heads, device = self.heads, self.table.device
        parts = torch.zeros(len(self.table.parts), heads + 1, heads + 1, dtype=torch.float64, device=device)
        parts[:, :-1, :-1] = self.products[:, :, :heads, :heads].double().sum(1)
        parts[:, :-1, -1] = parts[:, -1, :-1] = self.to_mean[:, :, :heads].double().sum(1)
        parts[:, -1, -1] = self.mean2.double().sum(1)
        total = torch.zeros(len(self.groups), heads + 1, heads + 1, dtype=torch.float64, device=device)
        return total.index_add_(0, self.table.rows[:, 7], parts)

    def _set_noise(self, rule: Rule, rates: Mapping[int, float], step: int, scale: Tensor | None) -> bool:
        """Bring sigma of every slice and the step counter to the device, if there is noise at all."""
        if not rates:
            return False
        own = [rates.get(id(parameter), 0.0) for parameter in self.table.parameters]
        scales = {rate: rule.noise_scale(rate) for rate in set(own)}
        if not any(scales.values()):
            return False
        self._sigmas.set([scales[own[owner]] for owner in self.table.owner_of])
        if rule.scales_noise:
            torch.mul(self._sigmas.tensor, self._noise_factors(rule, scale), out=self.sigmas)
        if step != self._step + 1:
            self.steps.fill_(step - 1)  # `_combine` adds one
        self._step = step
        return True

    def _noise_factors(self, rule: Rule, scale: Tensor | None) -> Tensor:
        """The rule's own factor of every slice, [slices]; groups of one size go through one call."""
        factors = []
        for numbers in self._alike:
            grad = torch.stack([self.table.gradient(number) for number in numbers]).float()  # [groups, M, D]
            factors.append(rule.noise_factor(grad if scale is None else grad / scale))
        return torch.cat(factors)[self._rank_of]


class _OnDevice:
    """A few numbers on the device, sent only when they change."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, device=device)
        self._values: list[float] = []

    def set(self, values: list[float]) -> None:
        if values != self._values:
            send(torch.tensor(values), self.tensor)
            self._values = values


class _Replay:
    """Launch by launch the first times; then one graph, as the launches depend on nothing but device memory.

    Three Triton launches cost the host about 0.1 ms, a replay a tenth of that.
    """

    def __init__(self) -> None:
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._seen: set[object] = set()

    def known(self, key: object) -> torch.cuda.CUDAGraph | None:
        """The graph of these launches, unless somebody is capturing one of his own."""
        graph = self._graphs.get(key)
        return None if graph is None or (_HAS_CUDA and torch.cuda.is_current_stream_capturing()) else graph

    def run(self, launch: Any, key: object, device: torch.device) -> None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            launch()
        elif key in self._graphs:
            self._graphs[key].replay()
        elif key not in self._seen:  # the first time compiles
            self._seen.add(key)
            launch()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                launch()
            self._graphs[key] = graph
            graph.replay()
