"""Prune heads so that the result is an ordinary transformers checkpoint: same class, changed config fields.

Every layer keeps the same number of query heads and of key-value heads. Whether a class supports fewer heads of the
same size is tested, not looked up: the smaller model is built from the changed config, filled with the remaining
weights, and compared with the ablated model. A class that computes the head size as width / heads (BERT, GPT-2) is
refused for that reason.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.attention_layers import AttentionLayer
from repulsive.diagnostics.hooks.calling import call, evaluating
from repulsive.diagnostics.model_heads import Heads
from repulsive.diagnostics.output_change import read_output
from repulsive.errors import HeadLayoutError, SelectionError
from repulsive.heads.layout import HeadGroup
from repulsive.heads.module_paths import module_of

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_SIZE = ("head_dim", "d_kv")
_ADVICE = (
    "In Python, prune(model, heads) and save_pruned of repulsive.diagnostics.prune support some of these classes; any "
    "heads can be ablated"
)
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}  # relative to the largest output; others 0.05


@dataclass(frozen=True)
class Selection:
    """The heads that remain after pruning.

    Args:
        kept: for each layer, the query heads that remain, in order.
        kept_kv: for each layer, the key-value heads that remain, in order.
        heads: number of query heads per layer, before and after.
        kv_heads: number of key-value heads per layer, before and after.
    """

    kept: tuple[tuple[int, ...], ...]
    kept_kv: tuple[tuple[int, ...], ...]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]

    @property
    def removed(self) -> list[tuple[int, int]]:
        """(layer, head) of every query head that is removed."""
        every = range(self.heads[0])
        return [(layer, head) for layer, kept in enumerate(self.kept) for head in every if head not in kept]


def select_heads(heads: Heads, scores: Tensor, keep: float, kv_heads: int | None = None) -> Selection:
    """Choose the heads to keep: the same number in every layer and for every key-value head.

    Several combinations (key-value heads, query heads per key-value head) may come equally close to `keep`. Of these,
    the one whose heads have the largest scores is taken. Combinations that the config rejects are not considered.

    Args:
        heads: the heads of a transformers model.
        scores: importance of each head [layers, heads].
        keep: share of the query heads that stay, above 0 and below 1.
        kv_heads: key-value heads that stay in every layer; None: as many as the scores favour.

    Raises:
        SelectionError: the share leaves no head, removes none, does not fit `kv_heads`, or layers differ in their
            number of heads.
        HeadLayoutError: the model has no config in which the number of heads can change.
    """
    if not 0 < keep < 1:
        raise SelectionError(f"keep={keep:g}: choose a share of the heads above 0 and below 1, such as 0.75")
    config = _config(heads.model)
    sharing = [_sharing(heads, layer) for layer in heads.layers]
    counts = {(layer.num_heads, max(pairs) + 1) for layer, pairs in zip(heads.layers, sharing, strict=True)}
    if len(counts) != 1:
        shown = ", ".join(f"{a} heads with {b} key-value heads" for a, b in sorted(counts))
        raise SelectionError(f"layers have different numbers of heads ({shown}); portable pruning needs equal ones")
    (total, kv_total) = counts.pop()
    group = total // kv_total
    if kv_heads is not None and not 1 <= kv_heads <= kv_total:
        raise SelectionError(f"kv_heads={kv_heads}: every layer has {kv_total} key-value heads; choose 1 to {kv_total}")
    accepted: dict[tuple[int, int], float] = {}
    for kv in range(1, kv_total + 1) if kv_heads is None else [kv_heads]:
        for each in range(1, group + 1):
            if kv * each < total and _accepts(config, kv * each, kv):
                accepted[kv, each] = abs(kv * each - keep * total)
    if not accepted:
        fixed = "" if kv_heads is None else f" with {kv_heads} key-value heads"
        raise SelectionError(f"the config accepts no smaller number of heads than {total}{fixed}")
    nearest = min(accepted.values())
    if nearest > max(1.0, 0.25 * total):
        numbers = ", ".join(str(number) for number in sorted({kv * each for kv, each in accepted}))
        raise SelectionError(f"keep={keep:g} of {total} heads: the config accepts only {numbers} heads")
    shared = _scores_shared_by_layers(heads, scores) if _shares_position_bias(heads.model) else scores
    options = [
        _choose(sharing, shared, kv, each, (total, kv_total))
        for (kv, each), distance in accepted.items()
        if distance == nearest
    ]
    return max(options, key=lambda option: float(sum(scores[i, list(k)].sum() for i, k in enumerate(option.kept))))


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
    equal = torch.zeros(len(heads.layers), max(layer.num_heads for layer in heads.layers))
    selection = select_heads(heads, equal, keep, kv_heads)
    config = _smaller_config(_config(heads.model), selection, heads.layers[0].head_dim)
    meta = torch.device("meta")  # shapes are enough
    try:
        with meta:
            smaller = _build(heads.model, config)
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
    config = _smaller_config(_config(model), selection, heads.layers[0].head_dim)
    state = _remaining_weights(heads, selection)
    first = next(iter(state.values()))
    with first.device:
        smaller = _build(model, config)
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
        actual = read_output(call(smaller, inputs)).values
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
            reason = "this class computes the head size as width / heads"
        else:
            reason = "this parameter spans all heads, so that removing some changes the others"
        raise HeadLayoutError(
            f"{type(smaller).__name__} with {selection.heads[1]} heads expects {name} {list(parameter.shape)}, the "
            f"remaining heads have {list(state[name].shape)}: {reason}. {_ADVICE}"
        )


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if config is None or _field(config, _HEADS) is None:
        raise HeadLayoutError(f"{type(model).__name__} has no transformers config with a number of heads. {_ADVICE}")
    return config


def _field(config: Any, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)


def _changes(config: Any, heads: int, kv_heads: int, head_dim: int | None = None) -> dict[str, int]:
    """Compute new values of the config fields that depend on the number of heads."""
    fields = {_field(config, _HEADS) or "num_attention_heads": heads}
    if (name := _field(config, _KV_HEADS)) is not None:
        fields[name] = kv_heads
    if head_dim is not None:
        fields[_field(config, _HEAD_SIZE) or "head_dim"] = head_dim
    return fields


def _accepts(config: Any, heads: int, kv_heads: int) -> bool:
    """Check whether the config's own validation accepts these numbers of heads."""
    try:
        changed = type(config).from_dict({**config.to_dict(), **_changes(config, heads, kv_heads)})
        if hasattr(changed, "validate"):
            changed.validate()
    except Exception:  # validators raise exceptions of any type
        return False
    return True


