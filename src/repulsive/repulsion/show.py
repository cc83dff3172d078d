"""What the user sees: one line or a table when heads are attached, and a handle in print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from html import escape
from statistics import fmean

from torch import nn

from repulsive.heads.describe import describe
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import unwrap
from repulsive.particles.rule import Rule
from repulsive.repulsion.measurements import GroupReport


def short_rule(rule: Rule | None) -> str:
    """Name a rule with the settings that differ from its defaults; positional ones are always shown.

    Example:
        >>> from repulsive.particles.svgd import SVGD
        >>> short_rule(SVGD(space="sphere"))
        "SVGD(stepsize=0.1, alpha=0.01, space='sphere')"
    """
    if rule is None:
        return "no rule (plain training, measured)"
    if not is_dataclass(rule):
        return repr(rule)
    shown = []
    for one in fields(rule):
        value = getattr(rule, one.name)
        default = getattr(rule, f"default_{one.name}", one.default)  # some depend on other settings
        if not one.kw_only or default is MISSING or value != default:
            shown.append(f"{one.name}={value!r}")
    return f"{type(rule).__name__}({', '.join(shown)})"


def attached_line(model: nn.Module, rule: Rule | None, groups: Sequence[HeadGroup], left_out: Mapping[str, str]) -> str:
    """One line: the model's class, layers x heads, groups, rule, and attention that was left out.

    Args:
        model: the model, wrapped or not.
        rule: the rule.
        groups: the heads that are trained.
        left_out: attention modules whose heads are not known, name -> class.
    """
    layers = len({(group.stack, group.where, group.layer) for group in groups})
    heads = "/".join(str(count) for count in sorted({group.num_heads for group in groups}, reverse=True))
    traced = sum(getattr(group, "proof", None) == "proved" for group in groups)
    proved = f" ({traced} proved)" if traced else ""
    line = (
        f"repulsive: {type(unwrap(model)).__name__}, {layers} attention layer{'s' * (layers != 1)} x {heads} heads, "
        f"{len(groups)} groups{proved}, {short_rule(rule)}"
    )
    return f"{line}; {_unknown_attention(left_out)}" if left_out else line


def attached_table(
    model: nn.Module, rule: Rule | None, groups: Sequence[HeadGroup], left_out: Mapping[str, str]
) -> str:
    """The line of `attached_line` and the table of all groups."""
    table = [attached_line(model, rule, groups, {}), describe(groups)]
    return "\n".join([*table, _unknown_attention(left_out)] if left_out else table)


def _unknown_attention(left_out: Mapping[str, str]) -> str:
    found = [f"{name} ({kind})" for name, kind in left_out.items()]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"left out, as their heads are not known: {', '.join(found[:4])}{more}; example_inputs may help"


@dataclass(frozen=True)
class Overview:
    """Means over groups at one time.

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


def overview(reports: Sequence[GroupReport]) -> Overview:
    """Summarise the reports of all groups; NaN where nothing finite was measured."""
    return Overview(
        max(one.step for one in reports),
        _mean([one.ratio for one in reports]),
        _mean([one.similarity for one in reports]),
        max((one.largest for one in reports if math.isfinite(one.largest)), default=math.nan),
    )


def as_text(title: str, rows: Mapping[str, Overview]) -> str:
    """The title, and a line for each time that was measured."""
    lines = [f"{'':6} {'step':>7} {'ratio':>9} {'similarity':>11} {'largest':>9}"]
    lines += [
        f"{name:6} {row.step:7d} {row.ratio:9.3g} {row.similarity:+11.3f} {row.largest:+9.3f}"
        for name, row in rows.items()
    ]
    return "\n".join([title, *(lines if rows else ["not measured yet"])])


def as_html(title: str, rows: Mapping[str, Overview]) -> str:
    """The same as a table for notebooks."""
    head = "".join(f"<th>{name}</th>" for name in ("", "step", "ratio", "similarity", "largest"))
    body = "".join(
        f"<tr><th>{name}</th><td>{row.step}</td><td>{row.ratio:.3g}</td><td>{row.similarity:+.3f}</td>"
        f"<td>{row.largest:+.3f}</td></tr>"
        for name, row in rows.items()
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else "<p>not measured yet</p>"
    return f"<div><p>{escape(title)}</p>{table}</div>"


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return fmean(known) if known else math.nan
