"""Print which heads were found."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.heads.layout import HeadGroup

_TITLES = ("layer", "where", "part", "heads", "dim per head", "parameter", "family", "proof")


def describe(groups: Sequence[HeadGroup]) -> str:
    """A plain-text table, one line per group.

    Args:
        groups: what `find_heads` returned.

    Returns:
        The table, and a last line with the totals.
    """
    lines = [_TITLES] + [
        (
            str(g.layer),
            g.where,
            g.part,
            str(g.num_heads),
            str(g.dim),
            " + ".join(dict.fromkeys(s.parameter_name for s in g.slices)),
            g.family,
            g.proof,
        )
        for g in groups
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_TITLES))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    numbers = sum(g.num_heads * g.dim for g in groups)
    return "\n".join([*table, f"{len(groups)} groups, {sum(g.num_heads for g in groups)} particles, {numbers} weights"])
