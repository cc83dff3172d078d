"""Advice about arguments that `repel` does not have: the rule with such a setting, or a similar argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from types import FunctionType
from typing import Any

from repulsive.errors import RuleError, UnknownSetting, did_you_mean
from repulsive.particles.ladder import CosineLadder
from repulsive.particles.named import RECOMMENDED, RULES, rule_by_name
from repulsive.particles.rule import Rule
from repulsive.particles.sgld import SGLD
from repulsive.particles.spos import SPOS
from repulsive.particles.svgd import SVGD

_RECOMMENDED = ("stepsize", "alpha", "ratio", "space", "smoothing", "act_every")  # settings of the recommended rule
_KINDS: tuple[type[Rule], ...] = (SVGD, SPOS, SGLD, CosineLadder)


def refuse_unknown(settings: Mapping[str, object], known: Collection[str], rule: object = None) -> None:
    """Raise an error for arguments that `repel` does not have.

    Args:
        settings: arguments by name.
        known: the names of the arguments of `repel`.
        rule: the rule that was given, which the advice starts from if it has such a setting.

    Raises:
        UnknownSetting: an argument is unknown. The message names the rule that has such a setting, or a similar
            argument.
    """
    for name, value in settings.items():
        if name in known:
            continue
        owners = [kind for kind in _KINDS if name in _settings_of(kind)]
        if owners:
            names = " and ".join(kind.__name__ for kind in owners)
            advice = _given_with(rule, name, value) or _with_setting(owners[0], name, value)
            raise UnknownSetting(f"repel has no argument {name!r}: {name} is a setting of {names}: {advice}")
        hint = did_you_mean(name, known)
        if not hint and (near := get_close_matches(name, _settings_of(SVGD), n=1)):
            hint = f"did you mean rule=SVGD({near[0]}=...)? "
        raise UnknownSetting(f"repel has no argument {name!r}; {hint}it has {', '.join(known)}")


def _settings_of(kind: type[Rule]) -> list[str]:
    """Return the names of the settings that a kind of rule declares itself."""
    names: Mapping[str, object] = vars(kind).get("__annotations__", {})
    return list(names)


def _given_with(rule: object, name: str, value: object) -> str | None:
    """Write the rule that the user gave with another setting; None if it is the default, or has no such setting."""
    if isinstance(rule, str):
        rule = None if rule == RECOMMENDED or rule not in RULES else rule_by_name(rule)
    if not isinstance(rule, _KINDS):
        return None
    own: dict[str, Any] = vars(rule)
    if name not in own:
        return None
    kind = type(rule)
    settings = {key: one for key, one in own.items() if one != getattr(kind, key, None)}
    for key in [key for key in settings if getattr(kind, key, None) is None]:  # its default depends on the others
        rest = {other: one for other, one in settings.items() if other != key}
        if _has_value(kind, rest, key, own[key]):
            settings = rest
    if name == "alpha" and value != "auto":
        settings.pop("ratio", None)
    return _written(kind, {**settings, name: value})


def _has_value(kind: type[Rule], settings: Mapping[str, object], key: str, value: object) -> bool:
    """Check whether a rule with some settings is valid, and has a value for another setting by default."""
    try:
        return bool(getattr(kind(**settings), key) == value)
    except RuleError:
        return False


def _with_setting(kind: type[Rule], name: str, value: object) -> str:
    """Write the recommended rule with another setting, or say why the setting is invalid."""
    settings: dict[str, object] = {}
    if kind is SVGD:
        recommended = rule_by_name(RECOMMENDED)
        assert isinstance(recommended, SVGD)
        settings = {key: getattr(recommended, key) for key in _RECOMMENDED}
        if name in ("tokens", "every", "circuits") or value == "logits":
            settings = {"stepsize": recommended.stepsize, "space": "logits"}
        elif name == "alpha" and value != "auto":
            del settings["ratio"]
        if name in ("stepsize", "smoothing", "prior"):
            del settings["act_every"]  # it allows no other values
    return _written(kind, {**settings, name: value})


def _written(kind: type[Rule], settings: Mapping[str, object]) -> str:
    """Write a rule with some settings as code, or say why they are invalid."""
    try:
        kind(**settings)
    except RuleError as error:
        return str(error)
    shown = {key: "..." if isinstance(one, FunctionType) else repr(one) for key, one in settings.items()}
    return f"rule={kind.__name__}({', '.join(f'{key}={one}' for key, one in shown.items())})"
