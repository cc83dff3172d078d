"""Choose the update of each optimizer step: it covers the groups that have gradients in that step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import UnsupportedWeights, warn_user
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.measured import Measured
from repulsive.repulsion.optimizers import has_nothing_to_follow, only_initialises_state
from repulsive.repulsion.parameter_lookup import ParameterLookup, are_same
from repulsive.repulsion.trained_groups import parameter_ids


class AnyUpdate(Protocol):
    """The update of a fixed set of groups; see `Update` for the methods."""

    def again(self, inputs: StepInputs) -> list[Measured] | None: ...

    def run(self, inputs: StepInputs) -> list[Measured]: ...

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None: ...

    def add_step_noise(self, rule: Rule, optimizer: Optimizer, *, step: int) -> None: ...


_MOST_UPDATES = 16  # largest number of cached updates


class ActiveUpdates:
    """Cache of updates by the names of the groups that have gradients. Usually it holds one update, of all groups.

    Args:
        groups: all groups of a handle.
        seed: seed of the noise.
        make: function that builds the update of a list of groups.

    Attributes:
        skipped: number of calls of `choose` without a gradient, by group name.
        current: the update of the last step.
        covers_all: whether `current` covers all groups.
    """

    def __init__(
        self, groups: list[HeadGroup], seed: int, make: Callable[[list[HeadGroup], int], AnyUpdate] = Update
    ) -> None:
        self.groups = groups
        self.skipped = dict.fromkeys((group.name for group in groups), 0)
        self.current: AnyUpdate | None = None
        self.covers_all = False
        self._make = make
        self._seed = seed
        self._updates: dict[tuple[str, ...], AnyUpdate] = {}
        self._was_captured = False  # a CUDA graph may refer to some of the updates
        self._lookup = ParameterLookup(part for group in groups for part in group.slices)
        self._first = ParameterLookup(groups[0].slices if groups else ())
        self._dims = [parameter.ndim for parameter in self._lookup.current()[0]]
        self._accepted: list[list[Tensor]] = []  # parameters of model and optimizer that passed the check
        self._names = tuple(group.name for group in groups)
        self._has_warned = False

    def __len__(self) -> int:
        """Number of cached updates."""
        return len(self._updates)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of all parameters that contain heads."""
        return self._lookup.current()[1]

    def has_gradients(self, optimizer: Optimizer, warns: bool) -> bool:
        """Check whether `choose` would return an update, without counting skipped groups; for steps without a rule.

        Args:
            optimizer: the optimizer.
            warns: warn, once, if no group has a gradient: such steps do not count, so the rule would never act again.
        """
        if optimizer.state and self._first.all_have_gradients():  # an optimizer that is not new, as usual
            return True
        if only_initialises_state(optimizer, self.gradients()):
            return False
        is_trained = any(not is_idle(group) for group in self.groups)
        if warns and not is_trained:
            self._warn_of_no_gradients()
        return is_trained

    def reset(self, seed: int) -> None:
        """Drop all updates and counts, and start with another seed."""
        self._seed = seed
        self.skipped = dict.fromkeys(self.skipped, 0)
        self._updates.clear()
        self.current = None

    def choose(self, optimizer: Optimizer) -> AnyUpdate | None:
        """Return the update of this step, and count groups without a gradient as skipped; None if all are skipped.

        Raises:
            UnsupportedWeights: a weight of the model is not the tensor that the optimizer trains.
        """
        self.current = self._choose(optimizer)
        return self.current

    def _choose(self, optimizer: Optimizer) -> AnyUpdate | None:
        active, names = self.groups, self._names
        parameters, gradients = self._lookup.current()
        if only_initialises_state(optimizer, gradients):
            return None
        self._refuse_replaced(parameters, optimizer)
        if any(grad is None or not p.requires_grad for p, grad in zip(parameters, gradients, strict=True)):
            active = []
            for group in self.groups:
                if is_idle(group):
                    self.skipped[group.name] += 1
                else:
                    active.append(group)
            names = tuple(group.name for group in active) if len(active) < len(self.groups) else names
            if not names:
                self._warn_of_no_gradients()
        if names and names not in self._updates:
            if len(self._updates) >= _MOST_UPDATES and not self._was_captured:  # for example with random layer dropout
                del self._updates[next(key for key in self._updates if key != self._names)]
            self._updates[names] = self._make(active, self._seed)
        self._was_captured = self._was_captured or is_capturing()
        self.covers_all = names is self._names
        return self._updates.get(names)

    def _refuse_replaced(self, parameters: list[Tensor], optimizer: Optimizer) -> None:
        """Raise an error for weights that the optimizer does not train and, unlike frozen weights, never will train."""
        dims = [parameter.ndim for parameter in parameters]
        tensors = [parameters, *(entry["params"] for entry in optimizer.param_groups)]
        if dims == self._dims and are_same(tensors, self._accepted):
            return
        owned = parameter_ids(optimizer)
        for part, parameter, before in zip(self._lookup.parts, parameters, self._dims, strict=True):
            if parameter.ndim != before:
                raise UnsupportedWeights(
                    f"{part.parameter_name}: was flattened after repel, as FSDP1 does, so heads have no rows any more; "
                    "shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"
                )
            if id(parameter) not in owned:
                raise UnsupportedWeights(
                    f"{part.parameter_name}: the model holds another tensor than the optimizer. FSDP leaves weights "
                    "gathered after set_reshard_after_backward(False): call reshard() before the step. If the weight "
                    "was replaced, as by load_state_dict(assign=True) or to_empty, build a new optimizer and call "
                    "repel again"
                )
        self._accepted = [[*some] for some in tensors]

    def _warn_of_no_gradients(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                "no selected head had a gradient in this optimizer step, so no head was repelled. Were layers frozen "
                "or replaced (by adapters, for example) after repel?"
            )


def is_idle(group: HeadGroup) -> bool:
    """Check whether a group has no gradient to follow."""
    idle = [has_nothing_to_follow(parameter) for parameter in group.parameters()]
    return all(idle) or (any(idle) and group.modules == 1)  # a module without a gradient takes part as it is
