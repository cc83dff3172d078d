"""The two halves of a fused update of sharded weights, and the sum over ranks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.fused import FusedUpdate, PartialSums
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.launch_settings import SOLVE
from repulsive.repulsion.backends.variants import Combination, Prepared, Variant
from repulsive.repulsion.sharding.shard_layout import MeshDims

UNUSED, NORMS, PRODUCTS = 0, 1, 2  # what is summed of the gradients; as in `triton_kernels.solve`


class LocalUpdate(FusedUpdate):
    """A fused update in two halves, between which inner products are summed over ranks.

    Args:
        groups: groups of stand-ins.
        seed: seed of the noise.
        places: place of each slice in whole heads; see `place_in_head`.
        counted: whether the products of each slice are counted on this rank.
    """

    def __init__(
        self, groups: Sequence[HeadGroup], seed: int, places: list[tuple[int, int, int, int]], counted: list[bool]
    ) -> None:
        super().__init__(groups, seed)
        device, heads = self.table.device, self.padded
        self.shards = torch.tensor(places, dtype=torch.int64, device=device)
        self._counted = torch.tensor(counted, dtype=torch.int32, device=device)
        wide = partial(torch.zeros, dtype=torch.float64, device=device)
        shape = (2, len(groups), 1)
        starts = torch.arange(len(groups) + 1, dtype=torch.int32, device=device)
        self.sums = PartialSums(wide(*shape, heads, heads), wide(*shape, heads), wide(shape), starts)
        self._packed = wide(0)
        self._launches: Prepared | None = None
        self._gradient = UNUSED
        self._norms2: Tensor | None = None  # squared norms of gradients that are not in the table, float64 [groups]
        self._reads_particles = True
        self._custom: tuple[Rule, int, Tensor | None, bool, bool] | None = None  # a rule without a built-in form

    @property
    def numbers_to_sum(self) -> int:
        """Number of inner products that the prepared run needs from all ranks."""
        return self.count_numbers(self._gradient) if self._reads_particles else 0

    def count_numbers(self, gradient: int) -> int:
        """Count the inner products of all groups; `gradient` is one of UNUSED, NORMS and PRODUCTS."""
        triangle = (self.heads + 1) * (self.heads + 2) // 2
        of_gradient = {UNUSED: 0, NORMS: self.heads + 1, PRODUCTS: triangle}[gradient]
        return len(self.groups) * (triangle + of_gradient)

    def prepare(
        self,
        rule: Rule,
        inputs: StepInputs,
        norms2: Tensor | None = None,
    ) -> None:
        """Send the numbers of a rule to the device, and choose the launches.

        Args:
            rule: the rule.
            inputs: inputs of the step, with the learning rates of the stand-ins.
            norms2: this rank's part of the squared norms of gradients, [groups], if they are not in the table.
        """
        self._norms2 = norms2
        step, scale, measure = inputs.step, inputs.scale, inputs.measure
        is_noisy = inputs.draw_noise and self.noise.set(rule, inputs.rates, step, scale)
        if scale is not None:
            self.scale.copy_(scale)
        key = (measure, is_noisy, scale is not None)
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.is_for(rule):
            form = rule.radial_form(step)
            if form is None:
                with_gradients = measure or rule.needs_gradient_products
                self._custom, self._launches = (rule, step, scale, is_noisy, measure), None
                self._reads_particles, self._gradient = True, PRODUCTS if with_gradients else UNUSED
                return
            prepared = self._prepare(rule, form, key)
        variant = prepared.variant
        self._custom, self._launches, self._reads_particles = None, prepared, variant.reads_particles
        self._gradient = UNUSED
        if variant.reads_gradients:
            self._gradient = NORMS if variant.scales_gradients else PRODUCTS

    def pack(self, packed: Tensor) -> None:
        """Compute this rank's inner products and write them to `packed`, if the prepared run needs any."""
        self._packed = packed
        if self._reads_particles:
            self._run("pack", self._gram_and_pack)
        if self._norms2 is not None and self._gradient == NORMS:
            start = self.count_numbers(UNUSED)
            norms2 = packed[start:].view(len(self.groups), -1)  # [groups, M + 1], read as a sum
            norms2.zero_()[:, 0] = self._norms2

    def finish(self) -> bool:
        """Compute the coefficients from the summed products, and write the new gradients.

        Returns:
            Whether the prepared run has written a measurement to `measures`.
        """
        if self._custom is not None:
            rule, step, scale, is_noisy, measure = self._custom
            self._unpack()
            coefficients = self._coefficients(rule, step, scale, self._gradient != UNUSED)
            self._count_step(is_noisy)
            self._combine(Combination(is_noisy=is_noisy, is_scaled=scale is not None))
            return measure and self._store(coefficients)
        assert self._launches is not None
        variant = self._launches.variant
        self._run("finish", partial(self._solve_and_combine, variant))
        return variant.measures

    def _run(self, half: str, launch: Callable[[], None]) -> None:
        """Launch one half of the update; for a built-in form, as a CUDA graph."""
        if self._launches is None:
            launch()
            return
        key = half, self._launches.number, self.table.current.aligned, self._packed.data_ptr()
        self._graphs.run(launch, key)

    def _gram_and_pack(self) -> None:
        from repulsive.repulsion.backends.triton_kernels import pack

        gradient = UNUSED if self._norms2 is not None else self._gradient
        self._gram(sources=1 if gradient == UNUSED else 2, norms_only=gradient == NORMS)
        pack.pack_kernel[(len(self.groups),)](
            self.products,
            self.to_mean,
            self.mean2,
            self.table.starts,
            self._counted,
            self._packed,
            len(self.table.parts) * self.splits,
            STAGES=4,
            GRADIENT=gradient,
            num_warps=SOLVE[self.padded]["num_warps"],
            SPLITS=self.splits,
            **self._heads,
        )

    def _unpack(self) -> None:
        from repulsive.repulsion.backends.triton_kernels import pack

        pack.unpack_kernel[(len(self.groups),)](
            self._packed,
            self.sums.products,
            self.sums.to_mean,
            self.sums.mean2,
            **self._heads,
            GRADIENT=self._gradient,
            num_warps=SOLVE[self.padded]["num_warps"],
        )

    def _solve_and_combine(self, variant: Variant) -> None:
        if self._reads_particles:
            self._unpack()
        self._solve(variant)
        self._count_step(variant.is_noisy)
        self._combine(variant.combination._replace(scales_noise=False))

    def _products_of_groups(self, source: int) -> Tensor:
        """Return the summed products of a group's weights (source 0) or gradients (1): [groups, M + 1, M + 1]."""
        heads, sums = self.heads, self.sums
        total = sums.mean2.new_empty(len(self.groups), heads + 1, heads + 1)
        total[:, :-1, :-1] = sums.products[source, :, 0, :heads, :heads]
        total[:, :-1, -1] = total[:, -1, :-1] = sums.to_mean[source, :, 0, :heads]
        total[:, -1, -1] = sums.mean2[source, :, 0]
        return total


class Reduction:
    """Updates whose inner products are summed over the same ranks, in one buffer.

    Args:
        dims: mesh dimensions to sum over; with more than one, sums are formed one dimension after the other.
        updates: the updates.
    """

    def __init__(self, dims: MeshDims, updates: Sequence[LocalUpdate]) -> None:
        self.dims, self.updates = dims, updates
        most = sum(update.count_numbers(PRODUCTS) for update in updates)
        self._buffer = torch.zeros(most, dtype=torch.float64, device=updates[0].table.device)

    def sum_products(self) -> None:
        """Sum the inner products of all updates over ranks, as far as the prepared run needs any."""
        used = 0
        for update in self.updates:
            count = update.numbers_to_sum
            update.pack(self._buffer[used : used + count])
            used += count
        if used:
            for mesh, dim in self.dims:
                torch.distributed.all_reduce(self._buffer[:used], group=mesh.get_group(dim))
