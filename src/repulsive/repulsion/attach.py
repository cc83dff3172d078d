"""`repel`: one line that turns training into particle-optimisation sampling over attention heads."""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from repulsive.errors import OptimizerError, RuleError, SelectionError, UnsupportedWeights
from repulsive.heads import describe, find_heads
from repulsive.heads.discover import left_out
from repulsive.heads.layout import HeadGroup
from repulsive.heads.proof import refuse_unproved
from repulsive.particles.rule import Rule
from repulsive.particles.sgld import SGLD
from repulsive.particles.spos import SPOS
from repulsive.particles.svgd import SVGD
from repulsive.repulsion import sharding
from repulsive.repulsion.handle import NOISE_PLACES, ORDERS, Handle, Settings
from repulsive.repulsion.logits.update import LogitRepulsion
from repulsive.repulsion.logits.values import output_groups
from repulsive.repulsion.owners import claimed_twice

_SLOWING = 1e-4  # an optimiser's eps above it is no longer small beside most gradients


def repel(
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule | None = SVGD(),  # noqa: B008  rules are frozen
    layers: str | Sequence[int] = "all",
    parts: str = "qkv",
    where: str = "all",
    particle: str = "projection",
    *,
    match: str | Sequence[str] | None = None,
    groups: Sequence[HeadGroup] | None = None,
    layout: str = "heads",
    example_inputs: Any = None,
    allow_unproved: bool = False,
    order: str = "clip-repel",
    max_norm: float | None = None,
    noise_in: str = "gradient",
    seed: int = 0,
    measure_every: int = 50,
    verbose: bool = True,
) -> Handle:
    """Make the heads of a model repel each other from the next optimiser step on.

    Model, loss and optimiser stay as they are: between `backward` and `step` the gradients of the selected heads are
    replaced by what `rule` makes of them. Either everything is attached or, on an error, nothing is changed.

    Args:
        model: any model with attention; wrapped ones (DDP, torch.compile, PEFT) and sharded ones (FSDP2, tensor
            parallel) too.
        optimizer: any torch optimiser that owns the heads, or a wrapper with one inside.
        rule: `SVGD`, `SPOS`, `SGLD`, or None for plain training that is measured only.
        layers: "all", "first" or "last" of each stack, or indices.
        parts: any of the letters q, k, v.
        where: "encoder", "decoder", "cross" or "all".
        particle: "projection" keeps q, k and v apart; "head" joins them into one particle per head.
        match: pattern or patterns on group names, such as "*.layer.0.*".
        groups: groups of heads from `find_heads` or made by hand, instead of the selection above.
        layout: "heads", or "strided" for the slices of the authors' released code.
        example_inputs: inputs of the model; if given, slices are proved by a trace and unknown classes inferred.
        allow_unproved: also train heads that are a guess from names and shapes, or that the example did not prove.
        order: where clipping to `max_norm` sits: "clip-repel" or "repel-clip".
        max_norm: clip the gradients of all of the optimiser's parameters to this joint norm; None leaves it to you.
            Clipping in your own loop comes before the rule, unless you call `apply` of the handle before it.
        noise_in: "gradient" as published, where the optimiser rescales it; or "parameter", added after the step.
        seed: of the noise of SPOS and SGLD.
        measure_every: steps between two measurements for `report`; one costs a further pass over the gradients.
        verbose: print what was selected.

    Returns:
        A `Handle`: `report()`, `remove()`, `state_dict()`, `load_state_dict()`, `apply()`; also a context manager.

    Raises:
        NoHeadsFound: the model has no heads that are known or could be inferred.
        SelectionError: the selection is misspelt or empty, or has a weight in two groups.
        OptimizerError: the optimiser owns none of the heads, cannot be hooked, repels them already, or has no learning
            rate that noise could follow.
        UnsupportedWeights: weights are quantised or sparse, or spread over ranks as partial sums.
        RuleError: `rule` is none, or `order`, `max_norm`, `noise_in`, `seed` or `measure_every` has no such value.
        HeadLayoutError: heads are a guess, or with `example_inputs` a slice is not proved to be the head it claims
            to be; unless `allow_unproved`.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> handle = repel(model, optimizer, rule=SVGD(stepsize=0.1, alpha=0.01), verbose=False)
    """
    _check(rule, order, noise_in, max_norm, measure_every)
    try:
        seed = operator.index(seed)  # numpy's too, which JSON does not know
    except TypeError:
        raise RuleError(f"seed={seed!r}: must be a whole number") from None
    inner = unwrap_optimizer(optimizer)
    if groups is None:
        with sharding.explaining_flat_weights(model):
            groups = find_heads(
                model,
                example_inputs,
                layout=layout,
                layers=layers,
                parts=parts,
                where=where,
                particle=particle,
                match=match,
            )
    if rule is not None and rule.reads_tokens:
        groups = _logit_groups(model, groups, rule, parts, particle, layout)
    _check_apart(groups)
    trained = _trained(list(groups), inner)
    if not allow_unproved:
        refuse_unproved(model, trained, example_inputs)
    if alone := [group.name for group in trained if group.num_heads == 1]:
        told = f"{len(alone)} of {len(trained)} groups have one head, which has nothing to be repelled from"
        warnings.warn(f"{told}: {', '.join(alone[:6])}", stacklevel=2)
    if slowed := _slowed(rule, trained, inner):
        warnings.warn(slowed, stacklevel=2)
    settings = Settings(seed, order, max_norm, noise_in, measure_every)
    logits = None
    if isinstance(rule, SVGD) and rule.reads_tokens:
        logits = LogitRepulsion(model, groups, rule, seed)
    handle = Handle(trained, inner, rule, settings, logits)
    handle.attach()
    if verbose and _is_first_rank():
        title = f"repulsive: {rule or 'plain training, measured only'}"
        print("\n".join([title, describe(trained), *_left_out(model, groups)]))
    return handle


