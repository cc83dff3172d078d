"""Facts in the state of a handle that identify rule and heads, and their check when a run resumes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from repulsive.errors import StateError
from repulsive.heads.layout import HeadGroup
from repulsive.particles.rule import Rule

FORMAT = 1  # format version of `Handle.state_dict`


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _is_group(facts: object) -> bool:
    return isinstance(facts, list | tuple) and len(facts) == 3 and isinstance(facts[0], str)


_VALID: dict[str, Callable[[Any], bool]] = {
    "steps": _is_count,
    "seed": lambda seed: isinstance(seed, int),
    "rule": lambda rule: isinstance(rule, str),
    "groups": lambda groups: isinstance(groups, list | tuple) and all(map(_is_group, groups)),
}


def group_facts(groups: Sequence[HeadGroup]) -> list[list[Any]]:
    """Return name, number of heads and size of a head of each group."""
    return [[group.name, group.num_heads, group.dim] for group in groups]


def check_state(state: Mapping[str, Any], groups: Sequence[HeadGroup]) -> None:
    """Check that a state can be loaded.

    Raises:
        StateError: the state is not that of a handle, has another format, or belongs to other groups.
    """
    if not isinstance(state, Mapping) or "format" not in state:
        raise StateError("this is not the state of a handle; pass what handle.state_dict() returned")
    if state["format"] != FORMAT:
        raise StateError(f"state has format {state['format']!r}; this version reads format {FORMAT}")
    for name, is_valid in _VALID.items():
        if name not in state or not is_valid(state[name]):
            raise StateError(f"the state is damaged: {name}={state.get(name)!r}; load an earlier checkpoint")
    saved, own = ([tuple(entry) for entry in facts] for facts in (state["groups"], group_facts(groups)))
    if saved != own:
        raise StateError(f"the state belongs to other groups of heads: {_difference(saved, own)}")


def _difference(saved: Sequence[tuple[Any, ...]], own: Sequence[tuple[Any, ...]]) -> str:
    """Describe the first groups, (name, number of heads, size of a head), that differ."""
    before, now = ({name: f"{heads} heads of {size} numbers" for name, heads, size in x} for x in (saved, own))
    different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    lines = [f"{name}: {before.get(name, 'none')} in the state, {now.get(name, 'none')} here" for name in different[:3]]
    more = [f"and {len(different) - 3} more"] if len(different) > 3 else []
    return "; ".join([*lines, *more]) or "they have another order"


def differing_rule(state: Mapping[str, Any], rule: Rule | None) -> str | None:
    """Return the rule of a state, as text, if it is not the given one."""
    saved: str = state["rule"]
    return None if _clean(saved) == rule_text(rule) else saved


def rule_text(rule: Rule | None) -> str:
    """Return the repr of a rule in a form that is equal in every run of a script, with settings that it leaves out."""
    text = _clean(repr(rule))
    if not is_dataclass(rule):
        return text
    for one in fields(rule):
        if not one.repr and (value := getattr(rule, one.name)) != one.default:
            text = f"{text.removesuffix(')')}, {one.name}={value!r})"
    return text


def _clean(text: str) -> str:
    """Remove memory addresses from the repr of a rule, and `act_every=1`, which older states do not have."""
    return re.sub(r" at 0x[0-9a-f]+|, act_every=1\b", "", text)
