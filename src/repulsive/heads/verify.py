"""Prove by autograd that each slice of a weight is one attention head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from repulsive.errors import HeadLayoutError, NoHeadsFound, list_first
from repulsive.heads.flat_weights import refuse_flat_weights
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import check_model, unwrap
from repulsive.heads.table.lookup import heads_from_table
from repulsive.heads.trace.gradients import Trace
from repulsive.heads.trace.infer import infer
from repulsive.heads.trace.reports import HeadReport, check_groups, is_sufficient, refuse_wrong
from repulsive.heads.trace.sharded_weights import gathered_weights
from repulsive.heads.trace.tracer import trace_as_needed, trace_model

_LISTED = 4  # largest number of names in an error message


def verify_heads(
    model: nn.Module,
    example_inputs: object,
    groups: Sequence[HeadGroup] | None = None,
    *,
    tolerance: float = 1e-6,
) -> list[HeadReport]:
    """Prove on an example that each slice is one head.

    The gradient of attention head i must fall into slice i and nowhere else. This takes one or two forward passes in
    evaluation mode; weights, gradients, training flags and random state stay as they are. Weights sharded by FSDP2 are
    gathered meanwhile, so every rank must call this.

    Args:
        model: any module; data-parallel and compile wrappers are removed.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments, with several tokens.
        groups: the groups to verify. By default, groups from the family table and groups that the trace infers.
        tolerance: largest share of a head's squared gradient that may fall outside its slice.

    Returns:
        One report per group. "untraced" means that no attention call of the example reached the group.

    Raises:
        HeadLayoutError: a slice is not one head, heads are mixed with each other, query and key-value heads are
            paired wrongly, or no group could be traced.
        SelectionError: `model` is not an instance of nn.Module.
        NoHeadsFound: there are no groups to verify, or `torch.jit` or `torch.export` made the model.
        UnsupportedWeights: a weight is tensor parallel, or FSDP1 flattens it.
    """
    check_model(model)
    inner = unwrap(model)
    refuse_flat_weights(inner)
    known = heads_from_table(inner)[0] if groups is None else groups

    def reaches_all(trace: Trace) -> bool:
        return is_sufficient(check_groups(inner, known, trace), trace)

    trace = trace_as_needed(inner, example_inputs, reaches_all)
    if groups is None:
        groups = [*known, *infer(inner, trace, known)[0]]
    if not groups:
        raise NoHeadsFound(
            f"no heads to verify in {type(inner).__name__}; pass an example with several tokens, or use heads_by_hand"
        )
    reports = check_groups(inner, groups, trace, tolerance)
    refuse_wrong(reports)
    if all(report.status == "untraced" for report in reports):
        raise HeadLayoutError(
            f"no group could be verified: {reports[0].note}. The trace follows softmax, scaled dot-product attention "
            "and graph convolutions; check that the example runs through attention"
        )
    queries_and_keys = [report for report in reports if set(report.part) & set("qk")]
    if queries_and_keys and all(report.status == "untraced" for report in queries_and_keys):
        raise HeadLayoutError(
            f"{queries_and_keys[0].name} and all other q and k got no gradient, which happens if the example has one "
            "token; pass an example with several tokens"
        )
    return reports


def refuse_unproved(model: nn.Module, groups: Sequence[HeadGroup], example_inputs: object = None) -> None:
    """Raise if heads to be trained were only guessed, or if the example inputs do not prove them.

    Args:
        model: the model.
        groups: the heads that are to be trained.
        example_inputs: inputs of the model for the proof, or None.

    Raises:
        HeadLayoutError: the message lists the groups, why they are not proved and what to do.
    """
    if example_inputs is None:
        guesses = [f"{group.name} (signature {group.family})" for group in groups if group.proof == "guess"]
        if guesses:
            raise HeadLayoutError(
                f"the rows of {len(guesses)} groups of heads are a guess from names and shapes, and a wrong guess "
                f"would train rows of other heads: {list_first(guesses, _LISTED)}. Pass example_inputs=... (inputs "
                "of the model) to prove them by a trace, or allow_unproved=True to train them as they are"
            )
        return
    inner = unwrap(model)
    unproved = [group for group in groups if group.proof in ("guess", "table")]
    with gathered_weights(inner):  # on every rank, also if the example of this rank proves all groups
        if not unproved:
            return
        reports = check_groups(inner, unproved, trace_model(inner, example_inputs))
    remaining = [f"{report.name} ({report.note})" for report in reports if report.status != "verified"]
    if remaining:
        raise HeadLayoutError(
            f"the example proves {len(groups) - len(remaining)} of {len(groups)} groups of heads; it does not prove "
            f"{list_first(remaining, _LISTED)}. Pass an example that runs through them, exclude them with where=, "
            "parts= or match=, or pass allow_unproved=True to train them as they are"
        )
