"""The heads of a model as a table and as JSON, for `repulsive heads`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from repulsive.heads.describe import count_of, parameter_names
from repulsive.heads.layout import HeadGroup
from repulsive.terminal.table import Table

_PROOFS = {
    "proved": "proved on the example",
    "table": "from the table of known classes",
    "guess": "guessed from names and shapes, so prove them with --example",
    "given": "given by hand",
}


def head_tables(groups: Sequence[HeadGroup], full: bool = False) -> list[Table | str]:
    """Make a table with one row per group of heads, and a line with the totals.

    Args:
        groups: groups from `find_heads`.
        full: also show family, proof and number of weights per head.
    """
    with_stack = len({group.where for group in groups}) > 1
    rows = []
    for group in groups:
        layer = f"{group.where} {group.layer}" if with_stack else str(group.layer)
        more = [f"{group.dim:,}", group.family, group.proof] if full else []
        rows.append([layer, group.part, str(group.num_heads), str(group.head_dim), parameter_names(group), *more])
    titles = ["layer", "part", "heads", "d_head", "parameter"]
    weights = sum(group.num_heads * group.dim for group in groups)
    proofs = ", ".join(_PROOFS[proof] for proof in dict.fromkeys(group.proof for group in groups))
    particles = sum(group.num_heads for group in groups)
    totals = f"{count_of(len(groups), 'group')}, {particles} particles, {weights:,} weights"
    return [
        Table([*titles, *(["weights", "family", "proof"] if full else [])], rows),
        f"{totals}; rows of each head: {proofs}.",
    ]


def heads_as_json(groups: Sequence[HeadGroup]) -> dict[str, Any]:
    """Convert groups of heads to a dictionary for JSON."""
    return {
        "groups": [
            {
                "name": group.name,
                "layer": group.layer,
                "where": group.where,
                "part": group.part,
                "heads": group.num_heads,
                "d_head": group.head_dim,
                "weights_per_head": group.dim,
                "parameters": list(dict.fromkeys(each.parameter_name for each in group.slices)),
                "family": group.family,
                "proof": group.proof,
            }
            for group in groups
        ],
        "particles": sum(group.num_heads for group in groups),
        "weights": sum(group.num_heads * group.dim for group in groups),
    }
