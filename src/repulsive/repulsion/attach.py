"""`repel`: attach a rule to the heads of a model and to its optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Never, cast

import torch
from torch import nn
from torch.optim import Optimizer

from repulsive.errors import OptimizerError, SelectionError, warn_user
from repulsive.heads import find_heads
from repulsive.heads.discover import Layout, left_out
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import check_model
from repulsive.heads.select import LayersName, Particle, Parts, Where
from repulsive.heads.verify import refuse_unproved
from repulsive.particles.named import NOISE_IN_GRADIENT, RECOMMENDED, RuleName
from repulsive.particles.rule import Rule
from repulsive.particles.svgd import SVGD
from repulsive.repulsion import checks
from repulsive.repulsion.deepspeed import refuse_zero
from repulsive.repulsion.display import attached_line, attached_table
from repulsive.repulsion.gradient_scale import scale_warnings
from repulsive.repulsion.handle import Handle
from repulsive.repulsion.late_heads import LateHeads
from repulsive.repulsion.logits.repulsion import LogitRepulsion
from repulsive.repulsion.noise_place import choose_noise_place, window_warning
from repulsive.repulsion.settings import ForcePlace, NoisePlace, Order, Settings
from repulsive.repulsion.step_force import choose_place
from repulsive.repulsion.trained_groups import parameter_ids, split_trained
from repulsive.repulsion.unknown_settings import refuse_unknown


def repel(
    model: nn.Module,
    optimizer: Optimizer,
    rule: Rule | RuleName | None = RECOMMENDED,
    layers: LayersName | Sequence[int] = "all",
    parts: Parts = "qkv",
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
    noise_in: NoisePlace = "auto",
    force_in: ForcePlace = "auto",
    seed: int = 0,
    measure_every: int = 50,
    verbose: bool | None = None,
    **unknown: Never,
) -> Handle:
    """Make the heads of a model repel each other from the next optimizer step on.

    Model, loss and optimizer stay as they are. Between `backward` and `step`, the gradients of the selected heads are
    replaced by the direction of `rule`, in steps in which the rule acts: one of four with the default rule. If an error
    is raised, nothing was changed.

    Args:
        model: any model with attention; also wrapped (DDP, torch.compile, PEFT) or sharded (FSDP2; tensor parallel, but
            not with `space="logits"`).
        optimizer: the torch optimizer that trains the heads, or a wrapper that contains it.
        rule: a name, "recommended", "paper", "sphere", "svgd", "spos", "spos-paper", "sgld", "logits" or "kernel-free"
            (see `rule_by_name`); a rule, `SVGD`, `SPOS` or `SGLD`; or None for plain training that is only measured.

            **Which heads** (`groups` replaces the others):
        layers: "all", "first" or "last" of each stack of layers, or a list of indices.
        parts: any of the letters q, k, v.
        where: "encoder", "decoder", "cross" or "all". In a model with one stack of layers, "encoder" and "decoder" both
            mean that stack.
        particle: "projection" keeps q, k and v apart; "head" joins them into one particle per head.
        match: pattern or patterns on group names, such as "*.layer.0.*".
        layout: "heads", or "strided" for the slices of the authors' released code.
        example_inputs: inputs of the model; if given, slices are proved by a trace, and unknown classes and output
            projections are inferred. Under FSDP2 every rank must pass them.
        allow_unproved: also train heads that are a guess from names and shapes, or that the example did not prove.
        groups: groups from `find_heads`, `heads_by_hand`, `group_modules` or `group_stacked`, instead of the selection
            above.

            **What happens in a step**:
        order: whether clipping to `max_norm` comes before or after the rule: "clip-repel" or "repel-clip".
        max_norm: clip the gradients of all parameters of the optimizer to this joint norm; None does not clip.
            Clipping in your own loop comes before the rule, unless you call `apply` of the handle before it.
        noise_in: where the noise of SPOS and SGLD enters. "optimizer": it follows the step of SGD, Adam, AdamW or
            RMSprop, so that samples have the temperature of the rule; other optimizers are refused. "gradient", as
            published: the optimizer rescales the noise. "parameter": it is added after the step. The last two sample
            the distribution of the rule under SGD without momentum only. "auto" is "optimizer", except for rule
            "spos-paper" and for noise that is not Langevin noise, such as SPOS(noise="released"): there "gradient".
        force_in: "gradient", as published, adds repulsion to the gradient; "step" adds it to the weights after the
            step, with `ratio` times the length of the step, and needs a rule with alpha="auto"; "auto" is "step" for
            such rules under Muon, which amplifies repulsion in the gradient, and "gradient" otherwise.
        seed: seed of the noise of SPOS and SGLD, and of the positions that `space="logits"` samples.
        measure_every: steps between two measurements for `report`; each costs another pass over the gradients. It
            is made in the next step in which the rule acts.
        verbose: None prints one line on stderr, True the table of all groups, False nothing.
        unknown: not accepted; the error names the rule that has such a setting.

    Returns:
        A `Handle`: `report()`, `remove()`, `state_dict()`, `load_state_dict()`, `apply()`; also a context manager.

    Raises:
        NoHeadsFound: the model has no heads that are known or could be inferred.
        SelectionError: the selection is misspelt or empty, has a weight in two groups, has only one head in every
            group, or is combined with `groups`, or `groups` is not a list of groups.
        OptimizerError: the optimizer trains none of the heads, has no step hooks, repels them already, has no
            learning rate for the noise, or takes steps that noise cannot follow (see `noise_in`).
        UnsupportedWeights: weights are quantised or sparse, or distributed over ranks as partial sums.
        RuleError: `rule` is not a rule, or `order`, `max_norm`, `noise_in`, `force_in`, `seed` or `measure_every` is
            out of range, `allow_unproved` or `verbose` is not a bool, or the rule does not support `force_in="step"`.
        UnknownSetting: an argument is unknown, such as a setting of a rule.
        HeadLayoutError: heads are a guess, or `example_inputs` do not prove a slice; unless `allow_unproved`.

    Warns:
        UserWarning: some groups are not trained or have one head, the optimizer does not compensate for smaller
            gradients (plain SGD, coupled weight decay, a large eps), it amplifies repulsion (Muon, with a rule that
            holds no ratio), or its second moment averages over too few steps for noise. While training: the ratio stays
            above 1 (median of five measurements after step 100; of two if it is above 10, or at the end of a short
            training), a rule between weights has moved heads three times as far apart, or heads that were left out are
            trained later.

    Example:
        >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> handle = repel(model, optimizer, verbose=False)
    """
    check_arguments(unknown, rule)
    checks.check_flags(allow_unproved=allow_unproved, verbose=verbose)
    chosen = checks.resolve_rule(rule)
    if noise_in == "auto" and isinstance(rule, str) and rule in NOISE_IN_GRADIENT:
        noise_in = "gradient"
    settings = checks.check_settings(chosen, Settings(seed, order, max_norm, noise_in, measure_every, force_in))
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise SelectionError("the arguments are swapped; write repel(model, optimizer)")
    check_model(model)
    refuse_zero(optimizer, model)
    chain = _wrapped_chain(optimizer)
    inner = chain[-1]
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
        groups = find_heads(model, **selection)
    else:
        checks.check_given(selection)
        groups = checks.check_groups(groups)
    if chosen is not None and chosen.reads_tokens:
        groups = checks.logit_groups(model, groups, chosen, selection)
    checks.check_apart(groups)
    trained, others = split_trained(groups, inner)
    if not allow_unproved:
        refuse_unproved(model, trained, example_inputs)
    noise_place = choose_noise_place(settings.noise_in, chosen, chain)
    if not given:
        checks.refuse_single_heads(chosen, trained)
    if alone := checks.single_heads(trained):
        warn_user(alone)
    if short := window_warning(noise_place, chosen, trained, inner):
        warn_user(short)
    for warning in scale_warnings(chosen, trained, inner):
        warn_user(warning)
    place, advice = choose_place(settings.force_in, chosen, trained, inner)
    if advice:
        warn_user(advice)
    settings = replace(settings, force_in=place, noise_in=noise_place)
    logits = None
    if chosen is not None and chosen.reads_tokens:
        logits = LogitRepulsion(model, groups, cast(SVGD, chosen), settings.seed)
    late = LateHeads(inner, others, model, selection, only_if_all=given)
    handle = Handle(trained, inner, chosen, settings, late, logits)
    handle.attach()
    if verbose is not False and _is_first_rank():
        describe = attached_table if verbose else attached_line
        unknown_attention = left_out(model, groups) if any(group.is_attention for group in groups) else {}
        print(describe(model, chosen, trained, unknown_attention), file=sys.stderr)
    return handle


def check_arguments(settings: Mapping[str, object], rule: object = None) -> None:
    """Check the names of arguments that will be passed to `repel` later, with this rule.

    Raises:
        UnknownSetting: `repel` has no such argument.
    """
    if settings:
        names = list(inspect.signature(repel).parameters)
        known = [name for name in names if name not in ("model", "optimizer", "unknown")]
        refuse_unknown(settings, known, rule)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside wrappers, such as those of Accelerate, Lightning, SAM or schedule-free ones.

    The step of the innermost optimizer changes the weights. A wrapper's own step may be called more often, or never.

    Raises:
        OptimizerError: there is no torch optimizer inside, or more than one.
    """
    innermost: Optimizer = _wrapped_chain(optimizer)[-1]
    return innermost


