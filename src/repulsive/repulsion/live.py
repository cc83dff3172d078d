"""Which groups have gradients in a step, and the update of those."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import UnsupportedWeights
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.eager import Measured
from repulsive.repulsion.optimizers import is_idle, only_makes_state
from repulsive.repulsion.owners import Owners


class AnyUpdate(Protocol):
    """One update of a fixed set of groups; `Update` says what each method does."""

    def again(self, rule: Rule | None) -> bool: ...

    def run(
        self,
        rule: Rule | None,
        rates: Mapping[int, float],
        *,
        step: int,
        scale: Tensor | None = None,
        measure: bool = False,
        draw_noise: bool = True,
    ) -> dict[str, Measured]: ...

    def add_noise(self, rule: Rule, rates: Mapping[int, float], *, step: int) -> None: ...


_MOST_UPDATES = 16  # kept at a time


class Live:
    """Updates by the groups that have gradients, which are nearly always all.

    Args:
        groups: of a handle.
        seed: of the noise.
        make: makes the update of some of the groups.
    """

    def __init__(
        self, groups: list[HeadGroup], seed: int, make: Callable[[list[HeadGroup], int], AnyUpdate] = Update
    ) -> None:
        self.groups = groups
        self._make = make
        self.skipped = dict.fromkeys((group.name for group in groups), 0)  # steps without a gradient
        self.current: AnyUpdate | None = None  # of the last step
        self.whole = False  # that one is of all groups
        self._seed = seed
        self._updates: dict[tuple[str, ...], AnyUpdate] = {}
        self._captured = False  # somebody's graph may hold on to some of them
        self._owners = Owners(part for group in groups for part in group.slices)
        self._dims = [parameter.ndim for parameter in self._owners.look()[0]]
        self._accepted: list[list[Tensor]] = []  # parameters of model and optimiser that were seen to agree
        self._names = tuple(group.name for group in groups)
        self._warned = False  # of a step without any gradient

    def __len__(self) -> int:
        """How many updates are kept."""
        return len(self._updates)

    def gradients(self) -> list[Tensor | None]:
        """Those of all parameters that hold heads."""
        return self._owners.look()[1]

    def forget(self, seed: int) -> None:
        """Start with another seed, which updates carry."""
        self._seed = seed
        self._updates.clear()
        self.current = None

    def choose(self, optimizer: Optimizer) -> AnyUpdate | None:
        """The update of this step; groups that have no gradients are counted as skipped.

        Raises:
            UnsupportedWeights: the model has other tensors than the optimiser trains.
        """
        self.current = self._choose(optimizer)
        return self.current

    def _choose(self, optimizer: Optimizer) -> AnyUpdate | None:
        live, names = self.groups, self._names
        parameters, gradients = self._owners.look()
        if only_makes_state(optimizer, gradients):
            return None
        self._refuse_replaced(parameters, optimizer)
        if any(grad is None or not p.requires_grad for p, grad in zip(parameters, gradients, strict=True)):
            live = []
            for group in self.groups:
                if any(is_idle(parameter) for parameter in group.parameters()):
                    self.skipped[group.name] += 1
                else:
                    live.append(group)
            names = tuple(group.name for group in live) if len(live) < len(self.groups) else names
            if not names:
                self._warn_of_nothing()
        if names and names not in self._updates:
            if len(self._updates) >= _MOST_UPDATES and not self._captured:  # layers are dropped at random, say
                del self._updates[next(known for known in self._updates if known != self._names)]
            self._updates[names] = self._make(live, self._seed)
        self._captured = self._captured or is_captured()
        self.whole = names is self._names
        return self._updates.get(names)

    def _refuse_replaced(self, parameters: list[Tensor], optimizer: Optimizer) -> None:
        """No gradient is one thing, a tensor the optimiser does not know another: that one would never be trained."""
        dims = [parameter.ndim for parameter in parameters]
        seen = [parameters, *(entry["params"] for entry in optimizer.param_groups)]
        if dims == self._dims and are_same(seen, self._accepted):
            return
        owned = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        for part, parameter, before in zip(self._owners.parts, parameters, self._dims, strict=True):
            if parameter.ndim != before:
                raise UnsupportedWeights(
                    f"{part.parameter_name}: was flattened after repel, as FSDP1 does, so that heads have no rows; "
                    "shard with torch.distributed.fsdp.fully_shard (FSDP2) instead"
                )
            if id(parameter) not in owned:
                raise UnsupportedWeights(
                    f"{part.parameter_name}: the model holds another tensor than the optimiser. FSDP leaves weights "
                    "gathered after set_reshard_after_backward(False): call reshard() before the step. If the weight "
                    "was replaced, as load_state_dict(assign=True) and to_empty do, make the optimiser anew and call "
                    "repel again"
                )
        self._accepted = [[*some] for some in seen]

    def _warn_of_nothing(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "no selected head had a gradient in this optimiser step, so nothing was repelled. Were layers frozen "
                "or replaced (by adapters, say) after repel?",
                stacklevel=8,
            )


def are_same(tensors: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Whether two lists of lists hold the same objects.

    Python compares items of lists by identity first, and looks into those only that differ. Here that matters: after a
    backward pass hundreds of tensors are in no cache.
    """
    try:
        return tensors == others
    except Exception:  # other tensors: a comparison of their numbers is no answer, or fails
        return False


def is_captured() -> bool:
    """Whether a graph of somebody's is being recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
