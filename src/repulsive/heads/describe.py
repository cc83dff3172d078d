"""Describe groups of heads as a table."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.heads.layout import HeadGroup

_TITLES = ("layer", "where", "part", "heads", "d_head", "parameter", "family", "proof")
_OTHER_TITLES = ("layer", "where", "part", "particles", "size", "parameter", "family", "proof")  # without attention


def parameter_names(group: HeadGroup) -> str:
    """List the parameters of a group, each once."""
    return " + ".join(dict.fromkeys(s.parameter_name for s in group.slices))


def count_of(number: int, noun: str) -> str:
    """Format a number with its noun.

    Example:
        >>> count_of(1, "group"), count_of(6, "group")
        ('1 group', '6 groups')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def describe(groups: Sequence[HeadGroup]) -> str:
    """Format groups as a plain-text table, one line per group.

    Args:
        groups: groups from `find_heads`.

    Returns:
        The table, with the totals in the last line.
    """
    has_attention = any(group.is_attention for group in groups)
    lines = [_TITLES if has_attention or not groups else _OTHER_TITLES] + [
        (
            str(g.layer),
            g.where,
            g.part,
            str(g.num_heads),
            str(g.head_dim if g.is_attention else g.dim),
            parameter_names(g),
            g.family,
            g.proof,
        )
        for g in groups
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_TITLES))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    weights = sum(g.num_heads * g.dim for g in groups)
    particles = sum(g.num_heads for g in groups)
    return "\n".join([*table, f"{count_of(len(groups), 'group')}, {particles} particles, {weights} weights"])