def _logit_groups(
    model: nn.Module, groups: Sequence[HeadGroup], rule: Rule, parts: str, particle: str, layout: str
) -> list[HeadGroup]:
    """The q and k groups, which logits are made of; values and outputs only where the rule has them, too."""
    if not {"q", "k"} <= set(parts):
        raise RuleError(f"parts={parts!r}: space='logits' moves q and k together; leave parts out, or use parts='qk'")
    if particle != "projection" or layout != "heads":
        raise RuleError("space='logits' makes its own particles, pairs (q, k) of a head; leave particle and layout out")
    if isinstance(rule, SVGD) and rule.circuits == "qk+ov":
        if "v" not in parts:
            raise RuleError(f"parts={parts!r}: circuits='qk+ov' moves v, too; leave parts out")
        return [*groups, *output_groups(model, groups)]
    chosen = [group for group in groups if group.part in ("q", "k")]
    if not chosen:
        names = ", ".join(group.name for group in groups[:4])
        raise RuleError(
            f"space='logits' needs heads with q and k, and found none: {names}. Additive and graph attention have no "
            "such logits; choose space='sphere'"
        )
    return chosen


def _left_out(model: nn.Module, groups: Sequence[HeadGroup]) -> list[str]:
    """A line on attention whose heads are not known, where there is some."""
    found = [f"{name} ({kind})" for name, kind in left_out(model, groups).items()]
    if not found:
        return []
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return [f"left out, as their heads are not known: {', '.join(found[:4])}{more}; example_inputs may help"]


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimiser inside wrappers, such as those of Accelerate and Lightning, SAM or schedule-free ones.

    What changes weights is the step of the innermost: a wrapper's own may never be called, or more often.
    """
    seen = [optimizer]
    while (inner := _inside(seen[-1])) is not None and not any(inner is one for one in seen):
        seen.append(inner)
    found = seen[-1]
    if not isinstance(found, Optimizer) or not hasattr(found, "_optimizer_step_pre_hooks"):
        raise OptimizerError(
            f"{type(optimizer).__name__} is no torch optimiser with step hooks, nor wraps exactly one; "
            "give the torch optimiser itself, or call repel for each of several"
        )
    return found


def _inside(outer: Any) -> Optimizer | None:
    """The optimiser a wrapper steps: its `optimizer`, or the only other one it holds that trains all it trains."""
    named = getattr(outer, "optimizer", None)
    if isinstance(named, Optimizer):
        return named
    own = {id(p) for entry in getattr(outer, "param_groups", ()) for p in entry["params"]}
    held = {id(value): value for value in getattr(outer, "__dict__", {}).values() if isinstance(value, Optimizer)}
    whole = [one for one in held.values() if own <= {id(p) for entry in one.param_groups for p in entry["params"]}]
    return whole[0] if len(whole) == 1 else None


def _trained(groups: list[HeadGroup], optimizer: Optimizer) -> list[HeadGroup]:
    """The groups this optimiser trains; the others are named in a warning, and all others in an error."""
    owned = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
    trained: list[HeadGroup] = []
    left_out: list[str] = []
    for group in groups:
        if reason := _why_not(group, owned):
            left_out.append(f"{group.name} ({reason})")
        else:
            trained.append(group)
    if not trained:
        raise OptimizerError(
            "this optimiser trains none of the selected heads: "
            + "; ".join(left_out[:6])
            + ". Make it from the parameters of this very model, with the heads unfrozen"
        )
    if left_out:
        warnings.warn(
            f"{len(left_out)} of {len(groups)} groups of heads are left out: {'; '.join(left_out[:6])}", stacklevel=3
        )
    return trained


def _slowed(rule: Rule | None, groups: Sequence[HeadGroup], optimizer: Optimizer) -> str | None:
    """Where gradients that the rule has made small are no longer large beside the optimiser's eps: a word on it."""
    if not isinstance(rule, SVGD | SGLD):
        return None
    heads = max(group.num_heads for group in groups)
    share = float(rule.drive(torch.eye(heads))[0, 0]) if isinstance(rule, SVGD) else rule.stepsize
    owned = {id(parameter) for group in groups for parameter in group.parameters()}
    entries = [entry for entry in optimizer.param_groups if any(id(p) in owned for p in entry["params"])]
    eps = max((entry["eps"] for entry in entries if isinstance(entry.get("eps"), float)), default=0.0)
    if eps < _SLOWING * share:
        return None
    return (
        f"heads get about {share:.2g} of their gradient, so that eps={eps:g} of the optimiser acts on them like "
        f"{eps / share:.2g} and slows them down; choose a larger stepsize ({rule.stepsize / share:.3g} gives them all "
        "of it), or a smaller eps"
    )


