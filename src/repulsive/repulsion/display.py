"""Text shown to the user: a line or a table when heads are attached, and the printed form of a handle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, fields, is_dataclass
from html import escape
from statistics import fmean

from torch import nn

from repulsive.errors import list_first
from repulsive.heads.describe import count_of, describe
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import unwrap
from repulsive.particles.rule import Rule
from repulsive.repulsion.measurements import GroupReport


def short_rule(rule: Rule | None) -> str:
    """Format a rule with its positional settings and all settings that differ from their defaults.

    Example:
        >>> from repulsive.particles.svgd import SVGD
        >>> short_rule(SVGD(space="sphere"))
        "SVGD(stepsize=0.1, alpha=0.01, space='sphere')"
    """
    if rule is None:
        return "no rule (plain training, measured)"
    if not is_dataclass(rule):
        return repr(rule)
    settings = []
    for field in fields(rule):
        value = getattr(rule, field.name)
        default = getattr(rule, f"default_{field.name}", field.default)  # some depend on other settings
        if not field.kw_only or default is MISSING or value != default:
            settings.append(f"{field.name}={value!r}")
    return f"{type(rule).__name__}({', '.join(settings)})"


_ORIGINS = {"table": "from the table", "given": "given", "guess": "guessed"}


def _proofs(groups: Sequence[HeadGroup]) -> str:
    """Say how many groups of attention heads are proved, and how the others are known; empty without attention."""
    counts = Counter(group.proof for group in groups if group.is_attention)
    proved = f"{counts['proved']} proved"
    others = [f"{counts[proof]} {text}" for proof, text in _ORIGINS.items() if counts[proof]]
    return f" ({', '.join((proved, *others))})" if counts else ""


def attached_line(model: nn.Module, rule: Rule | None, groups: Sequence[HeadGroup], left_out: Mapping[str, str]) -> str:
    """Format one line: class of the model, layers x heads, groups and their proofs, rule, attention left out.

    Args:
        model: the model, wrapped or not.
        rule: the rule.
        groups: the heads that are trained.
        left_out: attention modules with an unknown head layout, name -> class.
    """
    attention = [group for group in groups if group.is_attention]
    layers = len({(group.stack, group.where, group.layer) for group in attention})
    sizes = sorted({group.num_heads for group in attention}, reverse=True)
    heads = f"{'/'.join(map(str, sizes))} head{'s' * (sizes != [1])}"
    kinds = Counter((group.num_heads, group.part) for group in groups if not group.is_attention)
    members = [f"{count_of(layers, 'attention layer')} x {heads}"] if attention else []
    members += [f"{count} x {size} particles ({part})" for (size, part), count in kinds.items()]
    line = (
        f"repulsive: {type(unwrap(model)).__name__}, {', '.join(members)}, "
        f"{count_of(len(groups), 'group')}{_proofs(groups)}, {short_rule(rule)}"
    )
    return f"{line}; {_unknown_attention(left_out)}" if left_out else line


def attached_table(
    model: nn.Module, rule: Rule | None, groups: Sequence[HeadGroup], left_out: Mapping[str, str]
) -> str:
    """Format the line of `attached_line` and a table of all groups."""
    table = [attached_line(model, rule, groups, {}), describe(groups)]
    return "\n".join([*table, _unknown_attention(left_out)] if left_out else table)


def _unknown_attention(left_out: Mapping[str, str]) -> str:
    modules = [f"{name} ({kind})" for name, kind in left_out.items()]
    return f"left out, as their head layout is unknown: {list_first(modules, 4)}; example_inputs may help"


@dataclass(frozen=True)
class Overview:
    """Means over all groups at one step.

    Args:
        step: optimizer step of the measurement, -1 before the first.
        ratio: mean of |repulsion| / |drive|.
        similarity: mean cosine between two heads.
        largest: largest cosine between two heads of any group.
    """

    step: int
    ratio: float
    similarity: float
    largest: float

    def state(self) -> list[float | None]:
        """Return the values in order, for a checkpoint in JSON, which has no NaN: None takes its place."""
        return [value if math.isfinite(value) else None for value in astuple(self)]

    @classmethod
    def from_state(cls, state: Sequence[float | None]) -> Overview:
        """Return the overview with the values that `state` returned."""
        step, *values = (math.nan if value is None else value for value in state)
        return cls(int(step), *values)


def overview(reports: Sequence[GroupReport]) -> Overview:
    """Average the reports of all groups; NaN if there is no finite measurement."""
    return Overview(
        max(one.step for one in reports),
        _mean([one.ratio for one in reports]),
        _mean([one.similarity for one in reports]),
        max((one.largest for one in reports if math.isfinite(one.largest)), default=math.nan),
    )


def as_text(title: str, rows: Mapping[str, Overview]) -> str:
    """Format the title and one line per measurement."""
    lines = [f"{'':6} {'step':>7} {'ratio':>9} {'similarity':>11} {'largest':>9}"]
    lines += [
        f"{name:6} {row.step:7d} {row.ratio:9.3g} {_cosine(row.similarity):>11} {_cosine(row.largest):>9}"
        for name, row in rows.items()
    ]
    return "\n".join([title, *(lines if rows else ["not measured yet"])])


def as_html(title: str, rows: Mapping[str, Overview]) -> str:
    """Format the title and the measurements as an HTML table, for notebooks."""
    head = "".join(f"<th>{name}</th>" for name in ("", "step", "ratio", "similarity", "largest"))
    body = "".join(
        f"<tr><th>{name}</th><td>{row.step}</td><td>{row.ratio:.3g}</td><td>{_cosine(row.similarity)}</td>"
        f"<td>{_cosine(row.largest)}</td></tr>"
        for name, row in rows.items()
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else "<p>not measured yet</p>"
    return f"<div><p>{escape(title)}</p>{table}</div>"


def _cosine(value: float) -> str:
    """Format a cosine; "-" if it was not measured."""
    return "-" if math.isnan(value) else f"{value:+.3f}"


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
