"""Refuse to train heads that nobody has proved."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from repulsive.errors import HeadLayoutError
from repulsive.heads.layout import HeadGroup
from repulsive.heads.place import unwrap
from repulsive.heads.trace.check import judge
from repulsive.heads.trace.trace import trace

_LISTED = 4


def refuse_unproved(model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object = None) -> None:
    """Raise where heads are a guess, or where an example was given that does not prove them.

    Args:
        model: the model.
        groups: the heads that are going to be trained.
        example_inputs: what was given to prove them, None where nothing was.

    Raises:
        HeadLayoutError: with the groups, why they are not proved and what to do.
    """
    if example_inputs is None:
        guesses = [f"{group.name} (signature {group.family})" for group in groups if group.proof == "guess"]
        if guesses:
            raise HeadLayoutError(
                f"the rows of {len(guesses)} groups of heads are a guess from names and shapes, and a wrong guess "
                f"would train rows of other heads: {_few(guesses)}. Pass example_inputs=..., inputs of the model, to "
                "prove them by a trace; or allow_unproved=True to train them as they are"
            )
        return
    open_ones = [group for group in groups if group.proof in ("guess", "table")]
    if not open_ones:
        return
    inner = unwrap(model)
    reports = judge(inner, open_ones, trace(inner, example_inputs))
    untraced = [f"{report.name} ({report.note})" for report in reports if report.status != "verified"]
    if untraced:
        raise HeadLayoutError(
            f"the example proves {len(groups) - len(untraced)} of {len(groups)} groups of heads; it does not prove "
            f"{_few(untraced)}. Give an example that runs through them, leave them out with where=, parts= or match=, "
            "or pass allow_unproved=True to train them as they are"
        )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
