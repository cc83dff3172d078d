"""Trace heads by autograd: find the projection rows that each head of each attention call depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import torch
from torch import Tensor, nn

from repulsive.heads.module_paths import clean
from repulsive.heads.trace.forward_pass import first_samples, run
from repulsive.heads.trace.gradients import PRESENT, Key, RoleGradients, Trace, gather, head_ids
from repulsive.heads.trace.mixing import (
    AFTER,
    BEFORE,
    BESIDE,
    CHANNELS,
    bypasses_weights,
    mixes_after,
    mixing_matrix,
    uses_foreign_rows,
)
from repulsive.heads.trace.norms import StopGradient
from repulsive.heads.trace.recorder import Recorder
from repulsive.heads.trace.records import Call, Leaf
from repulsive.heads.trace.sharded_weights import gathered_weights
from repulsive.heads.trace.usage import has_product_of_activations


def trace_model(model: nn.Module, example_inputs: object) -> Trace:
    """Run one forward pass and follow the gradient of every head back to its projections.

    Args:
        model: the unwrapped model. Its parameters, gradients, training flags and random state stay as they are.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.
    """
    with gathered_weights(model), torch.inference_mode(False), torch.enable_grad():
        recorder = Recorder([(clean(name), p) for name, p in model.named_parameters()])
        run(model, example_inputs, recorder)
        calls = [(call.has_softmax, _trace_call(call, recorder.leaves)) for call in recorder.calls]
    with_softmax = [roles for has_softmax, roles in calls if has_softmax and roles]
    used = {key for roles in with_softmax for role in roles for key in role.energy}
    kept = [
        roles for has_softmax, roles in calls if roles and (has_softmax or _is_attention_without_softmax(roles, used))
    ]
    has_attention = (
        bool(recorder.hidden)
        or recorder.products > 0
        or any(_is_attention_over_tokens(roles) for has_softmax, roles in calls if has_softmax)
    )
    return Trace(kept, recorder.hidden, has_attention)


def _is_attention_over_tokens(roles: list[RoleGradients]) -> bool:
    """Check that the scores of a call may be dot products of queries and keys at different tokens."""
    scores = [role for role in roles if role.role != "v"]  # none if the example has one token, or without projections
    return not scores or any(role.has_product and role.mixed != CHANNELS for role in scores)


def trace_as_needed(model: nn.Module, example_inputs: object, is_sufficient: Callable[[Trace], bool]) -> Trace:
    """Trace the first samples of an example; trace all samples if the model rejects a few or they are not sufficient.

    Args:
        model: as in `trace_model`.
        example_inputs: as in `trace_model`.
        is_sufficient: returns whether a trace shows everything the caller needs.
    """
    few = first_samples(example_inputs)
    with gathered_weights(model):  # once, however many passes the example of this rank needs
        if few is not None:
            try:
                trace = trace_model(model, few)
            except Exception:  # a mask whose first axis is not the batch, or a model with a fixed batch size
                trace = None
            if trace is not None and is_sufficient(trace):
                return trace
        return trace_model(model, example_inputs)


def _is_attention_without_softmax(roles: list[RoleGradients], used: set[Key]) -> bool:
    """Check that a chain of two products is attention: q, k and v have heads, over tokens, and no softmax uses them."""
    parts = {role.role for role in roles if len(set(head_ids([role.energy], role.total))) > 1}
    return parts == set("qkv") and not any(role.mixed == CHANNELS or used & set(role.energy) for role in roles)


def _trace_call(call: Call, leaves: Mapping[int, Leaf]) -> list[RoleGradients]:
    roles: list[RoleGradients] = []
    for role, operand in call.operands.items():
        roles += _trace_tensor(role, call.owner, operand, range(operand.ndim - 2), leaves)
    if call.scores is not None:
        roles += _trace_scores(call, leaves)
    for output, axes in call.outputs:
        roles += _trace_tensor("any" if call.is_graph else "v", call.owner, output, axes, leaves)
    if any(role.mixed == CHANNELS for role in roles):
        return [replace(role, mixed=CHANNELS) for role in roles]
    scores = [role.energy for role in roles if role.role in ("q", "k")]
    if call.scores is not None and any(bypasses_weights(scores, role.energy) for role in roles if role.role == "v"):
        return [replace(role, mixed=role.mixed or BESIDE) if role.role != "v" else role for role in roles]
    return roles


def _trace_tensor(
    role: str, owner: str, tensor: Tensor, axes: Sequence[int], leaves: Mapping[int, Leaf]
) -> list[RoleGradients]:
    """Compute the gradients of each head of `tensor`, whose head axes are among `axes`."""
    sources, norm_widths = _sources(tensor, leaves)
    if not sources:
        return []
    heads = [axis for axis in axes if _counts_heads(tensor, axis, sources)]
    noise = _noise(tensor)

    def energy_of(index: tuple[int, ...]) -> list[dict[Key, Tensor]]:
        energy = _zero_energy(sources)
        for leaf, grad in _gradients(tensor, _only(noise, heads, index), sources):
            energy[leaf.name, leaf.axis].index_add_(0, leaf.rows, _per_feature(grad, leaf))
        return [energy]

    places = list(product(*(range(tensor.shape[axis]) for axis in heads)))
    indices, (energy,) = gather(places, energy_of)
    return [RoleGradients(role, owner, energy, norm_widths, "", indices, len(places))]


def _trace_scores(call: Call, leaves: Mapping[int, Leaf]) -> list[RoleGradients]:
    """Trace attention scores and tell q from k: one row of scores depends on one query and on many keys."""
    scores, attended = call.scores, call.attended
    assert scores is not None
    assert attended is not None
    sources, norm_widths = _sources(scores, leaves)
    if not sources or int(attended.max()) < 2:
        return []
    axes = [axis for axis in range(scores.ndim) if axis != call.dim]
    heads = [axis for axis in axes if _counts_heads(scores, axis, sources)]
    noise = _noise(scores)
    has_product = has_product_of_activations(scores, [leaf.tensor for leaf in sources])
    if has_product and _is_over_channels(call, scores, heads, sources):
        energy = _zero_energy(sources)
        for leaf, grad in _gradients(scores, noise, sources):
            energy[leaf.name, leaf.axis].index_add_(0, leaf.rows, _per_feature(grad, leaf))
        reached = {key: e.unsqueeze(0) for key, e in energy.items() if e.any()}
        return [RoleGradients(role, call.owner, reached, norm_widths, CHANNELS, (0,), 1) for role in "qk"]

    def energy_of(index: tuple[int, ...]) -> list[dict[Key, Tensor]]:
        energy = [_zero_energy(sources) for _ in range(3)]  # of one query, of its keys, of all queries and keys
        row = _fullest_row(attended.unsqueeze(call.dim), heads, index, axes)
        count = int(attended.unsqueeze(call.dim)[tuple(row.get(a, 0) for a in range(scores.ndim))])
        for leaf, grad in _gradients(scores, _only(noise, list(row), tuple(row.values())), sources):
            is_query = 2 * _positions_reached(grad, leaf) <= count
            total = _per_feature(grad, leaf)
            for part, mine in zip(energy, (is_query, ~is_query), strict=False):
                part[leaf.name, leaf.axis].index_add_(0, leaf.rows, torch.where(mine.cpu(), total, 0.0))
        for leaf, grad in _gradients(scores, _only(noise, heads, index), sources):
            energy[2][leaf.name, leaf.axis].index_add_(0, leaf.rows, _per_feature(grad, leaf))
        return energy

    places = list(product(*(range(scores.shape[axis]) for axis in heads)))
    indices, (*energies, all_queries) = gather(places, energy_of)
    mixed = _matrix_before_or_after(call, scores, heads, sources, leaves)
    mixed = mixed or (BEFORE if uses_foreign_rows(energies, all_queries) else "")
    if not mixed and heads and call.weights is not None:
        weights, ids = call.weights, head_ids(energies, len(places))
        if any(mixes_after(output, axes, weights, heads, ids) for output, axes in call.outputs):
            mixed = AFTER
    return [
        RoleGradients(role, call.owner, energy, norm_widths, mixed, indices, len(places), has_product)
        for role, energy in zip("qk", energies, strict=True)
    ]


def _matrix_before_or_after(
    call: Call, scores: Tensor, heads: list[int], sources: list[Leaf], leaves: Mapping[int, Leaf]
) -> str:
    """Describe the learned matrix that mixes the scores of the heads; "" if there is none."""
    sizes = [scores.shape[axis] for axis in heads]
    if name := mixing_matrix(sources, sizes):
        return f"{name} mixes heads before the softmax (talking heads)"
    for output, _ in call.outputs:
        if name := mixing_matrix(_sources(output, leaves)[0], sizes):
            return f"{name} mixes heads into the attention weights (talking heads)"
    return ""


def _is_over_channels(call: Call, scores: Tensor, heads: list[int], sources: list[Leaf]) -> bool:
    """Check whether the keys of one query are different features, each summed over tokens, instead of tokens."""
    assert call.attended is not None
    axes = [axis for axis in range(scores.ndim) if axis != call.dim]
    row = _fullest_row(call.attended.unsqueeze(call.dim), heads, (0,) * len(heads), axes)
    noise, size = _noise(scores), scores.shape[call.dim]
    summed: list[list[Tensor]] = []  # for each key and projection, the features that several tokens contribute to
    for key in sorted({0, 1, size // 2, size - 1}):
        one_score = _only(noise, [*row, call.dim], [*row.values(), key])
        gradients = _gradients(scores, one_score, sources)
        summed.append([_positions_reached(grad, leaf) > 1 for leaf, grad in gradients])
    return any(
        any(bool((a & ~b).any()) and bool((b & ~a).any()) for a, b in zip(one, other, strict=True))
        for one, other in combinations(summed, 2)
    )


def _positions_reached(grad: Tensor, leaf: Leaf) -> Tensor:
    """Count the positions (samples and tokens) at which each feature of a projection has a gradient: [features]."""
    energies = grad.square().sum(leaf.inner, keepdim=True) if leaf.inner else grad.square()
    positions = energies.movedim(leaf.feature_axis, -1).flatten(0, -2)  # [positions, features]
    return (positions > PRESENT * positions.max(0).values).sum(0)


def _sources(tensor: Tensor, leaves: Mapping[int, Leaf]) -> tuple[list[Leaf], frozenset[int]]:
    """Find the projections that `tensor` is computed from, and the widths of the norms in between."""
    sources: list[Leaf] = []
    norm_widths: set[int] = set()
    todo, visited = [tensor.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaves:
            sources.append(leaves[id(variable)])
        if type(node).__name__ == f"{StopGradient.__name__}Backward":
            norm_widths.add(node.width)  # type: ignore[attr-defined]
        todo += [following for following, _ in node.next_functions]
    return sources, frozenset(norm_widths)


def _counts_heads(tensor: Tensor, axis: int, leaves: list[Leaf]) -> bool:
    """Check whether an axis counts heads: heads reach different features, but samples and tokens reach the same."""
    size = tensor.shape[axis]
    if size < 2:
        return False
    noise = _noise(tensor)
    first: Tensor | None = None
    for place in sorted({0, 1, size // 2, size - 1}):
        grads = _gradients(tensor, _only(noise, [axis], (place,)), leaves)
        energies = [_per_feature(grad, leaf) for leaf, grad in grads]
        reached = torch.cat([e > PRESENT * max(float(e.max()), 1e-300) for e in energies]) if energies else None
        if reached is None or not reached.any():  # masked: nothing to compare
            continue
        if first is None:
            first = reached
        elif int((first & reached).sum()) < 0.9 * int((first | reached).sum()):
            return True
    return False


def _gradients(tensor: Tensor, cotangent: Tensor, leaves: list[Leaf]) -> list[tuple[Leaf, Tensor]]:
    """Compute the gradient of `tensor` with respect to each leaf; zeros if `tensor` does not depend on the leaf."""
    grads = torch.autograd.grad(tensor, [x.tensor for x in leaves], cotangent, retain_graph=True, allow_unused=True)
    return [
        (x, _dense(torch.zeros_like(x.tensor) if g is None else g).nan_to_num())
        for x, g in zip(leaves, grads, strict=True)
    ]


def _dense(tensor: Tensor) -> Tensor:
    """Return the values [tokens, features] of a nested tensor, or any other tensor unchanged."""
    return tensor.values() if tensor.is_nested else tensor


def _per_feature(grad: Tensor, leaf: Leaf) -> Tensor:
    return grad.double().movedim(leaf.feature_axis, -1).flatten(0, -2).square().sum(0).cpu()  # [features]


def _zero_energy(leaves: list[Leaf]) -> dict[Key, Tensor]:
    return {
        (x.name, x.axis): torch.zeros(x.parameter.shape[x.axis], dtype=torch.float64, device="cpu") for x in leaves
    }  # [rows]


def _only(noise: Tensor, axes: Sequence[int], index: Sequence[int]) -> Tensor:
    """Keep `noise` at one index of the given axes and set it to zero elsewhere."""
    place: list[int | slice] = [slice(None)] * noise.ndim
    for axis, i in zip(axes, index, strict=True):
        place[axis] = i
    kept = torch.zeros_like(noise)
    kept[tuple(place)] = noise[tuple(place)]
    return kept


def _fullest_row(attended: Tensor, heads: list[int], index: tuple[int, ...], axes: list[int]) -> dict[int, int]:
    """Find the sample and query of one head that attend to the most keys: {axis: index}."""
    fixed = dict(zip(heads, index, strict=True))
    free = [axis for axis in axes if axis not in fixed]
    view = attended
    for axis, i in fixed.items():
        view = view.narrow(axis, i, 1)
    flat = int(view.flatten().argmax())
    place = torch.unravel_index(torch.tensor(flat, device="cpu"), view.shape)
    return {axis: fixed.get(axis, int(place[axis])) for axis in sorted([*fixed, *free])}


def _noise(tensor: Tensor) -> Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(tensor)
