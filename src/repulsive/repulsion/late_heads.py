"""Detect heads that join the training after `repel`, and so train without repulsion."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from repulsive.errors import RepulsiveError, warn_user
from repulsive.heads import find_heads
from repulsive.heads.describe import count_of
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import unwrap
from repulsive.repulsion.parameter_lookup import ParameterLookup
from repulsive.repulsion.trained_groups import newly_trained, parameter_ids


class LateHeads:
    """Watch for heads that are unfrozen, added to the optimizer, or added to the model and the optimizer.

    Args:
        optimizer: the optimizer of the handle.
        untrained: selected heads that the optimizer does not train yet.
        model: the model, in which new heads are looked for; it is not kept alive.
        selection: arguments of `find_heads` that select heads; those of a class that needs an example are not found.
        only_if_all: report new heads only if all older ones were selected. If some were left out, new ones may be, too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        untrained: Sequence[HeadGroup],
        model: nn.Module,
        selection: Mapping[str, Any],
        *,
        only_if_all: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._untrained = list(untrained)
        self._model = weakref.ref(unwrap(model))  # the wrapper may be gone soon
        self._only_if_all = only_if_all
        self._selection = {**selection, "example_inputs": None}
        self._has_warned = False
        self._lookup = ParameterLookup(part for group in untrained for part in group.slices)
        self._known = parameter_ids(optimizer)
        self._state = self._current_state()

    def may_have_joined(self) -> bool:
        """Check counts and flags, which is quick enough for every step: have they changed since the last `warn`?"""
        if self._has_warned:
            return False
        if self._untrained:
            return self._current_state() != self._state
        count = 0
        for entry in self._optimizer.param_groups:
            count += len(entry["params"])
        return count != self._state[0]

    def warn(self, repelled: Sequence[HeadGroup]) -> None:
        """Warn about heads that have joined, once.

        Args:
            repelled: the groups of all handles of the optimizer.
        """
        self._state = self._current_state()
        if joined := [*newly_trained(self._untrained, self._optimizer), *self._new_heads(repelled)]:
            self._has_warned = True
            were, train = ("was", "trains") if len(joined) == 1 else ("were", "train")
            warn_user(
                f"{count_of(len(joined), 'group')} of heads {were} unfrozen or added to the optimizer after repel, and "
                f"{train} without repulsion: {', '.join(joined[:6])}. Call handle.remove(), then repel again"
            )

    def _current_state(self) -> tuple[int, list[bool]]:
        """Return the number of trained parameters, and whether each untrained one requires a gradient."""
        flags = [parameter.requires_grad for parameter in self._lookup.current()[0]] if self._untrained else []
        return sum(len(entry["params"]) for entry in self._optimizer.param_groups), flags

    def _new_heads(self, repelled: Sequence[HeadGroup]) -> list[str]:
        """Return the names of heads whose parameters are new in the optimizer and in no group."""
        added = parameter_ids(self._optimizer) - self._known
        selected = {id(p) for group in (*repelled, *self._untrained) for p in group.parameters()}
        added -= selected
        model = self._model()
        if not added or model is None:
            return []
        try:
            groups = find_heads(model, **self._selection)
        except RepulsiveError:  # the model has changed so much that the selection does not fit it
            return []
        if self._only_if_all and {id(p) for group in groups for p in group.parameters()} - selected - added:
            return []
        return [
            group.name
            for group in groups
            if group.proof != "guess" and all(id(parameter) in added for parameter in group.parameters())
        ]
