"""`repel`, said before there is an optimiser: what the callbacks of different trainers share."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from repulsive.errors import OptimizerError, StateError
from repulsive.particles.named import RuleName
from repulsive.particles.rule import Rule
from repulsive.repulsion import Handle, repel
from repulsive.repulsion.attach import check_arguments
from repulsive.repulsion.checks import SELECTION, resolve_rule
from repulsive.repulsion.model_collapse import CollapseDetector


class Deferred:
    """The arguments of `repel`, kept until training begins, and the handles made of them until it ends.

    Args:
        rule: as in `repel`.
        settings: the other arguments of `repel`, by name.

    Raises:
        UnknownSetting: `repel` has no such argument.
        RuleError: the rule is unknown.
    """

    def __init__(self, rule: Rule | RuleName | None, settings: Mapping[str, Any]) -> None:
        check_arguments(settings)  # a misspelt name fails here, not hours later
        self.rule = resolve_rule(rule)
        self.settings = dict(settings)
        self.handles: list[Handle] = []
        self._steps_before: list[int] = []
        self._collapse = CollapseDetector()

    @property
    def handle(self) -> Handle | None:
        """The handle, None before training.

        Raises:
            OptimizerError: there are several handles.
        """
        if len(self.handles) > 1:
            raise OptimizerError(f"{len(self.handles)} optimizers own heads: use `handles`, which has one for each")
        return next(iter(self.handles), None)

    @property
    def order(self) -> str:
        default = inspect.signature(repel).parameters["order"].default
        return str(self.settings.get("order", default))

    def begin(
        self,
        model: nn.Module,
        targets: Sequence[tuple[Any, Mapping[str, Any]]],
        saved: Sequence[dict[str, Any]] | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """Attach to every target, and go on where `saved` was taken.

        Args:
            model: the model.
            targets: optimisers, each with settings of its own, such as its `groups`.
            saved: what `states` gave when the checkpoint was made, one per target.
            resumed: training goes on from a checkpoint, so `saved` should be there.

        Raises:
            StateError: the checkpoint is of another number of optimisers, or of other heads.
        """
        self.abandon()  # a run that broke off never came to its end
        self.handles, self._collapse = [], CollapseDetector()
        if resumed and saved is None:
            warnings.warn(
                "this checkpoint was made without repulsion: its steps, and any schedule, count from 0", stacklevel=3
            )
        if saved is not None and len(saved) != len(targets):
            raise StateError(f"the checkpoint repels with {len(saved)} optimisers, this training with {len(targets)}")
        try:
            for index, (optimizer, own) in enumerate(targets):
                settings = {**self.settings, **own}
                if "groups" in own:  # selected already
                    settings = {name: value for name, value in settings.items() if name not in SELECTION}
                self.handles.append(repel(model, optimizer, self.rule, **settings))
                if saved is not None:
                    self.handles[-1].load_state_dict(saved[index])
        except Exception:
            self.abandon()
            raise
        self._steps_before = [handle.steps for handle in self.handles]

    def states(self, *, tensors: bool = True) -> list[dict[str, Any]]:
        """What a checkpoint must hold.

        Args:
            tensors: False leaves out what JSON cannot hold: forces between logits, which a resumed run computes anew.
        """
        states = [handle.state_dict() for handle in self.handles]
        return states if tensors else [{k: v for k, v in state.items() if k != "forces"} for state in states]

    def look(self, step: int, loss: float = math.nan) -> dict[str, float]:
        """Means over all groups, as last measured, to be logged; empty before the first measurement.

        `repulsion_step` is the optimizer step they were measured at, which may be up to `measure_every` steps ago.
        Warns once if the model has collapsed, as far as it can be seen since this training began.

        Args:
            step: of the training.
            loss: as it is logged; nan where it is not known.
        """
        reports = [report for handle in self.handles for report in handle.report()]
        columns = {
            "repulsion_ratio": [report.ratio for report in reports],
            "head_distance": [report.distance for report in reports],
            "head_similarity": [report.similarity for report in reports],
            "drive": [report.drive for report in reports],
        }
        known = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
        means = {name: sum(values) / len(values) for name, values in known.items() if values}
        if means:
            means["repulsion_step"] = float(max(report.step for report in reports))
        if told := self._collapse.observe(step, loss, means.pop("drive", math.nan)):
            warnings.warn(told, stacklevel=3)
        return means

    def end(self) -> None:
        """Detach; warn of repulsion that never acted, or stopped acting on the way."""
        if not self.handles:
            warnings.warn("repulsion never began: training ended before its first step", stacklevel=3)
        for handle, before in zip(self.handles, self._steps_before, strict=True):
            steps, first = handle.steps - before, handle.groups[0].name
            if not handle.attached:
                warnings.warn(
                    f"the optimiser of {first} lost its hooks after {steps} steps with repulsion; it was copied, "
                    "unpickled or replaced, and went on without",
                    stacklevel=3,
                )
            elif steps == 0:
                warnings.warn(
                    f"repulsion never fired: the optimiser of {first} took no step in this training", stacklevel=3
                )
        self.abandon()

    def abandon(self) -> None:
        """Detach without a word; the handles stay readable."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `end` has said it, or an error says more
            for handle in self.handles:
                handle.remove()
