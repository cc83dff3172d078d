r"""Repulsion added to the weights after the optimizer's step: `repel(force_in="step")`.

An optimizer that orthogonalises its update, such as Muon, raises all singular values of the gradient to one. It
amplifies the small repulsive part and turns it, so that a force along the sphere changes norms. Here the optimizer
sees only the part that follows the loss. With $\Delta$ the step that it took and $F$ the repulsive force before the
step, the weights of a group then get

$$\theta \leftarrow \theta + \rho\,|\Delta|\,F / |F|,$$

so that the ratio $\rho$ of the rule holds for the change of the weights, whatever the optimizer does. Nothing is added
if $F$ is zero or a rounding error, as between parallel heads on the sphere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import RuleError, UnsupportedWeights
from repulsive.heads.layout import HeadGroup
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.particles.gram import apply_matrix, compute_dtype, full_precision, gram
from repulsive.particles.rule import Rule, copy_with
from repulsive.particles.svgd import RATIO, SVGD
from repulsive.repulsion.active_updates import is_idle
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.measured import ALPHA, DRIVE, REPULSION, Columns, Measured
from repulsive.repulsion.optimizers import has_nothing_to_follow
from repulsive.repulsion.settings import ForcePlace
from repulsive.repulsion.trained_groups import entries_with_heads

# A ratio in the gradient, and what Muon makes of it in one step, and in steps with their momentum (results/optimizers).
IN_GRADIENT, IN_ONE_STEP, IN_STEPS = 0.03, 0.1, 0.7
_ORTHOGONALISING = ("muon", "dion", "scion", "shampoo")  # in names of classes


class StepForce:
    """The repulsive part of a rule, added to the weights after each step in which the rule acts.

    Args:
        groups: the heads that the rule acts on.
        rule: a rule that `refusal` accepts.

    Attributes:
        gradient_rule: the rule without its repulsive part, for the gradients.
    """

    def __init__(self, groups: Sequence[HeadGroup], rule: SVGD) -> None:
        self.gradient_rule = copy_with(rule, alpha=0.0, ratio=RATIO)
        # The prior stays in the gradients.
        self._unit_rule = copy_with(rule, alpha=1.0, ratio=RATIO, prior="uniform", act_every=1)
        self._rule = rule
        self._groups = groups
        self._copies: list[tuple[HeadGroup, Tensor]] = []  # all groups, and their heads before the step
        self._before: list[tuple[HeadGroup, Tensor]] = []  # those of them that have gradients
        self._idle: set[int] = set()  # ids of parameters without a gradient

    def begin(self) -> None:
        """Copy the weights of all heads; call it before the step and before its closure, which may run several times.

        Raises:
            UnsupportedWeights: weights were sharded after `repel`.
        """
        if any(is_sharded(parameter) for group in self._groups for parameter in group.parameters()):
            raise UnsupportedWeights("force_in='step' does not support sharded weights; use force_in='gradient'")
        self._copies = [(group, group.read()) for group in self._groups]  # [M, D] each

    def select(self) -> None:
        """Select the groups that have gradients; call it when gradients exist, before the optimizer changes weights."""
        self._before = [(group, heads) for group, heads in self._copies if not is_idle(group)]
        parameters = [parameter for group, _ in self._before for parameter in group.parameters()]
        self._idle = {id(parameter) for parameter in parameters if has_nothing_to_follow(parameter)}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the force to the weights; call it after the optimizer has changed them.

        Args:
            step: optimizer steps taken before this one, for schedules.
        """
        ratio = self._rule.value_at("ratio", step) * (1 if is_capturing() else self.gradient_rule.act_every)
        for group, before in self._before:
            force = self._force(before, step)
            taken = (group.read().to(force.dtype) - before.to(force.dtype)).norm()
            norm = force.norm()
            scale = torch.where(norm > 0, ratio * taken / torch.where(norm > 0, norm, 1.0), 0.0)
            self._add_to_heads(group, scale * force)
        self._copies, self._before = [], []

    def corrected(self, measured: Sequence[Measured], step: int) -> list[Measured]:
        """Return measurements of the gradients with the repulsion that follows the step, in the same units.

        The ratio |repulsion| / |drive| is that of the weights' change. `alpha` has no meaning here, and is NaN. Call it
        after `select`.
        """
        if not measured:
            return []
        ratio = self._rule.value_at("ratio", step)
        has_force = {group.name: self._force(before, step).any() for group, before in self._before}

        def correct(rows: Mapping[str, int], columns: Columns) -> None:
            for name, row in rows.items():
                columns[REPULSION][row] = ratio * columns[DRIVE][row] if has_force[name] else 0.0
            columns[ALPHA] = [math.nan] * len(columns[ALPHA])

        return [one.changed(partial(correct, one.rows)) for one in measured]

    @torch.no_grad()
    def _force(self, heads: Tensor, step: int) -> Tensor:
        """Compute the repulsive force at alpha = 1, [M, D], in the dtype of computation; zero if it is rounding error.

        A rounding error must not be scaled up to the target ratio; see `SVGD.weight_of`.
        """
        theta = heads.to(compute_dtype(heads))
        with full_precision(theta.device):
            if self._rule.has_matrix_form:
                products = gram(theta)
                matrix = self._unit_rule.coefficients(products, step=step).force
                assert matrix is not None
                force = -apply_matrix(matrix, theta)
                is_none = products.norm_of(matrix) <= products.rounding_of(matrix)
                is_none = is_none | (products.squared_distances.amax() == 0)
            else:
                _, force, rounding = self._rule.repulsion_by_autograd(theta)
                is_none = force.norm() <= rounding
        return torch.where(is_none, 0.0, force)

    def _add_to_heads(self, group: HeadGroup, shift: Tensor) -> None:
        """Add `shift` [M, D] to the weights of a group's heads; modules without a gradient stay where they are."""
        heads = group.slices[0].num_heads  # of one module
        column = 0
        for run in group.runs():
            part = shift[:, column : column + run[0].dim]  # [M, D of this parameter]
            column += run[0].dim
            for module, piece in enumerate(run):
                if id(piece.parameter()) in self._idle:
                    continue
                weight = piece.parameter().detach()
                current = piece.take(weight)  # [M of this module, D]
                piece.put(weight, current + part[module * heads : (module + 1) * heads].to(current.dtype))


