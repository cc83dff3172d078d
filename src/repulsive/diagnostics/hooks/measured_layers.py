"""Find the heads and attention layers that a measurement needs, and prove guessed layouts on its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer, find_attention_layers
from repulsive.diagnostics.hooks.traced_projections import traced_projections
from repulsive.errors import NoHeadsFound, list_first, warn_user
from repulsive.heads import HeadGroup, find_heads
from repulsive.heads.module_paths import clean, module_of, unwrap


def find_measured_heads(model: nn.Module, inputs: object) -> list[HeadGroup]:
    """Find the heads of a model; prove them on the inputs if the family table does not list all of their classes.

    A guess from names and shapes may be wrong, and so would be every number that is measured with it.

    Args:
        model: any module.
        inputs: a tensor, a tuple of arguments or a mapping of keyword arguments; None if there are none.

    Raises:
        NoHeadsFound: the model has no heads.
        HeadLayoutError: a slice is not one head.
    """
    try:
        groups = find_heads(model)
    except NoHeadsFound:
        if inputs is None:
            raise
        return find_heads(model, inputs)
    is_guess = any(group.proof == "guess" for group in groups)
    return find_heads(model, inputs) if is_guess and inputs is not None else groups


def find_measured_layers(model: nn.Module, inputs: object) -> list[AttentionLayer]:
    """Find the attention layers of a model whose heads `find_measured_heads` finds, with their output projections."""
    groups = find_measured_heads(model, inputs)
    out = traced_projections(model, groups, inputs) if inputs is not None else None
    return find_attention_layers(model, groups, out=out)


def guess_message(groups: Sequence[HeadGroup]) -> str:
    """Describe the heads whose rows are a guess from names and shapes; "" if there are none."""
    guesses = [group.name for group in groups if group.proof == "guess"]
    if not guesses:
        return ""
    more = f" and {len(guesses) - 1} more" if len(guesses) > 1 else ""
    return (
        f"the heads of {guesses[0]}{more} are a guess from names and shapes, and numbers about them may be wrong; "
        "pass example_inputs=..., or --example on the command line, to prove them"
    )


def tied_message(model: nn.Module, groups: Sequence[HeadGroup]) -> str:
    """Describe attention modules without groups because their weights are those of an earlier module; "" if none."""
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    known = {module_of(group) for group in groups}
    classes = {type(modules[name]) for name in known}
    weights = {id(part.parameter()) for group in groups for part in group.slices}
    seen = {id(inner) for name in known for inner in modules[name].modules()}  # an adapter contains the adapted module
    tied = [
        name
        for name, module in modules.items()
        if type(module) in classes and id(module) not in seen and weights & {id(each) for each in module.parameters()}
    ]
    if not tied:
        return ""
    verb = "is" if len(tied) == 1 else "are"
    return (
        f"{list_first(tied, 3)} {verb} neither measured nor ablated: the weights are tied to those of an earlier "
        "layer. Use one module in both places, and all of its runs are measured"
    )


def warn_about_guesses(groups: Sequence[HeadGroup]) -> None:
    """Warn if the rows of some heads are a guess from names and shapes."""
    if message := guess_message(groups):
        warn_user(message)
