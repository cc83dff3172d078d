"""Check the arguments of `repel`: values out of range, and settings that would be ignored."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from repulsive.errors import RuleError, SelectionError, check_whole, did_you_mean, is_number, short_repr
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import module_of
from repulsive.particles.named import known_rules, rule_by_name
from repulsive.particles.rule import Rule
from repulsive.repulsion.logits.value_circuits import output_groups
from repulsive.repulsion.overlap import find_overlap
from repulsive.repulsion.settings import FORCE_PLACES, NOISE_PLACES, ORDERS, Settings

# The arguments that select heads, with the defaults of `repel`. With `groups` they would have no effect.
SELECTION: dict[str, Any] = {
    "layers": "all",
    "parts": "qkv",
    "where": "all",
    "particle": "projection",
    "match": None,
    "layout": "heads",
    "example_inputs": None,
}


def resolve_rule(rule: object) -> Rule | None:
    """Return a rule as given, or build it from its name.

    Raises:
        RuleError: the name is unknown, or the argument is neither a rule, a name nor None.
    """
    if isinstance(rule, str):
        return rule_by_name(rule)
    if rule is None or isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise RuleError(f"rule={rule.__name__} is a class; did you mean {rule.__name__}()?")
    names = ", ".join(known_rules())
    raise RuleError(
        f"rule={short_repr(rule)} is not a rule; give SVGD(), SPOS(), SGLD(), one of the names {names}, or None"
    )


def check_new_rule(old: Rule | None, new: Rule | None, settings: Settings) -> None:
    """Check that a handle can continue with another rule.

    Args:
        old: the rule of the handle.
        new: the rule to replace it.
        settings: the settings of the handle.

    Raises:
        RuleError: the new value is not a rule, or `repel` would prepare the handle in another way for it.
    """
    if not (new is None or isinstance(new, Rule)):
        raise RuleError(f"handle.rule={short_repr(new)}: expected a rule, such as SVGD(), or None")
    if new == old:
        return
    reason = ""
    if any(rule is not None and rule.reads_tokens for rule in (old, new)):
        reason = "space='logits' compares tokens that are sampled for one rule"
    elif settings.force_in == "step":
        reason = "force_in='step' adds the force of the first rule"
    elif new is not None and new.has_noise and not (old is not None and old.has_noise):
        reason = "the first rule has no noise, so no place was chosen for it (noise_in)"
    if reason:
        raise RuleError(
            f"handle.rule cannot become {new!r}: {reason}. Call handle.remove(), then repel with the new rule"
        )


def check_settings(rule: Rule | None, settings: Settings) -> Settings:
    """Check the settings of a handle, and return them with the seed as an int.

    Raises:
        RuleError: a value is unknown or out of range, or would have no effect.
    """
    order, noise_in, max_norm = settings.order, settings.noise_in, settings.max_norm
    if order not in ORDERS:
        raise RuleError(f"order={order!r}: {did_you_mean(order, ORDERS)}choose one of {ORDERS}")
    if noise_in not in NOISE_PLACES:
        raise RuleError(f"noise_in={noise_in!r}: {did_you_mean(noise_in, NOISE_PLACES)}choose one of {NOISE_PLACES}")
    if (force_in := settings.force_in) not in FORCE_PLACES:
        raise RuleError(f"force_in={force_in!r}: {did_you_mean(force_in, FORCE_PLACES)}choose one of {FORCE_PLACES}")
    if noise_in in ("optimizer", "parameter") and (rule is None or type(rule).noise_scale is Rule.noise_scale):
        kind = "rule=None" if rule is None else type(rule).__name__
        raise RuleError(f"noise_in={noise_in!r}: {kind} has no noise; leave noise_in out, or choose SPOS() or SGLD()")
    if noise_in not in ("auto", "gradient") and rule is not None and rule.scales_noise:
        raise RuleError(
            f"noise_in={noise_in!r} does not work with noise that is scaled by gradients, such as noise='released'; "
            "leave noise_in out"
        )
    if max_norm is not None and not (is_number(max_norm) and max_norm > 0):
        raise RuleError(f"max_norm={max_norm!r}: must be a positive number, or None")
    if max_norm is None and order == "repel-clip":
        raise RuleError(
            "order='repel-clip' without max_norm clips nothing: give max_norm=..., or leave order out and call "
            "handle.apply() before your own clipping"
        )
    check_whole("measure_every", settings.measure_every, error=RuleError)
    try:
        seed = operator.index(settings.seed)  # converts numpy integers, which JSON cannot hold
    except TypeError:
        raise RuleError(f"seed={settings.seed!r}: must be a whole number") from None
    return Settings(seed, order, max_norm, noise_in, settings.measure_every, force_in)


def check_flags(*, allow_unproved: object = False, verbose: object = None) -> None:
    """Check two arguments of `repel` for which every text would count as True.

    Raises:
        RuleError: one is not a bool; `verbose` may be None.
    """
    if not isinstance(allow_unproved, bool):
        raise RuleError(f"allow_unproved={allow_unproved!r}: must be True or False")
    if verbose is not None and not isinstance(verbose, bool):
        raise RuleError(f"verbose={verbose!r}: must be True, False or None")


def check_given(selection: Mapping[str, object]) -> None:
    """Raise an error for arguments that select heads, because `groups` are given as well.

    Raises:
        SelectionError: an argument would be ignored.
    """
    for name, default in SELECTION.items():
        value = selection[name]
        if value is not default and (type(value) is not str or value != default):
            shown = f"{name}={value!r}" if isinstance(value, str) else name
            raise SelectionError(
                f"{shown} would be ignored, because groups are given; "
                f"select them with find_heads(model, {name}=...) and leave {name} out here"
            )


def check_groups(groups: object) -> list[HeadGroup]:
    """Check the argument `groups`, and return it as a list.

    Raises:
        SelectionError: it is not a sequence of groups.
    """
    expected = "groups: expected a list of groups from find_heads, heads_by_hand, group_modules or group_stacked"
    if isinstance(groups, HeadGroup):
        raise SelectionError(f"{expected}, got a single group; write groups=[group]")
    if isinstance(groups, str):
        raise SelectionError(f"{expected}, got {groups!r}; leave groups out to select all heads")
    if not isinstance(groups, Iterable):
        raise SelectionError(f"{expected}, got {type(groups).__name__}")
    members = list(groups)
    if wrong := [one for one in members if not isinstance(one, HeadGroup)]:
        is_module = isinstance(wrong[0], nn.Module)
        advice = "; make groups of modules with group_modules(modules)" if is_module else ""
        raise SelectionError(f"{expected}, got a {type(groups).__name__} with a {type(wrong[0]).__name__}{advice}")
    return members


def check_apart(groups: Sequence[HeadGroup]) -> None:
    """Check that groups do not share rows, which would be changed twice in one step, and that names are unique.

    Raises:
        SelectionError: there are no groups, or two share weights or a name.
    """
    if not groups:
        raise SelectionError("groups is empty; leave it out to select all heads")
    if overlap := find_overlap(groups):
        raise SelectionError(f"{overlap[0]} and {overlap[1]} share weights; give each weight to one group")
    names = Counter(group.name for group in groups)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise SelectionError(
            f"{repeated[0]}: {names[repeated[0]]} groups have this name. Put the models into one module, such as an "
            "nn.ModuleDict, and find the heads of that module; give groups of experts or other modules a name=..."
        )


def refuse_single_heads(rule: Rule | None, groups: Sequence[HeadGroup]) -> None:
    """Check that a rule with an interaction between heads has a group with more than one head.

    Raises:
        SelectionError: all groups have one head.
    """
    text = single_heads(groups)
    if text and rule is not None and rule.has_interaction and all(group.num_heads == 1 for group in groups):
        raise SelectionError(
            f"{text}. Use a model with more heads, or rule=None to train without repulsion; "
            "if one head is intended, pass groups=find_heads(model)"
        )


def single_heads(groups: Sequence[HeadGroup]) -> str | None:
    """Return a warning about groups with one head; None if there are none."""
    alone = [group.name for group in groups if group.num_heads == 1]
    if not alone:
        return None
    text = f"{len(alone)} of {len(groups)} groups have one head, which has nothing to be repelled from"
    return f"{text}: {', '.join(alone[:6])}"


def logit_groups(
    model: nn.Module, groups: Sequence[HeadGroup], rule: Rule, selection: Mapping[str, Any]
) -> list[HeadGroup]:
    """Return the groups that a rule on logits moves: q and k; also v and the output projection with `moves_values`.

    Args:
        model: the model.
        groups: the selected groups.
        rule: a rule that reads tokens.
        selection: the arguments of `repel` that select heads, as in `SELECTION`.

    Raises:
        RuleError: the selection excludes a projection that the rule moves, or the model has no q and k heads.
    """
    if other := [group.name for group in groups if not group.is_attention]:
        raise RuleError(
            f"{', '.join(other[:4])}: space='logits' compares attention logits, and these are not attention heads; "
            "choose space='weights' or 'sphere'"
        )
    parts = selection["parts"]
    if not {"q", "k"} <= set(parts):
        raise RuleError(f"parts={parts!r}: space='logits' moves q and k together; leave parts out, or use parts='qk'")
    is_strided = selection["layout"] != "heads" or any(_is_strided(group) for group in groups)
    if selection["particle"] != "projection" or is_strided:
        raise RuleError("space='logits' makes its own particles, pairs (q, k) of a head; leave particle and layout out")
    if joined := [group.name for group in groups if len(group.part) > 1 and set(group.part) <= set("qkv")]:
        raise RuleError(
            f"{joined[0]}: space='logits' makes its own particles, pairs (q, k) of a head; select the groups with "
            "find_heads(model) and particle='projection', the default"
        )
    chosen = [group for group in groups if group.part in ("q", "k")]
    if not chosen:
        names = ", ".join(group.name for group in groups[:4])
        raise RuleError(
            f"space='logits' needs heads with q and k, and found none: {names}. Select q and k. "
            "Additive and graph attention have no such logits; choose space='sphere'"
        )
    if not rule.moves_values:
        return chosen
    if "v" not in parts:
        raise RuleError(f"parts={parts!r}: circuits='qk+ov' also moves v; leave parts out")
    return _with_outputs(model, groups, selection["example_inputs"])


def _is_strided(group: HeadGroup) -> bool:
    """Check whether `find_heads` made a group with layout="strided": particles that are not the heads of the model."""
    rows = group.slices[0].rows
    is_found = group.proof == "given" and group.family != "by hand"
    return is_found and rows.shape[0] > 1 and rows.shape[1] > 1 and int(rows[1, 0] - rows[0, 0]) == 1


def _with_outputs(model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object) -> list[HeadGroup]:
    """Return the groups of all layers with q and k, and groups of their output projections."""
    parts: dict[str, set[str]] = {}
    for group in groups:
        parts.setdefault(module_of(group), set()).add(group.part)
    layers = {name: own for name, own in parts.items() if own & {"q", "k"}}
    if incomplete := [name for name, own in layers.items() if not own >= {"q", "k", "v"}]:
        raise RuleError(
            f"{incomplete[0]}: circuits='qk+ov' needs the groups q, k and v of every layer; select them with "
            "find_heads(model), or choose circuits='qk'"
        )
    chosen = [group for group in groups if module_of(group) in layers]
    return [*chosen, *output_groups(model, chosen, example_inputs)]
