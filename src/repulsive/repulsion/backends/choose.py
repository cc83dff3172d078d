"""Choose the backend of an update for each group: the fused backend if possible, otherwise the eager backend.

Ranks that share weights have to choose alike, or they would wait for each other for ever. Whether plain weights fit the
fused backend may differ between ranks; for sharded weights the choice depends on facts that are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.addresses import can_be_read_in_place
from repulsive.repulsion.backends.eager import EagerUpdate, Measured
from repulsive.repulsion.backends.fused import FusedUpdate
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.backends.sharded import ShardedUpdate, is_supported
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
        self._eager_plain: EagerUpdate | None = None  # for groups of `_fused`, when their gradients do not fit it
        self._eager_sharded: EagerUpdate | None = None  # for groups of `_sharded`, with rules that it does not support
        self._eager_rest: EagerUpdate | None = None  # for groups that the fused updates do not support
        self._fused: list[FusedUpdate] | None = None
        self._sharded: ShardedUpdate | None = None
        self._was_fused = False  # the last run used fused updates only

    def again(self, inputs: StepInputs) -> dict[str, Measured] | None:
        """Repeat the last `run` without looking up parameters: modules must have the same ones. The rule may differ.

        Returns:
            Measurements by group name. None, with nothing done, if the last run or this one needs the eager backend, or
            if a parameter has no gradient or is frozen.
        """
        rule = inputs.rule
        if not self._was_fused or rule is None or not rule.has_matrix_form:
            return None
        assert self._fused is not None
        if not all(update.refresh(quickly=True) for update in self._fused):
            return None
        return self._run_fused(rule, inputs)

    def run(self, inputs: StepInputs) -> dict[str, Measured]:
        """Replace the gradients of all groups by the direction of a rule, and return measurements by group name."""
        rule = inputs.rule
        if rule is None or not rule.has_matrix_form or not self._uses_triton():
            self._was_fused = False
            return self._eager().run(inputs)
        fused = self._current_fused()
        self._was_fused = fused is not None and self._sharded is None and self._eager_rest is None
        measured = self._run_fused(rule, inputs) if fused is not None else {}
        for update in self._other_updates(rule, with_plain=fused is None):
            measured |= update.run(inputs)
        return measured

    def _other_updates(self, rule: Rule, *, with_plain: bool) -> list[EagerUpdate | ShardedUpdate]:
        """Return the updates of the groups that the fused updates do not run, in the same order on all ranks."""
        updates: list[EagerUpdate | ShardedUpdate] = []
        if with_plain:
            if self._eager_plain is None:
                self._eager_plain = EagerUpdate([g for u in self._fused or () for g in u.groups], self._seed)
            updates.append(self._eager_plain)
        if self._sharded is not None and not rule.scales_noise:
            updates.append(self._sharded)
        elif self._sharded is not None:  # the noise depends on a median over whole heads
            if self._eager_sharded is None:
                self._eager_sharded = EagerUpdate(self._sharded.groups, self._seed)
            updates.append(self._eager_sharded)
        if self._eager_rest is not None:
            updates.append(self._eager_rest)
        return updates

    def _run_fused(self, rule: Rule, inputs: StepInputs) -> dict[str, Measured]:
        measured: dict[str, Measured] = {}
        for update in self._fused or ():
            values = update.run(
                rule,
                inputs.rates,
                step=inputs.step,
                scale=inputs.scale,
                draw_noise=inputs.draw_noise,
                measure=inputs.measure,
            )
            if values is not None:
                measured |= {group.name: Measured(inputs.step, values, row) for row, group in enumerate(update.groups)}
        return measured

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None:
        """Add a rule's noise directly to the parameters."""
        self._eager().add_noise(rule, rates, step=step)

    def standard_noise(self, *, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter with standard normal numbers for the elements that this rank stores."""
        return self._eager().standard_noise(step=step)

    def _eager(self) -> EagerUpdate:
        if self._eager_all is None:
            self._eager_all = EagerUpdate(self.groups, self._seed)
        return self._eager_all

    def _uses_triton(self) -> bool:
        return use_triton(self.groups[0].slices[0].parameter().device.type)

    def _current_fused(self) -> list[FusedUpdate] | None:
        """Return fused updates that point at the current weights and gradients; None if the eager update is needed."""
        if self._fused is None:
            self._fused = self._make_fused()
        return self._fused if all(update.refresh() for update in self._fused) else None

    def _make_fused(self) -> list[FusedUpdate]:
        """Build one update per number of heads, dtype and device; other groups go to `_sharded` or `_eager_rest`."""
        buckets: dict[tuple[int, torch.dtype, torch.device], list[HeadGroup]] = defaultdict(list)
        sharded, rest = [], []
        for group in self.groups:
            parameters = group.parameters()
            is_uniform = len({(p.dtype, p.device) for p in parameters}) == 1
            if is_uniform and group.modules == 1 and all(can_be_read_in_place(part) for part in group.slices):
                buckets[group.num_heads, parameters[0].dtype, parameters[0].device].append(group)
            elif is_supported(group):
                sharded.append(group)
            else:
                rest.append(group)
        self._sharded = ShardedUpdate(sharded, self._seed) if sharded else None
        self._eager_rest = EagerUpdate(rest, self._seed) if rest else None
        return [FusedUpdate(members, self._seed) for members in buckets.values()]
