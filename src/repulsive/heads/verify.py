"""Prove that slices are heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from repulsive.errors import HeadLayoutError, NoHeadsFound
from repulsive.heads.layout import HeadGroup
from repulsive.heads.place import unwrap
from repulsive.heads.table.walk import known_heads
from repulsive.heads.trace.check import HeadReport, judge
from repulsive.heads.trace.infer import infer, refuse_wrong, settled
from repulsive.heads.trace.trace import trace_enough


def verify_heads(
    model: nn.Module,
    example_inputs: object,
    groups: Sequence[HeadGroup] | None = None,
    *,
    tolerance: float = 1e-6,
) -> list[HeadReport]:
    """Prove on an example that each slice is one head: what leaves head i sends gradient into slice i alone.

    One or two forward passes in evaluation mode; weights, gradients, flags and random state stay as they are.

    Args:
        model: any module; wrappers are seen through.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, with several tokens.
        groups: what to prove; the table's groups and those the trace infers where None.
        tolerance: largest share of a head's squared gradient that may fall outside its slice.

    Returns:
        One report per group. "untraced" means that no attention call of the example reached the group.

    Raises:
        HeadLayoutError: a slice is not one head, heads are mixed with each other, query and key-value heads are
            paired wrongly, or no group could be traced.
        NoHeadsFound: there is nothing to verify.
    """
    inner = unwrap(model)
    if groups is None:
        known = known_heads(inner)[0]
        seen = trace_enough(inner, example_inputs, lambda seen: settled(judge(inner, known, seen), seen))
        groups = [*known, *infer(inner, seen, known)[0]]
    else:
        seen = trace_enough(inner, example_inputs, lambda seen: settled(judge(inner, groups, seen), seen))
    if not groups:
        raise NoHeadsFound(
            f"no heads to verify in {type(inner).__name__}; give an example of several tokens, or use heads_by_hand"
        )
    reports = judge(inner, groups, seen, tolerance)
    refuse_wrong(reports)
    if all(report.status == "untraced" for report in reports):
        raise HeadLayoutError(
            f"no group could be verified: {reports[0].note}. The trace sees softmax, scaled dot-product attention "
            "and graph convolutions; check that the example runs through attention"
        )
    matched = [report for report in reports if set(report.part) & set("qk")]
    if matched and all(report.status == "untraced" for report in matched):
        raise HeadLayoutError(
            f"{matched[0].name} and every other q and k got no gradient, as with one token; give an example of several"
        )
    return reports
