"""Fused update of sharded weights: Triton kernels on the part of every head that a rank holds, and one all-reduce.

    gram, pack               on this rank: inner products of its part of the heads, all groups in one buffer
    all-reduce               of the buffer, (M + 1) (M + 2) / 2 numbers per group
    unpack, solve, combine   equal on every rank up to `solve`; `combine` writes this rank's part of the gradients

Weights that have whole heads on different ranks are first moved to a split within heads; see `sharding.shard_layout`.
Every rank has to make the same calls in the same order. So all choices here depend on facts that are equal on all ranks
(shapes, placements, rule), never on local ones (sizes, strides, addresses).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends import eager
from repulsive.repulsion.backends.addresses import DTYPES, MOST_HEADS
from repulsive.repulsion.backends.eager import parameter_key
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.local_update import LocalUpdate, Reduction
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.sharding.kept_gradients import KeptGradients, can_be_kept
from repulsive.repulsion.sharding.local_weights import LocalWeight, load_local
from repulsive.repulsion.sharding.shard_layout import (
    MeshDims,
    ShardLayout,
    has_heads_on_other_ranks,
    largest_share,
    splits_one_dimension,
)
from repulsive.repulsion.sharding.stand_in import StandIn, is_counted, place_in_head

Factors = dict[LocalWeight, float | Tensor]


def is_supported(group: HeadGroup) -> bool:
    """Check whether a group has a sharded weight and the Triton kernels can work on the parts; equal on all ranks."""
    parameters = group.parameters()
    return (
        any(is_sharded(parameter) for parameter in parameters)
        and group.modules == 1
        and len({(parameter.dtype, parameter.device) for parameter in parameters}) == 1
        and parameters[0].dtype in DTYPES
        and group.num_heads <= MOST_HEADS
        and all(_is_supported_slice(part) for part in group.slices)
    )


def _is_supported_slice(part: HeadSlice) -> bool:
    parameter = part.parameter()
    view = part.view(torch.empty(parameter.shape, device="meta"))
    return (
        part.attribute in part.module._parameters
        and part.dim < 2**31
        and view is not None
        and (parameter.ndim == 2 or (part.axis == 0 and view[0].is_contiguous()))
        and splits_one_dimension(part)
    )


class ShardedUpdate:
    """The fused update of groups with sharded weights.

    Args:
        groups: the groups; `is_supported` is True for each.
        seed: seed of the noise.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        in_place = [group for group in groups if not any(map(has_heads_on_other_ranks, group.slices))]
        moved = [group for group in groups if any(map(has_heads_on_other_ranks, group.slices))]
        self._batches = [Batch(some, seed) for some in [in_place, *_split_by_bytes(moved)] if some]

    def run(self, inputs: StepInputs) -> list[Measured]:
        """Replace the gradients of all groups by the direction of a rule; see `Update.run`.

        The rule must have a matrix form, and its noise must not depend on the gradients (`Rule.scales_noise`).
        """
        assert inputs.rule is not None
        return [one for batch in self._batches for one in batch.run(inputs.rule, inputs)]


