"""Prune heads so that the result is an ordinary transformers checkpoint: same class, changed config fields.

Every layer keeps the same number of query heads and of key-value heads. Whether a class supports fewer heads of the
same size is tested, not looked up: the smaller model is built from the changed config, filled with the remaining
weights, and compared with the ablated model. A class that computes the head size as width / heads (BERT, GPT-2) is
refused for that reason.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.head_selection import Selection, groups_of_layer, select_heads
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import read_output
from repulsive.diagnostics.smaller_config import ADVICE, config_with_heads, smaller_config
from repulsive.errors import HeadLayoutError, short_message
from repulsive.heads.layout import consecutive_rows
from repulsive.heads.table.match import is_conv1d

__all__ = ["Selection", "check_portable", "prove_equal", "prune_portably", "select_heads"]

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative to the largest output; others 0.05
_WIDTH_IS_FIXED = "this class computes the head size as width / heads"


def check_portable(heads: Heads, keep: float, kv_heads: int | None = None) -> None:
    """Check without any computation that a model can be built with fewer heads, before heads are scored.

    Args:
        heads: the heads of a transformers model.
        keep: as in `select_heads`.
        kv_heads: as in `select_heads`.

    Raises:
        SelectionError: as in `select_heads`.
        HeadLayoutError: the class cannot have fewer heads of the same size.
    """
    equal = torch.zeros(
        len(heads.layers), max(layer.num_heads for layer in heads.layers), dtype=torch.float32, device="cpu"
    )
    selection = select_heads(heads, equal, keep, kv_heads)
    config = _config(heads, selection)
    meta = torch.device("meta")  # shapes are enough
    try:
        with meta:
            smaller = _build(heads, config)
    except HeadLayoutError as error:
        if isinstance(error.__cause__, RuntimeError):  # a constructor that computes with real tensors
            return
        raise
    state = _remaining_weights(heads, selection, meta)
    _fit_per_head_parameters(smaller, state, heads, selection)
    _check_shapes(smaller, state, heads, selection)


def prune_portably(heads: Heads, selection: Selection, example_inputs: object) -> nn.Module:
    """Build the smaller model, and check on example inputs that it computes the same as the ablated model.

    Args:
        heads: the heads of the whole model, which does not change.
        selection: the heads that remain.
        example_inputs: inputs for the check.

    Returns:
        A model of the same class with a changed config; `save_pretrained` writes an ordinary checkpoint.

    Raises:
        HeadLayoutError: the class cannot have fewer heads of the same size, or the smaller model does not compute the
            same as the ablated model.
    """
    model: Any = heads.model
    config = _config(heads, selection)
    state = _remaining_weights(heads, selection)
    first = next(iter(state.values()))
    with first.device:
        smaller = _build(heads, config)
    _fit_per_head_parameters(smaller, state, heads, selection)
    _check_shapes(smaller, state, heads, selection)
    smaller = smaller.to(device=first.device, dtype=first.dtype)
    missing, unexpected = smaller.load_state_dict(state, strict=False)
    tied = {name for name, value in smaller.named_parameters(remove_duplicate=False) if value.is_meta}
    if unexpected or [name for name in missing if name in tied]:
        raise HeadLayoutError(f"weights do not match the smaller {type(model).__name__}: {[*missing, *unexpected][:3]}")
    if hasattr(smaller, "tie_weights"):
        smaller.tie_weights()
    smaller.eval()
    if getattr(model, "generation_config", None) is not None:
        smaller.generation_config = copy.deepcopy(model.generation_config)
    prove_equal(heads, selection, smaller, example_inputs)
    return smaller


def prove_equal(heads: Heads, selection: Selection, smaller: nn.Module, inputs: object) -> float:
    """Check that the outputs of the smaller model equal those of the ablated model.

    Returns:
        The largest difference of an output, relative to the largest output.

    Raises:
        HeadLayoutError: the outputs differ by more than rounding errors.
    """
    with torch.no_grad(), evaluating(heads.model), heads.ablated(selection.removed):
        expected = read_output(call(heads.model, inputs)).values.double()
    with torch.no_grad(), evaluating(smaller):
        try:
            actual = read_output(call(smaller, inputs)).values
        except Exception as failure:  # raised by the model's own code
            raise HeadLayoutError(
                f"{type(smaller).__name__} does not run with {selection.heads[1]} heads: {short_message(failure)}. "
                f"Nothing was written. {ADVICE}"
            ) from failure
    error = float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
    if not error <= _TOLERANCES.get(actual.dtype, 0.05):
        raise HeadLayoutError(
            f"the smaller {type(smaller).__name__} differs from the ablated model by {error:.1e}: something in it "
            "depends on the heads that were removed, such as a norm over all heads. Nothing was written"
        )
    return error


def _check_shapes(smaller: nn.Module, state: Mapping[str, Tensor], heads: Heads, selection: Selection) -> None:
    projections = {part.parameter_name for group in heads.groups for part in group.slices}
    projections |= {f"{layer.projection}.weight" for layer in heads.layers}
    for name, parameter in smaller.state_dict().items():
        if name not in state or state[name].shape == parameter.shape:
            continue
        if name in projections or name.removesuffix("bias") + "weight" in projections:
            reason = _WIDTH_IS_FIXED
        else:
            reason = "this parameter spans all heads, so that removing some changes the others"
        raise HeadLayoutError(
            f"{type(smaller).__name__} with {selection.heads[1]} heads expects {name} {list(parameter.shape)}, the "
            f"remaining heads have {list(state[name].shape)}: {reason}. {ADVICE}"
        )


def _config(heads: Heads, selection: Selection) -> Any:
    config, head_dim = config_with_heads(heads.model), heads.layers[0].head_dim
    return smaller_config(config, selection.heads[1], selection.kv_heads[1], head_dim)


def _build(heads: Heads, config: Any) -> Any:
    try:
        return type(heads.model)(config)
    except Exception as error:  # a class may refuse the config for reasons of its own
        reason = _WIDTH_IS_FIXED if _is_width_fixed(heads) else short_message(error)
        raise HeadLayoutError(
            f"{type(heads.model).__name__} cannot be built with fewer heads: {reason}. {ADVICE}"
        ) from error


def _is_width_fixed(heads: Heads) -> bool:
    """Check whether a model with one head has an output projection as wide as that of all heads."""
    model: Any = heads.model
    layer = heads.layers[0]
    try:
        config = smaller_config(config_with_heads(model), 1, 1, layer.head_dim)
        with torch.device("meta"):
            one = type(model)(config)
    except Exception:  # as above
        return False
    name = f"{layer.projection}.weight"
    shapes = [each.state_dict()[name].shape for each in (model, one) if name in each.state_dict()]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def _remaining_weights(heads: Heads, selection: Selection, device: torch.device | None = None) -> dict[str, Tensor]:
    """Build the state dict without the rows and columns of the removed heads; on the meta device only its shapes."""
    state = {name: value.detach().to(device) for name, value in heads.model.state_dict().items()}
    for row, layer in enumerate(heads.layers):
        rows: dict[tuple[str, int], list[Tensor]] = {}
        for group in groups_of_layer(heads, layer):
            is_query = group.part == "q" or group.num_heads == selection.heads[0]
            kept = selection.kept[row] if is_query else selection.kept_kv[row]
            for part in group.slices:
                rows.setdefault((part.parameter_name, part.axis), []).append(part.rows[list(kept)].flatten())
        for (name, axis), pieces in rows.items():
            index = torch.cat(pieces) if len(pieces) == 1 else torch.cat(pieces).sort().values
            state[name] = state[name].index_select(axis, index.to(state[name].device))
            bias = name.removesuffix("weight") + "bias"
            if bias in state:
                state[bias] = state[bias].index_select(0, index.to(state[bias].device))
        columns = consecutive_rows(layer.num_heads, layer.head_dim)
        name = f"{layer.projection}.weight"
        if name not in state:
            raise HeadLayoutError(f"{layer.name}: the weight of its output projection is not stored as {name}")
        axis = 0 if is_conv1d(layer.module) else 1
        kept_columns = columns[list(selection.kept[row])].flatten()
        state[name] = state[name].index_select(axis, kept_columns.to(state[name].device))
    return state


def _fit_per_head_parameters(smaller: nn.Module, state: dict[str, Tensor], heads: Heads, selection: Selection) -> None:
    """Cut parameters with one entry per head, such as position biases and sinks, to the heads of their layer."""
    expected: Mapping[str, Tensor] = smaller.state_dict()
    for name, value in state.items():
        if name not in expected or expected[name].shape == value.shape or value.ndim != expected[name].ndim:
            continue
        differing = [axis for axis in range(value.ndim) if value.shape[axis] != expected[name].shape[axis]]
        owner = next((row for row, layer in enumerate(heads.layers) if name.startswith(f"{layer.name}.")), None)
        if owner is None or len(differing) != 1:
            continue
        axis = differing[0]
        for kept, (before, after) in (
            (selection.kept[owner], selection.heads),
            (selection.kept_kv[owner], selection.kv_heads),
        ):
            if (value.shape[axis], expected[name].shape[axis]) == (before, after):
                state[name] = value.index_select(axis, torch.tensor(kept, device=value.device))
                break
