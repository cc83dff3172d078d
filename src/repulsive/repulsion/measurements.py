"""The measurements of a handle: store and report them, and warn about problems that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repulsive.errors import warn_user
from repulsive.heads.layout import HeadGroup
from repulsive.particles.collapse import EQUAL_COSINE, EQUAL_HEADS, EQUAL_PAIR, CollapsedHeads
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.growth_monitor import GrowthMonitor
from repulsive.repulsion.measured import ALPHA, FIELDS, REPULSION, Columns, Measured
from repulsive.repulsion.strength_monitor import StrengthMonitor


@dataclass(frozen=True)
class GroupReport:
    """One measurement of a group.

    Args:
        drive: norm of the part of the update that follows the loss.
        repulsion: norm of the repulsive part; with `act_every`, its mean over steps.
        ratio: repulsion / drive, the number to watch. Under Adam, 0.01 drives heads apart in the long run; far above 1
            repulsion outweighs the loss.
        bandwidth: h of the kernel.
        distance: mean distance between two heads.
        alpha: repulsive weight.
        similarity: mean cosine between two heads: of their weights, or of their logits under `space="logits"`.
        largest: largest cosine between two heads; the mean can hide a pair of duplicate heads.
        step: optimizer step of the measurement, -1 before the first.
        skipped: steps in which the rule acted and the group had no gradient.
    """

    name: str
    layer: int
    part: str
    where: str
    num_heads: int
    drive: float
    repulsion: float
    ratio: float
    bandwidth: float
    distance: float
    alpha: float
    similarity: float
    largest: float
    step: int
    skipped: int


class Measurements:
    """The first and the last measurement of each group.

    Args:
        groups: the groups of the handle.
        rule: the rule of the handle.
    """

    def __init__(self, groups: Sequence[HeadGroup], rule: Rule | None) -> None:
        self._groups = groups
        self.rule = rule
        self.reset()

    def reset(self) -> None:
        """Forget all measurements, and the warnings that were given about them."""
        self._strength, self._growth = StrengthMonitor(), GrowthMonitor()
        self._first: dict[str, Measured] = {}
        self._last: dict[str, Measured] = {}

    @property
    def has_first(self) -> bool:
        """Whether there is a measurement that was due."""
        return bool(self._first)

    @property
    def has_last(self) -> bool:
        """Whether there is any measurement."""
        return bool(self._last)

    def add(self, measured: Sequence[Measured], step: int, *, due: bool) -> None:
        """Store a measurement, and warn about problems that it shows.

        Args:
            measured: measurements of different groups.
            step: optimizer step.
            due: whether a measurement was due. If not, the rule measured for its own use, as alpha="auto" does at every
                step of the eager backend; such a measurement is stored, but not checked for problems.
        """
        for one in measured:
            self._last |= dict.fromkeys(one.rows, one)
        if not due:
            return
        if len(self._first) < len(self._groups):
            self._first = {name: one for one in measured for name in one.rows} | self._first
        if is_capturing():
            return
        self._check_strength(measured, step)
        self._check_growth(measured, step)
        if step == 0:
            self._warn_of_equal_heads(measured)

    def report(self, skipped: Mapping[str, int]) -> list[GroupReport]:
        """Return the last measurement of each group.

        Args:
            skipped: number of steps without a gradient, by group name.
        """
        return [_report(group, self._last, skipped) for group in self._groups]

    def first_report(self, skipped: Mapping[str, int]) -> list[GroupReport]:
        """Return the first measurement of each group; see `report`."""
        return [_report(group, self._first, skipped) for group in self._groups]

    def finish(self, steps: int) -> None:
        """Warn at the end of a training, also of a short one, if repulsion was stronger than the loss.

        Args:
            steps: number of optimizer steps of the training.
        """
        if (ratio := self._strength.finish()) is not None:
            self._warn_of_strength(ratio, steps)

    def _check_strength(self, measured: Sequence[Measured], step: int) -> None:
        if (ratio := self._strength.observe(step, measured)) is not None:
            self._warn_of_strength(ratio, step)

    def _check_growth(self, measured: Sequence[Measured], step: int) -> None:
        rule = self.rule
        if not isinstance(rule, SVGD) or rule.space != "weights" or rule.alpha == 0:
            return  # other rules do not push heads apart in the space of weights
        if (growth := self._growth.observe(measured)) is not None:
            warn_user(
                f"step {step}: heads are {growth:.1f} times as far apart as at the first measurement. Repulsion "
                "between weights can make them grow without end, which cost translation models 2.5 to 33 BLEU. "
                "Choose rule='sphere', the default, which keeps their norms, or compare with plain training"
            )

    def _warn_of_strength(self, ratio: float, step: int) -> None:
        holds_ratio = self.rule is not None and self.rule.holds_ratio
        other = "a smaller alpha, or rule='recommended', which holds the ratio at 0.01"
        warn_user(
            f"step {step}: repulsion is stronger than the loss. |repulsion| / |drive|, the median over groups and the "
            f"last measurements, is {ratio:.3g}. Choose {'a smaller ratio' if holds_ratio else other}"
        )

    def _warn_of_equal_heads(self, measured: Sequence[Measured]) -> None:
        """Warn about equal heads, once, as this waits for a GPU."""
        if self.rule is None or not self.rule.has_interaction or self.rule.has_noise:
            return
        all_equal, some_equal = [], []
        for name, values in ((name, one.values(name)) for one in measured for name in one.rows):
            if values["distance"] == 0:
                is_zero = not values["largest"] >= EQUAL_COSINE  # a new LoRA adapter, which the first step separates
                if not (is_zero and isinstance(self.rule, SVGD) and self.rule.smoothing == 0):
                    all_equal.append(name)
            elif values["largest"] >= EQUAL_COSINE:
                some_equal.append(name)
        for names, text in ((all_equal, EQUAL_HEADS), (some_equal, EQUAL_PAIR)):
            if names:
                warn_user(f"{', '.join(names[:6])}: {text}", CollapsedHeads)


def per_step(measured: Sequence[Measured], steps: int) -> list[Measured]:
    """Divide the repulsion of a step that acts for `steps` steps, so that ratio and alpha are those of the settings."""

    def divide(columns: Columns) -> None:
        for index in (REPULSION, ALPHA):
            if index < len(columns):
                columns[index] = [number / steps for number in columns[index]]

    return [one.changed(divide) for one in measured]


def _report(group: HeadGroup, all_measured: Mapping[str, Measured], skipped: Mapping[str, int]) -> GroupReport:
    measured = all_measured.get(group.name)
    values = dict.fromkeys(FIELDS, float("nan")) if measured is None else measured.values(group.name)
    step = -1 if measured is None else measured.step
    ratio = values["repulsion"] / values["drive"] if values["drive"] else float("nan")
    return GroupReport(
        group.name,
        group.layer,
        group.part,
        group.where,
        group.num_heads,
        ratio=ratio,
        step=step,
        skipped=skipped[group.name],
        **values,
    )