class Batch:
    """Groups whose weights are loaded on this rank at the same time, and whose products are summed in one call.

    Tables and buffers are made in the first run, when the local weights are there.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self._seed = seed
        parts = {parameter_key(part): part for group in groups for part in group.slices}
        self._weights = {key: LocalWeight(part) for key, part in parts.items()}
        self._stand_ins = {key: StandIn(weight) for key, weight in self._weights.items()}
        self._layouts: list[ShardLayout | None] | None = None  # the layouts that `_reductions` were made for
        self._reductions: list[Reduction] = []
        self._kept: KeptGradients | None = None
        self._kept_layouts: list[ShardLayout | None] = []

    def run(self, rule: Rule, inputs: StepInputs) -> list[Measured]:
        """Replace the gradients of all groups by the direction of a rule; see `Update.run`."""
        measured: list[Measured] = []
        with torch.no_grad():
            factors, norms2 = self._keep_gradients(rule, inputs.step, inputs.measure)
        with torch.no_grad(), self._loaded_stand_ins(factors):
            self._refresh()
            rates = {s.local_id: inputs.rates.get(s.id, 0.0) for s in self._stand_ins.values()} if inputs.rates else {}
            local = inputs._replace(rates=rates)
            for reduction in self._reductions:
                for update in reduction.updates:
                    own = torch.stack([norms2[group.name] for group in update.groups]) if norms2 else None
                    update.prepare(rule, local, own)
                reduction.sum_products()
            for reduction in self._reductions:
                for update in reduction.updates:
                    if update.finish():
                        rows = {group.name: row for row, group in enumerate(update.groups)}
                        measured.append(Measured(inputs.step, rows, update.measures))
                        measured[-1].send()  # the next measurement overwrites these numbers
        return measured

    def _keep_gradients(self, rule: Rule, step: int, measure: bool) -> tuple[Factors | None, dict[str, Tensor]]:
        """Decide whether gradients stay on their ranks while weights are moved.

        Returns:
            The factor on the stored gradient of each weight, or None if gradients have to be moved; and this rank's
            part of the squared norm of each group's gradients, by group name, if the rule or a measurement needs it.
        """
        form, weights = rule.radial_form(step), self._weights.values()
        if form is None or form.mixes_gradients or not all(can_be_kept(weight.part) for weight in weights):
            return None, {}
        for weight in weights:
            weight.find_layout(whole=False)
        layouts = [weight.layout for weight in weights]
        if self._kept is None or layouts != self._kept_layouts:
            self._kept, self._kept_layouts = KeptGradients(self.groups, self._weights), layouts
        factors = self._kept.factors({group.num_heads: form.drive(group.num_heads) for group in self.groups})
        if form.ratio is None and not measure:
            return factors, {}
        names = [group.name for group in self.groups]
        return factors, dict(zip(names, self._kept.squared_norms().unbind(), strict=True))

    @contextmanager
    def _loaded_stand_ins(self, factors: Factors | None) -> Iterator[None]:
        """Load the weights of this rank in the stand-ins, and write new gradients back at the end.

        Args:
            factors: factors on gradients that stay on their ranks; the stand-ins then start from gradients of zero.
        """
        with load_local(self._weights.values(), gradients=factors is None, kept=factors):
            try:
                for weight in self._weights.values() if factors is not None else ():
                    weight.grad = torch.zeros_like(weight.weights())
                for stand_in in self._stand_ins.values():
                    stand_in.load()
                yield
                for stand_in in self._stand_ins.values():
                    stand_in.write_back()
            finally:
                for stand_in in self._stand_ins.values():
                    stand_in.release()

    def _refresh(self) -> None:
        """Point all tables at the loaded weights; make new ones if weights have other shapes or placements."""
        layouts = [weight.layout for weight in self._weights.values()]
        updates = [update for reduction in self._reductions for update in reduction.updates]
        if layouts != self._layouts or not all(update.refresh() for update in updates):
            self._reductions, self._layouts = self._make_reductions(), layouts
            fits = [update.refresh() for reduction in self._reductions for update in reduction.updates]
            assert all(fits)

    def _make_reductions(self) -> list[Reduction]:
        """Build one update per number of heads, dtype, device and set of mesh dimensions."""
        buckets: dict[MeshDims, dict[object, list[HeadGroup]]] = defaultdict(lambda: defaultdict(list))
        for group in self.groups:
            dims = dict.fromkeys(dim for part in group.slices for dim in self._weight_of(part).summed_dims)
            parameter = group.slices[0].parameter()
            buckets[tuple(dims)][group.num_heads, parameter.dtype, parameter.device].append(group)
        return [
            Reduction(dims, [self._make_update(groups, dims) for groups in kinds.values()])
            for dims, kinds in buckets.items()
        ]

    def _make_update(self, groups: Sequence[HeadGroup], dims: MeshDims) -> LocalUpdate:
        parts = [part for group in groups for part in group.slices]
        weights = [self._weight_of(part) for part in parts]
        places = [place_in_head(part, weight) for part, weight in zip(parts, weights, strict=True)]
        local = [replace(group, slices=tuple(self._local_slice(part) for part in group.slices)) for group in groups]
        return LocalUpdate(local, self._seed, places, [is_counted(weight, dims) for weight in weights])

    def _weight_of(self, part: HeadSlice) -> LocalWeight:
        return self._weights[parameter_key(part)]

    def _local_slice(self, part: HeadSlice) -> HeadSlice:
        """Return the slice of the stand-in: the same rows, since a split within heads has all output features."""
        return HeadSlice(self._stand_ins[parameter_key(part)], "weight", part.parameter_name, part.rows, part.axis)


def _split_by_bytes(groups: Sequence[HeadGroup]) -> list[list[HeadGroup]]:
    """Split groups into batches that move at most `eager.MAX_MOVED` bytes each; a weight counts once per batch."""
    batches: list[list[HeadGroup]] = []
    present: set[tuple[int, str]] = set()
    moved = 0
    for group in groups:
        sizes = {parameter_key(part): _bytes_moved(part) for part in group.slices}
        size = sum(size for key, size in sizes.items() if key not in present)
        if not batches or moved + size > eager.MAX_MOVED:
            batches.append([])
            present, moved, size = set(), 0, sum(sizes.values())
        batches[-1].append(group)
        present |= sizes.keys()
        moved += size
    return batches


def _bytes_moved(part: HeadSlice) -> int:
    """Count the bytes of a weight and its gradient that are moved to one rank."""
    return 2 * largest_share(part) * part.parameter().element_size()
