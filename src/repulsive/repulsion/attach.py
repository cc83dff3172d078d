"""`repel`: one line that turns training into particle-optimisation sampling over attention heads."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Never, cast

import torch
from torch import nn
from torch.optim import Optimizer

from repulsive.errors import OptimizerError
from repulsive.heads import find_heads
from repulsive.heads.discover import Layout, left_out
from repulsive.heads.layout import HeadGroup
from repulsive.heads.proof import refuse_unproved
from repulsive.heads.select import LayersName, Particle, Where
from repulsive.particles.named import RuleName
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion import checks, shrinking
from repulsive.repulsion.handle import Handle
from repulsive.repulsion.logits.update import LogitRepulsion
from repulsive.repulsion.settings import NoisePlace, Order, Settings
from repulsive.repulsion.sharding import parts as sharding
from repulsive.repulsion.show import attached_line, attached_table
from repulsive.repulsion.trained import split_trained


def repel(
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule | RuleName | None = SVGD(),  # noqa: B008  rules are frozen
    layers: LayersName | Sequence[int] = "all",
    parts: str = "qkv",
    where: Where = "all",
    particle: Particle = "projection",
    *,
    match: str | Sequence[str] | None = None,
    groups: Sequence[HeadGroup] | None = None,
    layout: Layout = "heads",
    example_inputs: Any = None,
    allow_unproved: bool = False,
    order: Order = "clip-repel",
    max_norm: float | None = None,
    noise_in: NoisePlace = "gradient",
    seed: int = 0,
    measure_every: int = 50,
    verbose: bool | None = None,
    **unknown: Never,
) -> Handle:
    """Make the heads of a model repel each other from the next optimiser step on.

    Model, loss and optimiser stay as they are: between `backward` and `step` the gradients of the selected heads are
    replaced by what `rule` makes of them. Either everything is attached or, on an error, nothing is changed.

    Args:
        model: any model with attention; wrapped ones (DDP, torch.compile, PEFT) and sharded ones (FSDP2, tensor
            parallel) too.
        optimizer: any torch optimiser that owns the heads, or a wrapper with one inside.
        rule: `SVGD`, `SPOS`, `SGLD`; a name, "paper", "sphere", "svgd", "spos", "sgld" or "logits" (see
            `rule_by_name`); or None for plain training that is measured only.

            **Which heads** (`groups` replaces the others):
        layers: "all", "first" or "last" of each stack, or indices.
        parts: any of the letters q, k, v.
        where: "encoder", "decoder", "cross" or "all".
        particle: "projection" keeps q, k and v apart; "head" joins them into one particle per head.
        match: pattern or patterns on group names, such as "*.layer.0.*".
        layout: "heads", or "strided" for the slices of the authors' released code.
        example_inputs: inputs of the model; if given, slices are proved by a trace and unknown classes inferred.
        allow_unproved: also train heads that are a guess from names and shapes, or that the example did not prove.
        groups: groups of heads from `find_heads` or made by hand, instead of the selection above.

            **What happens in a step**:
        order: where clipping to `max_norm` sits: "clip-repel" or "repel-clip".
        max_norm: clip the gradients of all of the optimiser's parameters to this joint norm; None leaves it to you.
            Clipping in your own loop comes before the rule, unless you call `apply` of the handle before it.
        noise_in: "gradient" as published, where the optimiser rescales it; or "parameter", added after the step.
        seed: of the noise of SPOS and SGLD.
        measure_every: steps between two measurements for `report`; one costs a further pass over the gradients.
        verbose: None prints one line on stderr, True the table of all groups, False nothing.
        unknown: not accepted; the error names the rule that a setting belongs to.

    Returns:
        A `Handle`: `report()`, `remove()`, `state_dict()`, `load_state_dict()`, `apply()`; also a context manager.

    Raises:
        NoHeadsFound: the model has no heads that are known or could be inferred.
        SelectionError: the selection is misspelt or empty, has a weight in two groups or one head in every group, or
            is given beside `groups`.
        OptimizerError: the optimiser owns none of the heads, cannot be hooked, repels them already, or has no learning
            rate that noise could follow.
        UnsupportedWeights: weights are quantised or sparse, or spread over ranks as partial sums.
        RuleError: `rule` is not a rule, or `order`, `max_norm`, `noise_in`, `seed` or `measure_every` is out of range.
        UnknownSetting: an argument is unknown, such as a setting of a rule.
        HeadLayoutError: heads are a guess, or with `example_inputs` a slice is not proved to be the head it claims
            to be; unless `allow_unproved`.

    Warns:
        UserWarning: some groups are not trained or have one head; the optimizer does not make up for smaller gradients
            (plain SGD, coupled weight decay, a large eps). While training: the ratio stays above 1 (three measurements
            in a row after step 500), or heads that were left out are trained later.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> handle = repel(model, optimizer, rule="sphere", verbose=False)
    """
    check_arguments(unknown)
    chosen = checks.resolve_rule(rule)
    settings = checks.check_settings(chosen, Settings(seed, order, max_norm, noise_in, measure_every))
    inner = unwrap_optimizer(optimizer)
    selection: dict[str, Any] = {
        "layers": layers,
        "parts": parts,
        "where": where,
        "particle": particle,
        "match": match,
        "layout": layout,
        "example_inputs": example_inputs,
    }
    given = groups is not None
    if groups is None:
        with sharding.explaining_flat_weights(model):
            groups = find_heads(model, **selection)
    else:
        checks.check_given(selection)
    if chosen is not None and chosen.reads_tokens:
        groups = checks.logit_groups(model, groups, chosen, parts, particle, layout)
    checks.check_apart(groups)
    trained, others = split_trained(groups, inner)
    if not allow_unproved:
        refuse_unproved(model, trained, example_inputs)
    if alone := checks.single_heads(chosen, trained, given):
        warnings.warn(alone, stacklevel=2)
    for warning in shrinking.warnings_about(chosen, trained, inner):
        warnings.warn(warning, stacklevel=2)
    logits = None
    if chosen is not None and chosen.reads_tokens:
        logits = LogitRepulsion(model, groups, cast(SVGD, chosen), settings.seed)
    handle = Handle(trained, inner, chosen, settings, logits, others)
    handle.attach()
    if verbose is not False and _is_first_rank():
        show = attached_table if verbose else attached_line
        print(show(model, chosen, trained, left_out(model, groups)), file=sys.stderr)
    return handle


def check_arguments(settings: Mapping[str, object]) -> None:
    """Check the names of arguments for `repel` that will be passed to it later.

    Raises:
        UnknownSetting: `repel` has no such argument.
    """
    if settings:
        names = list(inspect.signature(repel).parameters)
        checks.refuse_unknown(settings, [name for name in names if name not in ("model", "optimizer", "unknown")])


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
            f"{type(optimizer).__name__} is not a torch optimizer with step hooks, nor wraps exactly one; "
            "give the torch optimizer itself, or call repel for each of several"
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


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