def _check_apart(groups: Sequence[HeadGroup]) -> None:
    """Rows in two groups would be changed twice in one step; reports and noise are told apart by names."""
    if not groups:
        raise SelectionError("groups is empty; leave it out to select all heads")
    if twice := claimed_twice(groups):
        raise SelectionError(f"{twice[0]} and {twice[1]} share weights; give each weight to one group")
    names = Counter(group.name for group in groups)
    if again := [name for name, count in names.items() if count > 1]:
        raise SelectionError(
            f"{again[0]}: {names[again[0]]} groups have this name. Put the models into one, such as an "
            "nn.ModuleDict, and find the heads of that"
        )


def _why_not(group: HeadGroup, owned: set[int]) -> str | None:
    for part in group.slices:
        parameter = part.parameter()
        sharding.check(part)
        if not parameter.is_floating_point():
            raise UnsupportedWeights(f"{part.parameter_name}: {parameter.dtype} weights cannot be trained")
        if not parameter.requires_grad:
            return "frozen"
        if id(parameter) not in owned:
            return "not in the optimiser"
    return None


def _check(rule: Rule | None, order: str, noise_in: str, max_norm: float | None, measure_every: int) -> None:
    if rule is not None and not isinstance(rule, Rule):
        raise RuleError(f"rule={rule!r} is no rule; give SVGD(), SPOS(), SGLD() or None")
    if order not in ORDERS:
        raise RuleError(f"order={order!r}: choose one of {ORDERS}")
    if noise_in not in NOISE_PLACES:
        raise RuleError(f"noise_in={noise_in!r}: choose one of {NOISE_PLACES}")
    if noise_in == "parameter" and isinstance(rule, SPOS) and rule.noise == "released":
        raise RuleError("noise_in='parameter' and noise='released' exclude each other: the latter scales by gradients")
    if max_norm is not None and not max_norm > 0:
        raise RuleError(f"max_norm={max_norm!r}: must be positive, or None")
    if max_norm is None and order == "repel-clip":
        raise RuleError(
            "order='repel-clip' without max_norm clips nothing: give max_norm=..., or leave order out and call "
            "handle.apply() before your own clipping"
        )
    if not (isinstance(measure_every, int) and measure_every >= 1):
        raise RuleError(f"measure_every={measure_every!r}: must be a whole number of steps, at least 1")


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