def _smaller_config(config: Any, selection: Selection, head_dim: int) -> Any:
    fields = _changes(config, selection.heads[1], selection.kv_heads[1], head_dim)
    try:
        changed = type(config).from_dict({**config.to_dict(), **fields})
    except Exception as error:  # a config may compute the head size, or refuse values for reasons of its own
        computed = isinstance(getattr(type(config), "head_dim", None), property)
        reason = "it computes the head size as width / heads" if computed else str(error).strip().split("\n")[0]
        raise HeadLayoutError(
            f"{type(config).__name__} does not accept {selection.heads[1]} heads of size {head_dim}: {reason}. "
            f"{_ADVICE}"
        ) from error
    changed._attn_implementation = config._attn_implementation
    return changed


def _build(model: Any, config: Any) -> Any:
    try:
        return type(model)(config)
    except Exception as error:  # a class may refuse the config for reasons of its own
        raise HeadLayoutError(f"{type(model).__name__} cannot be built with fewer heads: {error}. {_ADVICE}") from error


def _groups(heads: Heads, layer: AttentionLayer) -> list[HeadGroup]:
    return [group for group in heads.groups if module_of(group) == layer.name]


def _sharing(heads: Heads, layer: AttentionLayer) -> tuple[int, ...]:
    """Find the key-value head of each query head."""
    query = next((group for group in _groups(heads, layer) if group.part == "q"), None)
    if query is None:
        raise HeadLayoutError(f"{layer.name}: has no queries of its own; portable pruning needs q, k and v")
    serves = query.serves or tuple(range(layer.num_heads))
    group = layer.num_heads // (max(serves) + 1)
    if serves != tuple(head // group for head in range(layer.num_heads)):
        raise HeadLayoutError(
            f"{layer.name}: key-value heads are not shared by neighbouring query heads; not supported"
        )
    return serves


def _choose(
    sharing: Sequence[tuple[int, ...]], scores: Tensor, kv: int, each: int, totals: tuple[int, int]
) -> Selection:
    kept, kept_kv = [], []
    for row, serves in enumerate(sharing):
        best: dict[int, list[int]] = {}
        for head in sorted(range(totals[0]), key=lambda head: -float(scores[row, head])):
            best.setdefault(serves[head], [])
            if len(best[serves[head]]) < each:
                best[serves[head]].append(head)
        worth = {group: sum(float(scores[row, head]) for head in members) for group, members in best.items()}
        groups = sorted(sorted(worth, key=lambda group: -worth[group])[:kv])
        kept_kv.append(tuple(groups))
        kept.append(tuple(sorted(head for group in groups for head in best[group])))
    return Selection(tuple(kept), tuple(kept_kv), (totals[0], kv * each), (totals[1], kv))


def _shares_position_bias(model: nn.Module) -> bool:
    """Check for T5, which computes one position bias per head in the first layer and uses it in all layers."""
    return any(name.endswith("relative_attention_bias") for name, _ in model.named_modules())


def _scores_shared_by_layers(heads: Heads, scores: Tensor) -> Tensor:
    """Sum scores over the layers of each stack, so that all layers of a stack keep the same heads."""
    shared = scores.clone()
    stacks = [(layer.where, _groups(heads, layer)[0].stack) for layer in heads.layers]
    for stack in set(stacks):
        rows = [row for row, other in enumerate(stacks) if other == stack]
        shared[rows] = scores[rows].sum(0)
    return shared


def _remaining_weights(heads: Heads, selection: Selection, device: torch.device | None = None) -> dict[str, Tensor]:
    """Build the state dict without the rows and columns of the removed heads; on the meta device only its shapes."""
    state = {name: value.detach().to(device) for name, value in heads.model.state_dict().items()}
    for row, layer in enumerate(heads.layers):
        rows: dict[tuple[str, int], list[Tensor]] = {}
        for group in _groups(heads, layer):
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
        columns = torch.arange(layer.num_heads * layer.head_dim).view(layer.num_heads, -1)
        name = f"{layer.projection}.weight"
        if name not in state:
            raise HeadLayoutError(f"{layer.name}: the weight of its output projection is not stored as {name}")
        axis = 0 if type(layer.module).__name__ == "Conv1D" else 1
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