def _wrapped_chain(optimizer: Any) -> list[Any]:
    """Return an optimizer and those inside it, from the outermost to the innermost; see `unwrap_optimizer`."""
    chain = [optimizer]
    while (inner := _wrapped_optimizer(chain[-1])) is not None and not any(inner is one for one in chain):
        chain.append(inner)
    if not isinstance(chain[-1], Optimizer) or not hasattr(chain[-1], "_optimizer_step_pre_hooks"):
        if isinstance(optimizer, type):
            name = optimizer.__name__
            raise OptimizerError(f"expected an optimizer, got the class {name}; write {name}(model.parameters())")
        raise OptimizerError(
            f"{type(optimizer).__name__} is not a torch optimizer with step hooks, nor wraps exactly one; "
            "pass the torch optimizer itself, or call repel for each of several"
        )
    return chain


def _wrapped_optimizer(outer: Any) -> Optimizer | None:
    """Return a wrapper's `optimizer` attribute, or its only attribute that is an optimizer of the same parameters."""
    named = getattr(outer, "optimizer", None)
    if isinstance(named, Optimizer):
        return named
    own = {id(p) for entry in getattr(outer, "param_groups", ()) for p in entry["params"]}
    held = {id(value): value for value in getattr(outer, "__dict__", {}).values() if isinstance(value, Optimizer)}
    whole = [one for one in held.values() if own <= parameter_ids(one)]
    return whole[0] if len(whole) == 1 else None


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
