"""Deferred `repel` for callbacks that are created before the optimizer, shared by the callbacks of all trainers."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from repulsive.errors import OptimizerError, StateError, warn_user
from repulsive.heads.discover import check_layout
from repulsive.heads.select import check_words
from repulsive.particles.named import RuleName
from repulsive.particles.rule import Rule
from repulsive.repulsion import Handle, repel
from repulsive.repulsion.attach import check_arguments
from repulsive.repulsion.checks import SELECTION, check_flags, check_given, check_groups, check_settings, resolve_rule
from repulsive.repulsion.model_collapse import CollapseDetector
from repulsive.repulsion.settings import Settings


class Deferred:
    """Arguments of `repel`, stored until training begins, and its handles while training runs.

    Args:
        rule: as in `repel`.
        settings: other keyword arguments of `repel`.

    Raises:
        UnknownSetting: `repel` has no such argument.
        RuleError: the rule is unknown, or a setting is unknown or out of range.
        SelectionError: a word that selects heads is unknown.
    """

    def __init__(self, rule: Rule | RuleName | None, settings: Mapping[str, object]) -> None:
        _check(rule, settings)  # a misspelt word fails here, not when training begins
        self.rule = rule  # not resolved: `repel` treats some names apart
        self.settings: dict[str, Any] = dict(settings)
        self.handles: list[Handle] = []
        self._steps_before: list[int] = []
        self._is_running = False  # between `begin` and `end`
        self._collapse = CollapseDetector()

    @property
    def handle(self) -> Handle | None:
        """The handle; None before training.

        Raises:
            OptimizerError: there are several handles.
        """
        if len(self.handles) > 1:
            raise OptimizerError(
                f"{len(self.handles)} optimizers own heads: use `handles`, which has one handle for each"
            )
        return next(iter(self.handles), None)

    @property
    def order(self) -> str:
        """The `order` of clipping and repulsion, given or default."""
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
        """Attach the rule to every target optimizer, and restore the state in `saved`.

        Args:
            model: the model.
            targets: optimizers, each with its own settings, such as its `groups`.
            saved: the result of `states` from the checkpoint, one per target.
            resumed: whether training resumes from a checkpoint, so that `saved` is expected.

        Raises:
            StateError: the checkpoint has another number of optimizers, or other heads.
        """
        self.detach()  # handles of a previous run that failed before `end`
        self.handles, self._collapse = [], CollapseDetector()
        if resumed and saved is None:
            warn_user("this checkpoint was made without repulsion: steps of repulsion and schedules start from 0")
        if saved is not None and len(saved) != len(targets):
            raise StateError(
                f"the checkpoint has repulsion in {len(saved)} optimizers, this training in {len(targets)}; use the "
                "same optimizers as when it was saved"
            )
        try:
            for index, (optimizer, own) in enumerate(targets):
                settings = {**self.settings, **own}
                if "groups" in own:  # already selected
                    settings = {name: value for name, value in settings.items() if name not in SELECTION}
                self.handles.append(repel(model, optimizer, self.rule, **settings))
                if saved is not None:
                    self.handles[-1].load_state_dict(saved[index])
        except Exception:
            self.detach()
            raise
        self._steps_before = [handle.steps for handle in self.handles]
        self._is_running = True

    def states(self, *, tensors: bool = True) -> list[dict[str, Any]]:
        """Return the states of all handles, for a checkpoint.

        Args:
            tensors: if False, leave out tensors, which JSON cannot store.
        """
        return [handle.state_dict(tensors=tensors) for handle in self.handles]

    def measurements(self, step: int, loss: float = math.nan) -> dict[str, float]:
        """Return means over all groups from the last measurement, for the log; empty before the first measurement.

        `repulsion_step` is the optimizer step of the measurement, one of the last `measure_every` + `act_every` steps.
        Warns once if the model has collapsed since this training began.

        Args:
            step: current step of the training.
            loss: loss that is logged; nan if unknown.
        """
        reports = [report for handle in self.handles for report in handle.report()]
        columns = {
            "repulsion_ratio": [report.ratio for report in reports],
            "head_distance": [report.distance for report in reports],
            "head_similarity": [report.similarity for report in reports],
            "drive": [report.drive for report in reports],
        }
        finite = {name: [value for value in values if math.isfinite(value)] for name, values in columns.items()}
        means = {name: sum(values) / len(values) for name, values in finite.items() if values}
        if means:
            means["repulsion_step"] = float(max(report.step for report in reports))
        if message := self._collapse.observe(step, loss, means.pop("drive", math.nan)):
            warn_user(message)
        return means

    def end(self) -> None:
        """Detach all handles; warn if repulsion never acted, stopped acting during training, or was too strong."""
        if not self._is_running:  # `handles` may have those of a previous training
            warn_user("repulsion never began: training ended before its first step")
            return
        for handle, before in zip(self.handles, self._steps_before, strict=True):
            steps, first = handle.steps - before, handle.groups[0].name
            if not handle.attached:
                warn_user(
                    f"the optimizer of {first} lost its hooks after {steps} steps with repulsion and went on without; "
                    "attach again after an optimizer is copied, unpickled or replaced"
                )
            elif steps == 0:
                warn_user(f"repulsion never fired: the optimizer of {first} took no step in this training")
            handle.warn_of_strength()
        self.detach()

    def detach(self) -> None:
        """Detach all handles without warnings; their reports stay readable."""
        self._is_running = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `end` has warned already, or an error is being raised
            for handle in self.handles:
                handle.remove()


def _check(rule: object, settings: Mapping[str, object]) -> None:
    """Check everything about the arguments of `repel` that needs neither model nor optimizer."""
    check_arguments(settings, rule)
    check_words(
        **{name: settings[name] for name in ("layers", "parts", "where", "particle", "match") if name in settings}
    )
    check_layout(settings.get("layout", SELECTION["layout"]))
    check_flags(**{name: settings[name] for name in ("allow_unproved", "verbose") if name in settings})
    if settings.get("groups") is not None:
        check_groups(settings["groups"])
        check_given({**SELECTION, **{name: settings[name] for name in SELECTION if name in settings}})
    own: dict[str, Any] = {field.name: settings[field.name] for field in fields(Settings) if field.name in settings}
    if own.get("max_norm") is None and own.get("order") == "repel-clip":
        del own["order"]  # whether it needs `max_norm` depends on the trainer
    check_settings(resolve_rule(rule), Settings(**own))
