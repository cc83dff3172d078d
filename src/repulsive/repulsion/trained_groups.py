"""Split groups of heads into trained and untrained groups of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import OptimizerError, UnsupportedWeights, list_first, warn_user
from repulsive.heads.layout import HeadGroup
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.sharding.shard_layout import check_placement

_SHOWN = 6  # groups that a message names


def split_trained(groups: Sequence[HeadGroup], optimizer: Optimizer) -> tuple[list[HeadGroup], list[HeadGroup]]:
    """Split groups into those that the optimizer trains and those that it does not; a warning names the latter.

    Raises:
        OptimizerError: the optimizer trains none of the groups.
        UnsupportedWeights: the weights of a group cannot be trained at all.
    """
    owned = parameter_ids(optimizer)
    trained: list[HeadGroup] = []
    others: list[HeadGroup] = []
    reasons: list[str] = []
    for group in groups:
        if reason := _why_not_trained(group, owned):
            others.append(group)
            reasons.append(f"{group.name} ({reason})")
        else:
            trained.append(group)
    shown = list_first(reasons, _SHOWN, "; ")
    if not trained:
        if any(group.is_attention for group in groups):
            raise OptimizerError(f"the optimizer trains none of the selected heads: {shown}. {_remedy(reasons)}")
        raise OptimizerError(
            f"the optimizer trains no group with all of its particles: {shown}. Make groups of those that it trains, "
            "or unfreeze the others and give them to the optimizer"
        )
    if reasons:
        warn_user(f"{len(reasons)} of {len(groups)} groups of heads are left out: {shown}")
    return trained, others


def _remedy(reasons: Sequence[str]) -> str:
    if all("frozen" in reason for reason in reasons):
        return "Unfreeze them; with LoRA, name the attention projections in target_modules"
    return "Build it from the parameters of this model object, with the heads unfrozen"


def newly_trained(others: Sequence[HeadGroup], optimizer: Optimizer) -> list[str]:
    """Return the names of groups that were left out before but that the optimizer now trains."""
    owned = parameter_ids(optimizer)
    return [group.name for group in others if _why_not_trained(group, owned) is None]


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of all parameters of an optimizer."""
    return {id(p) for entry in optimizer.param_groups for p in entry["params"]}


def entries_with_heads(optimizer: Optimizer, groups: Sequence[HeadGroup]) -> list[dict[str, Any]]:
    """Return the entries of `optimizer.param_groups` that train heads."""
    heads = {id(parameter) for group in groups for parameter in group.parameters()}
    return [entry for entry in optimizer.param_groups if any(id(p) in heads for p in entry["params"])]


def _place(parameter: Tensor) -> str:
    placements = f" as {tuple(parameter.placements)} of {parameter.device_mesh}" if is_sharded(parameter) else ""
    return f"{parameter.device}{placements}"


def _why_not_trained(group: HeadGroup, owned: set[int]) -> str | None:
    for run in group.runs():
        places = {_place(part.parameter()) for part in run}
        if len(places) > 1:
            raise UnsupportedWeights(
                f"{group.name}: its modules lie on {' and '.join(sorted(places))}; expected one device, and equal "
                "placements if they are sharded"
            )
    for part in group.slices:
        parameter = part.parameter()
        check_placement(part)
        if not parameter.is_floating_point():
            raise UnsupportedWeights(f"{part.parameter_name}: {parameter.dtype} weights cannot be trained")
        if not parameter.requires_grad:
            return f"{part.parameter_name} is frozen" if group.modules > 1 else "frozen"
        if id(parameter) not in owned:
            return f"{part.parameter_name} is not in the optimizer" if group.modules > 1 else "not in the optimizer"
    return None