def refusal(rule: Rule | None, groups: Sequence[HeadGroup]) -> str | None:
    """Return the reason why a rule cannot act after the step; None if it can."""
    if rule is not None and rule.reads_tokens:
        return "space='logits' is not supported; choose space='sphere'"
    if not isinstance(rule, SVGD) or not rule.holds_ratio:
        return "it needs a rule that holds a ratio: alpha='auto'"
    if any(is_sharded(parameter) for group in groups for parameter in group.parameters()):
        return "sharded weights are not supported"
    return None


def check_step_force(rule: Rule | None, groups: Sequence[HeadGroup]) -> None:
    """Raise an error if a rule cannot act after the step.

    Raises:
        RuleError: the rule holds no ratio, or reads tokens, or weights are sharded.
    """
    if reason := refusal(rule, groups):
        raise RuleError(f"force_in='step': {reason}; or leave force_in out")


def choose_place(
    place: ForcePlace, rule: Rule | None, groups: Sequence[HeadGroup], optimizer: Optimizer
) -> tuple[ForcePlace, str | None]:
    """Resolve `force_in="auto"`, and return it with a warning; None if there is nothing to warn about.

    Args:
        place: the argument `force_in` of `repel`.
        rule: the rule.
        groups: the heads that the rule acts on.
        optimizer: the torch optimizer itself, not a wrapper.
    """
    has_force = rule is not None and rule.has_interaction and getattr(rule, "alpha", None) != 0
    if not has_force or not orthogonalises(optimizer, groups):
        return ("gradient" if place == "auto" else place), None
    reason = refusal(rule, groups)
    if place == "step" or (place == "auto" and reason is None):
        return "step", None
    remedy = "Leave force_in out"
    if reason:
        refused = f"force_in='step' would avoid this, but cannot be used here: {reason}"
        remedy = f"{refused}. Or use another optimizer for the heads"
    return "gradient", (
        f"{type(optimizer).__name__} orthogonalises its updates, which amplifies repulsion in the gradient: under Muon "
        f"a ratio of {IN_GRADIENT} was measured as {IN_ONE_STEP} of one step and {IN_STEPS} of the steps over time, "
        f"and norms grow. {remedy}"
    )


def orthogonalises(optimizer: Optimizer, groups: Sequence[HeadGroup]) -> bool:
    """Check whether an optimizer orthogonalises the updates of heads: Muon, Dion, Scion and Shampoo, by class name.

    Implementations that train other parameters with Adam mark their parameter groups with `use_muon`.
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if not any(word in name for name in names for word in _ORTHOGONALISING):
        return False
    return any(entry.get("use_muon", True) for entry in entries_with_heads(optimizer, groups))
