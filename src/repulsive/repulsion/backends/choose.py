"""Choose the backend of an update for each group: the fused backend if possible, otherwise the eager backend.

Ranks that share weights have to choose alike, or they would wait for each other for ever. Whether plain weights fit the
fused backend may differ between ranks; for sharded weights the choice depends on facts that are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.addresses import MOST_HEADS, are_strided_alike, can_be_read_in_place
from repulsive.repulsion.backends.eager import EagerUpdate
from repulsive.repulsion.backends.fused import FusedUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.sharded import ShardedUpdate, is_supported
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.measured import FIELDS, Measured
from repulsive.repulsion.optimizer_noise import add_noise
from repulsive.triton_setting import use_triton


class Update:
    """The update of a fixed set of groups, prepared once and run at every step.

    Args:
        groups: the groups to update.
        seed: seed of the noise.
    """

    def __init__(self, groups: Sequence[HeadGroup], seed: int) -> None:
        self.groups = list(groups)
        self._seed = seed
        self._eager_all: EagerUpdate | None = None  # for all groups
        self._eager_plain: dict[int, EagerUpdate] = {}  # for the groups of a fused update that does not fit this step
        self._eager_sharded: EagerUpdate | None = None  # for groups of `_sharded`, with rules that it does not support
        self._eager_rest: EagerUpdate | None = None  # for groups that the fused updates do not support
        self._fused: list[FusedUpdate] | None = None
        self._sharded: ShardedUpdate | None = None
        self._measures: dict[torch.device, Tensor] = {}  # numbers of all fused updates on a device, [rows, fields]
        self._rows: list[dict[str, int]] = []  # row of each group in `_measures`, by fused update and group name
        self._was_fused = False  # the last run used fused updates only

    def again(self, inputs: StepInputs) -> list[Measured] | None:
        """Repeat the last `run` without looking up parameters: modules must have the same ones. The rule may differ.

        Returns:
            Measurements. None, with nothing done, if the last run or this one needs the eager backend, or
            if a parameter has no gradient or is frozen.
        """
        rule = inputs.rule
        if not self._was_fused or rule is None or not rule.has_matrix_form:
            return None
        assert self._fused is not None
        rates = inputs.rates
        for update in self._fused:
            if not update.table.refresh(quickly=True) or (rates and not update.supports_rates(rates)):
                return None
        return self._run_fused(range(len(self._fused)), rule, inputs)

    def run(self, inputs: StepInputs) -> list[Measured]:
        """Replace the gradients of all groups by the direction of a rule, and return measurements of the groups."""
        rule = inputs.rule
        if rule is None or not rule.has_matrix_form or not self._uses_triton():
            self._was_fused = False
            return self._eager().run(inputs)
        if self._fused is None:
            self._fused = self._make_fused()
        fitting = [update.refresh() and update.supports_rates(inputs.rates) for update in self._fused]
        self._was_fused = all(fitting) and self._sharded is None and self._eager_rest is None
        measured = self._run_fused([index for index, fits in enumerate(fitting) if fits], rule, inputs)
        for update in self._other_updates(rule, [index for index, fits in enumerate(fitting) if not fits]):
            measured += update.run(inputs)
        return measured

    def _other_updates(self, rule: Rule, unfitting: Sequence[int]) -> list[EagerUpdate | ShardedUpdate]:
        """Return the updates of the groups that the fused updates do not run, in the same order on all ranks.

        Args:
            rule: the rule.
            unfitting: indices of the fused updates that weights or gradients of this step do not fit.
        """
        updates: list[EagerUpdate | ShardedUpdate] = []
        updates += map(self._eager_instead_of, unfitting)
        if self._sharded is not None and not rule.scales_noise:
            updates.append(self._sharded)
        elif self._sharded is not None:  # the noise depends on a median over whole heads
            if self._eager_sharded is None:
                self._eager_sharded = EagerUpdate(self._sharded.groups, self._seed)
            updates.append(self._eager_sharded)
        if self._eager_rest is not None:
            updates.append(self._eager_rest)
        return updates

    def _run_fused(self, indices: Sequence[int], rule: Rule, inputs: StepInputs) -> list[Measured]:
        """Run some of the fused updates. All that they measured on a device is sent to the host by one copy."""
        assert self._fused is not None
        rows: dict[torch.device, dict[str, int]] = {}
        for index in indices:
            update = self._fused[index]
            has_measured = update.run(
                rule,
                inputs.rates,
                step=inputs.step,
                scale=inputs.scale,
                draw_noise=inputs.draw_noise,
                measure=inputs.measure,
            )
            if has_measured:
                rows.setdefault(update.table.device, {}).update(self._rows[index])
        measured = [Measured(inputs.step, own, self._measures[device]) for device, own in rows.items()]
        for one in measured:
            one.send()  # the next measurement overwrites these numbers
        return measured

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise directly to the parameters."""
        self._eager().add_noise(rule, rates, step=step)

    def add_step_noise(self, rule: Rule, optimizer: Optimizer, *, step: int) -> None:
        """Add a rule's noise to parameters and momentum buffers, after a step of the optimizer.

        Raises:
            OptimizerError: the step is captured into a CUDA graph.
        """
        if not self._was_fused or is_capturing():
            add_noise(rule, optimizer, self._eager().standard_noise(step=step))
            return
        for index, update in enumerate(self._fused or ()):
            if not update.add_step_noise(rule, optimizer, step=step):
                add_noise(rule, optimizer, self._eager_instead_of(index).standard_noise(step=step))

    def _eager_instead_of(self, index: int) -> EagerUpdate:
        """Return the eager update of the groups of a fused one."""
        if index not in self._eager_plain:
            assert self._fused is not None
            self._eager_plain[index] = EagerUpdate(self._fused[index].groups, self._seed)
        return self._eager_plain[index]

    def _eager(self) -> EagerUpdate:
        if self._eager_all is None:
            self._eager_all = EagerUpdate(self.groups, self._seed)
        return self._eager_all

    def _uses_triton(self) -> bool:
        return use_triton(self.groups[0].slices[0].parameter().device.type)

    def _make_fused(self) -> list[FusedUpdate]:
        """Build one update per number of heads, dtype and device, and for heads in one module or in several.

        Other groups go to `_sharded` or `_eager_rest`.
        """
        buckets: dict[tuple[int, torch.dtype, torch.device, bool], list[HeadGroup]] = defaultdict(list)
        sharded, rest = [], []
        for group in self.groups:
            if _fits_table(group):
                parameter = group.slices[0].parameter()
                buckets[group.num_heads, parameter.dtype, parameter.device, group.modules > 1].append(group)
            elif is_supported(group):
                sharded.append(group)
            else:
                rest.append(group)
        self._sharded = ShardedUpdate(sharded, self._seed) if sharded else None
        self._eager_rest = EagerUpdate(rest, self._seed) if rest else None
        starts, counts = [], dict.fromkeys((device for _, _, device, _ in buckets), 0)
        for (_, _, device, _), members in buckets.items():
            starts.append(counts[device])
            counts[device] += len(members) + len(members) % 2  # two rows have a multiple of 16 bytes, as Triton prefers
        self._measures = {
            device: torch.zeros(count, len(FIELDS), dtype=torch.float64, device=device)
            for device, count in counts.items()
        }
        self._rows = [
            {group.name: row for row, group in enumerate(members, start)}
            for start, members in zip(starts, buckets.values(), strict=True)
        ]
        return [
            FusedUpdate(members, self._seed, self._measures[device][start : start + len(members)])
            for start, ((_, _, device, _), members) in zip(starts, buckets.items(), strict=True)
        ]


def _fits_table(group: HeadGroup) -> bool:
    """Check whether the Triton kernels can read all heads of a group in place."""
    return (
        group.num_heads <= MOST_HEADS
        and len({(parameter.dtype, parameter.device) for parameter in group.parameters()}) == 1
        and all(can_be_read_in_place(part) for part in group.slices)
        and (group.modules == 1 or all(are_strided_alike(run) for run in group.runs()))
    )
