"""Trace heads by autograd: which features of which projection feed each head of each attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from repulsive.heads.place import clean
from repulsive.heads.trace.intercept import Call, Intercept, Leaf
from repulsive.heads.trace.mixing import AFTER, BEFORE, borrows, mixer_before, mixes_after
from repulsive.heads.trace.norms import Hold
from repulsive.heads.trace.reach import PRESENT, Key, Reach, Trace, gather, head_ids
from repulsive.heads.trace.running import run, shortened


def trace(model: nn.Module, example_inputs: object) -> Trace:
    """Run one forward pass and follow every head back to its projections.

    Args:
        model: the unwrapped model. Its parameters, gradients, training flags and random state stay as they are.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.
    """
    watch = Intercept([(clean(name), p) for name, p in model.named_parameters()])
    with torch.inference_mode(False), torch.enable_grad():
        run(model, example_inputs, watch)
        reaches = [_reaches(call, watch.leaves) for call in watch.calls]
    return Trace([found for found in reaches if found], watch.hidden)


def trace_enough(model: nn.Module, example_inputs: object, settled: Callable[[Trace], bool]) -> Trace:
    """Trace the first samples of an example, and all of it where the model refuses fewer or that leaves questions.

    Args:
        model: as in `trace`.
        example_inputs: as in `trace`.
        settled: whether a trace answers what it was made for.
    """
    few = shortened(example_inputs)
    if few is not None:
        try:
            seen = trace(model, few)
        except Exception:  # a mask with other axes, or a model of a fixed number of samples
            seen = None
        if seen is not None and settled(seen):
            return seen
    return trace(model, example_inputs)


def _reaches(call: Call, leaves: Mapping[int, Leaf]) -> list[Reach]:
    found: list[Reach] = []
    for role, operand in call.operands.items():
        found += _spread(role, call.owner, operand, range(operand.ndim - 2), leaves)
    if call.scores is not None:
        found += _spread_scores(call, leaves)
    for output, axes in call.outputs:
        found += _spread("any" if call.graph else "v", call.owner, output, axes, leaves)
    return found


def _spread(role: str, owner: str, out: Tensor, axes: Sequence[int], leaves: Mapping[int, Leaf]) -> list[Reach]:
    """Energy of each head of `out`, whose head axes are among `axes`."""
    behind, held = _behind(out, leaves)
    if not behind:
        return []
    heads = [axis for axis in axes if _splits(out, axis, behind)]
    noise = _noise(out)

    def drawn(index: tuple[int, ...]) -> list[dict[Key, Tensor]]:
        energy = _empty(behind)
        for leaf, grad in _pull(out, _only(noise, heads, index), behind):
            energy[leaf.name, leaf.axis][leaf.rows] += _per_feature(grad, leaf)
        return [energy]

    places = list(product(*(range(out.shape[axis]) for axis in heads)))
    indices, (energy,) = gather(places, drawn)
    return [Reach(role, owner, energy, held, "", indices, len(places))]


def _spread_scores(call: Call, leaves: Mapping[int, Leaf]) -> list[Reach]:
    """Tell q from k: one row of scores comes from one query and many keys."""
    scores, attended = call.scores, call.attended
    assert scores is not None
    assert attended is not None
    behind, held = _behind(scores, leaves)
    if not behind or int(attended.max()) < 2:
        return []
    axes = [axis for axis in range(scores.ndim) if axis != call.dim]
    heads = [axis for axis in axes if _splits(scores, axis, behind)]
    noise = _noise(scores)

    def drawn(index: tuple[int, ...]) -> list[dict[Key, Tensor]]:
        energy = [_empty(behind), _empty(behind), _empty(behind)]  # of one query, of its keys, of all there is
        row = _fullest(attended.unsqueeze(call.dim), heads, index, axes)
        count = int(attended.unsqueeze(call.dim)[tuple(row.get(a, 0) for a in range(scores.ndim))])
        for leaf, grad in _pull(scores, _only(noise, list(row), tuple(row.values())), behind):
            energies = grad.square().sum(leaf.inner, keepdim=True) if leaf.inner else grad.square()
            positions = energies.movedim(leaf.feature_axis, -1).flatten(0, -2)  # [positions, features]
            touched = (positions > PRESENT * positions.max(0).values).sum(0)  # [features]
            local = 2 * touched <= count
            total = _per_feature(grad, leaf)
            for part, mine in zip(energy, (local, ~local), strict=False):
                part[leaf.name, leaf.axis][leaf.rows] += torch.where(mine.cpu(), total, 0.0)
        for leaf, grad in _pull(scores, _only(noise, heads, index), behind):
            energy[2][leaf.name, leaf.axis][leaf.rows] += _per_feature(grad, leaf)
        return energy

    places = list(product(*(range(scores.shape[axis]) for axis in heads)))
    indices, (*energies, everything) = gather(places, drawn)
    mixed = mixer_before(behind) or (BEFORE if borrows(energies, everything) else "")
    if not mixed and heads and call.weights is not None:
        weights, ids = call.weights, head_ids(energies, len(places))
        if any(mixes_after(output, axes, weights, heads, ids) for output, axes in call.outputs):
            mixed = AFTER
    return [
        Reach(role, call.owner, energy, held, mixed, indices, len(places))
        for role, energy in zip("qk", energies, strict=True)
    ]


def _behind(out: Tensor, leaves: Mapping[int, Leaf]) -> tuple[list[Leaf], frozenset[int]]:
    """Projections that `out` is computed from, and the widths of the norms between."""
    found: list[Leaf] = []
    held: set[int] = set()
    todo, seen = [out.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in leaves:
            found.append(leaves[id(variable)])
        if type(node).__name__ == f"{Hold.__name__}Backward":
            held.add(node.width)  # type: ignore[attr-defined]
        todo += [following for following, _ in node.next_functions]
    return found, frozenset(held)


def _splits(out: Tensor, axis: int, leaves: list[Leaf]) -> bool:
    """Does this axis count heads? Then two places along it draw on different features; samples and tokens do not."""
    size = out.shape[axis]
    if size < 2:
        return False
    noise = _noise(out)
    first: Tensor | None = None
    for place in sorted({0, 1, size // 2, size - 1}):
        grads = _pull(out, _only(noise, [axis], (place,)), leaves)
        energies = [_per_feature(grad, leaf) for leaf, grad in grads]
        reached = torch.cat([e > PRESENT * max(float(e.max()), 1e-300) for e in energies]) if energies else None
        if reached is None or not reached.any():  # masked away: says nothing
            continue
        if first is None:
            first = reached
        elif int((first & reached).sum()) < 0.9 * int((first | reached).sum()):
            return True
    return False


def _pull(out: Tensor, cotangent: Tensor, leaves: list[Leaf]) -> list[tuple[Leaf, Tensor]]:
    """Gradient of `out` for each leaf, zeros where there is none."""
    grads = torch.autograd.grad(out, [x.tensor for x in leaves], cotangent, retain_graph=True, allow_unused=True)
    return [
        (x, torch.zeros_like(x.tensor) if g is None else g.nan_to_num()) for x, g in zip(leaves, grads, strict=True)
    ]


def _per_feature(grad: Tensor, leaf: Leaf) -> Tensor:
    return grad.double().movedim(leaf.feature_axis, -1).flatten(0, -2).square().sum(0).cpu()  # [features]


def _empty(leaves: list[Leaf]) -> dict[Key, Tensor]:
    return {(x.name, x.axis): torch.zeros(x.parameter.shape[x.axis], dtype=torch.float64) for x in leaves}  # [rows]


def _only(noise: Tensor, axes: Sequence[int], index: Sequence[int]) -> Tensor:
    """`noise` at one index of some axes, zero elsewhere."""
    place: list[int | slice] = [slice(None)] * noise.ndim
    for axis, i in zip(axes, index, strict=True):
        place[axis] = i
    kept = torch.zeros_like(noise)
    kept[tuple(place)] = noise[tuple(place)]
    return kept


def _fullest(attended: Tensor, heads: list[int], index: tuple[int, ...], axes: list[int]) -> dict[int, int]:
    """For one head, the sample and query that attend to most keys: {axis: index}."""
    fixed = dict(zip(heads, index, strict=True))
    free = [axis for axis in axes if axis not in fixed]
    view = attended
    for axis, i in fixed.items():
        view = view.narrow(axis, i, 1)
    flat = int(view.flatten().argmax())
    place = torch.unravel_index(torch.tensor(flat), view.shape)
    return {axis: fixed.get(axis, int(place[axis])) for axis in sorted([*fixed, *free])}


def _noise(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
