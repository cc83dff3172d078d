"""Fused update: grad <- A grad + B theta + sigma xi for all heads, in at most three Triton launches.

    gram      inner products of heads, partial sums [sources, slices, splits, M, M]
    solve     A and B [groups, M, M] from the inner products, and measurements
    combine   new gradients, written in place

A launch covers all slices of a table; `triton_kernels` has the code. The launches are replayed as one CUDA graph,
without waiting on the host. If `solve` cannot compute the matrices of a rule, torch operations compute them.

The environment variable `REPULSIVE_KERNELS` chooses between this backend and `eager`, which is its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.heads.layout import HeadGroup
from repulsive.particles.gram import Gram
from repulsive.particles.rule import Coefficients, RadialForm, Rule
from repulsive.repulsion.backends import launch_settings
from repulsive.repulsion.backends.addresses import COLUMNS, DTYPES, SliceTable
from repulsive.repulsion.backends.device_noise import DeviceNoise
from repulsive.repulsion.backends.device_numbers import DeviceNumbers
from repulsive.repulsion.backends.graph_cache import GraphCache
from repulsive.repulsion.backends.launch_settings import SOLVE
from repulsive.repulsion.backends.step_noise import FusedStepNoise
from repulsive.repulsion.backends.variants import Combination, Prepared, Variant, settings_of
from repulsive.repulsion.measured import FIELDS, stacked


class PartialSums(NamedTuple):
    """Partial inner products, from which `solve_kernel` computes A and B.

    Args:
        products: products of centred heads [sources, slices, splits, heads, heads].
        to_mean: products with the mean head [sources, slices, splits, heads].
        mean2: squared norms of the mean head [sources, slices, splits].
        starts: first slice of each group, int32 [groups + 1].
    """

    products: Tensor
    to_mean: Tensor
    mean2: Tensor
    starts: Tensor


class FusedUpdate:
    """The update of groups with the same number of heads, dtype and device: table of slices, buffers and launches.

    Args:
        groups: the groups.
        seed: seed of the noise.
        measures: float64 [groups, fields of `Measure`] on the device of the groups, to write measurements to.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int, measures: Tensor | None = None) -> None:
        self.groups = list(groups)
        self.heads = groups[0].num_heads
        self.padded = launch_settings.pad_heads(self.heads)
        self.table = SliceTable(groups, seed, self.padded)
        heads, slices, device = self.padded, len(self.table.parts), self.table.device
        lengths = set() if self.table.flat else set(self.table.rows[:, 3].tolist())
        self._inner = lengths.pop() if len(lengths) == 1 else 0  # length of the inner axis of all slices
        shape = slices, max(group.dim for group in groups), self.heads, device
        splits_of = {name: launch_settings.splits_per_slice(name, *shape) for name in launch_settings.LAUNCHES}
        self.splits = splits_of["gram"]
        self._combine_splits = {False: splits_of["combine"], True: splits_of["combine with noise"]}
        self._noise_splits = splits_of["step noise"]
        # Partial products of the weights and of the gradients; those of padded heads stay zero.
        self.products = torch.zeros(2, slices, self.splits, heads, heads, dtype=torch.float32, device=device)
        self.to_mean = torch.zeros(2, slices, self.splits, heads, dtype=torch.float32, device=device)
        self.mean2 = torch.empty(2, slices, self.splits, dtype=torch.float32, device=device)
        self.sums = PartialSums(self.products, self.to_mean, self.mean2, self.table.starts)  # read by `_solve`
        self.shards: Tensor | None = None  # where the slices lie in whole weights; see `combine_kernel`
        self.drive, self.force = torch.empty(2, len(groups), heads, heads, dtype=torch.float32, device=device)
        self.row_sums = torch.empty(len(groups), heads, dtype=torch.float32, device=device)
        self.scale = torch.ones(1, dtype=torch.float32, device=device)
        if measures is None:
            measures = torch.zeros(len(groups), len(FIELDS), dtype=torch.float64, device=device)
        self.measures = measures
        self.noise = DeviceNoise(self.table, groups)
        self._settings = DeviceNumbers(8, device)  # settings of the rule, which a schedule may change at any step
        self._graphs = GraphCache(device)
        self._variants: dict[Variant, int] = {}  # numbers of variants
        self._prepared: dict[tuple[bool, bool, bool], Prepared] = {}  # by whether to measure, draw noise, and unscale
        self._step_noise: FusedStepNoise | None = None

    def add_step_noise(self, rule: Rule, optimizer: Optimizer, *, step: int) -> bool:
        """Add noise after a step of the optimizer; return False, with nothing done, if it needs the eager backend."""
        if self.table.apart:
            return False
        if self._step_noise is None:
            self._step_noise = FusedStepNoise(self.table, self.heads, self.padded, self._noise_splits, self._inner)
        return self._step_noise.add(rule, optimizer, step=step)

    def refresh(self) -> bool:
        """Point the table at the current weights and gradients; return False if they no longer fit it."""
        return self.table.refresh()

    def supports_rates(self, rates: Mapping[int, float]) -> bool:
        """Check whether all heads of a slice have the same learning rate, on which the size of the noise depends."""
        if not rates or not self.table.apart:
            return True
        own = [rates.get(id(parameter), 0.0) for parameter in self.table.parameters]
        return all(len({own[index] for index in indices}) == 1 for indices in self.table.parameters_of)

    def run(
        self,
        rule: Rule,
        rates: Mapping[int, float],
        *,
        step: int,
        scale: Tensor | None = None,
        draw_noise: bool = True,
        measure: bool = False,
    ) -> bool:
        """Replace the gradients of all slices by the direction of a rule; see `Update.run`.

        Returns:
            Whether `measures` has new numbers: if `measure`, unless the rule cannot measure.
        """
        is_noisy, is_scaled = draw_noise and self.noise.set(rule, rates, step, scale), scale is not None
        if scale is not None:
            self.scale.copy_(scale)
        key = (measure, is_noisy, is_scaled)
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.is_for(rule):
            form = rule.radial_form(step)
            if form is None:
                return self._run_generic(rule, step, scale, measure=measure, is_noisy=is_noisy)
            prepared = self._prepare(rule, form, key)
        variant = prepared.variant
        self._graphs.run(lambda: self._launch(variant), (prepared.number, self.table.current.aligned))
        return measure

    def _run_generic(self, rule: Rule, step: int, scale: Tensor | None, *, measure: bool, is_noisy: bool) -> bool:
        """Run a rule whose coefficients are not those of `solve_kernel`."""
        with_gradients = measure or rule.needs_gradient_products
        self._gram(sources=2 if with_gradients else 1, norms_only=False)
        coefficients = self._coefficients(rule, step, scale, with_gradients)
        self._count_step(is_noisy)
        self._combine(Combination(is_noisy=is_noisy, is_scaled=scale is not None, scales_noise=rule.scales_noise))
        return measure and self._store(coefficients)

    def _store(self, coefficients: Coefficients) -> bool:
        """Write a measurement by eager torch to `measures`; return False if there is none."""
        if coefficients.measure is None:
            return False
        self.measures.copy_(stacked(coefficients.measure))
        return True

    def _prepare(self, rule: Rule, form: RadialForm, key: tuple[bool, bool, bool]) -> Prepared:
        """Send the settings of a rule to the device, and choose what to launch; it is kept for a constant rule."""
        self._settings.set(settings_of(form, self.heads))
        measure, is_noisy, is_scaled = key
        variant = Variant(
            form.kernel,
            form.bandwidth if isinstance(form.bandwidth, str) else "fixed",
            form.on_sphere,
            form.smoothing != 0,
            form.ratio is not None,
            form.has_force,
            measure,
            is_noisy,
            is_scaled,
            rule.scales_noise,
        )
        number = self._variants.setdefault(variant, len(self._variants))
        prepared = Prepared(rule, dict(vars(rule)), variant, number)
        # The settings on the device are those of one rule, so what was prepared for another one is not kept.
        kept = {} if rule.is_scheduled else {k: one for k, one in self._prepared.items() if one.is_for(rule)}
        self._prepared = {} if rule.is_scheduled else kept | {key: prepared}
        return prepared

    def _launch(self, variant: Variant) -> None:
        """Launch one update."""
        self._count_step(variant.is_noisy)
        if variant.reads_particles:
            self._gram(sources=2 if variant.reads_gradients else 1, norms_only=variant.scales_gradients)
        self._solve(variant)
        self._combine(variant.combination)

    @property
    def _heads(self) -> dict[str, int]:
        return {"M": self.heads, "MP": self.padded}

    @property
    def _access(self) -> dict[str, Any]:
        import triton.language as tl

        kind = getattr(tl, DTYPES[self.table.dtype])
        aligned = self.table.current.aligned
        access = {"COLUMNS": COLUMNS, "KIND": kind, "FLAT": self.table.flat, "ALIGNED": aligned}
        access |= {"APART": self.table.apart, "INNER": self._inner}
        return access | {"CHUNKED": aligned and self.table.chunked}

    def _gram(self, sources: int, *, norms_only: bool) -> None:
        """Compute partial products of slices: of their weights, and with two sources also of their gradients.

        Args:
            sources: 1 or 2.
            norms_only: compute only the norms of gradients.
        """
        from repulsive.repulsion.backends.triton_kernels import column_gram, gram

        is_by_column, settings = launch_settings.kernel_settings("gram", self.heads)
        kernel = column_gram.column_gram_kernel if is_by_column else gram.gram_kernel
        kernel[(len(self.table.parts), self.splits, sources)](
            self.table.rows,
            self.table.current.pointers,
            self.products,
            self.to_mean,
            self.mean2,
            NORMS=norms_only,
            **settings,
            **self._heads,
            **self._access,
        )

    def _solve(self, variant: Variant) -> None:
        """Compute A, B and the row sums of B in one launch, and measure."""
        from repulsive.repulsion.backends.triton_kernels import solve as code

        medians = {"paper": code.PAPER, "released": code.RELEASED, "released-lower": code.LOWER, "fixed": code.FIXED}
        profiles = {
            "rbf": code.RBF,
            "imq": code.IMQ,
            "constant": code.CONSTANT,
            "cosine": code.COSINE,
            "hinge": code.HINGE,
            "none": code.NO_KERNEL,
        }
        gradient = code.UNUSED
        if variant.reads_gradients:
            gradient = code.NORMS if variant.scales_gradients else code.PRODUCTS
        launch, sums = SOLVE[self.padded], self.sums
        slices, splits = sums.products.shape[1:3]
        chunk = splits if splits == launch["CHUNK"] else 1  # all at once, or one by one
        stages = 1 if chunk > 1 or splits == 1 or not launch_settings.loads_ahead() else 4
        if self.padded == 64 and gradient == code.PRODUCTS:
            stages = min(stages, 2)  # two matrices per stage in shared memory
        code.solve_kernel[(len(self.groups),)](
            *sums,
            self._settings.tensor,
            self.scale,
            self.drive,
            self.force,
            self.row_sums,
            self.measures,
            slices * splits,
            BANDWIDTH=medians[variant.bandwidth],
            PROFILE=profiles[variant.kernel],
            SPHERE=variant.on_sphere,
            SMOOTHED=variant.smooths,
            HOLDS_RATIO=variant.holds_ratio,
            GRADIENT=gradient,
            SCALED=variant.is_scaled,
            MEASURE=variant.measures,
            CHUNK=chunk,
            STAGES=stages,
            num_warps=launch["num_warps"],
            SPLITS=splits,
            **self._heads,
        )

    def _count_step(self, is_noisy: bool) -> None:
        """Count a step with noise: on the device, so that replays of a captured graph count as well."""
        if is_noisy:
            self.noise.steps.add_(1)

    def _combine(self, combination: Combination) -> None:
        """Write the new gradients."""
        from repulsive.repulsion.backends.triton_kernels import column_combine, combine

        launch = "combine with noise" if combination.is_noisy else "combine"
        is_by_column, settings = launch_settings.kernel_settings(launch, self.heads)
        kernel = column_combine.column_combine_kernel if is_by_column else combine.combine_kernel
        kernel[(len(self.table.parts), self._combine_splits[combination.is_noisy])](
            self.table.rows,
            self.table.current.pointers,
            self.drive,
            self.force,
            self.row_sums,
            self.scale,
            self.noise.scaled_sigmas if combination.scales_noise else self.noise.sigmas.tensor,
            self.noise.steps,
            self.table.rows if self.shards is None else self.shards,
            SHARDED=self.shards is not None,
            SCALED=combination.is_scaled,
            NOISE=combination.is_noisy,
            FORCE=combination.has_force,
            SCALAR=combination.scales_gradients,
            **settings,
            **self._heads,
            **self._access,
        )

    def _coefficients(self, rule: Rule, step: int, scale: Tensor | None, with_gradients: bool) -> Coefficients:
        """Compute the rule's own coefficients in eager torch, and copy them to the buffers that `_combine` reads."""
        theta, grad = Gram(self._products_of_groups(0)), None
        if with_gradients:
            products = self._products_of_groups(1)
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

    def _products_of_groups(self, source: int) -> Tensor:
        """Sum the partial products of a group's weights (source 0) or gradients (1): [groups, M + 1, M + 1]."""
        heads, device = self.heads, self.table.device
        parts = torch.zeros(len(self.table.parts), heads + 1, heads + 1, dtype=torch.float64, device=device)
        parts[:, :-1, :-1] = self.products[source, :, :, :heads, :heads].double().sum(1)
        parts[:, :-1, -1] = parts[:, -1, :-1] = self.to_mean[source, :, :, :heads].double().sum(1)
        parts[:, -1, -1] = self.mean2[source].double().sum(1)
        total = torch.zeros(len(self.groups), heads + 1, heads + 1, dtype=torch.float64, device=device)
        return total.index_add_(0, self.table.rows[:, 7], parts)
