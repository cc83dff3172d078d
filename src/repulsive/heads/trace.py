"""Trace heads by autograd: which features of which projection feed each head of each attention call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from repulsive.heads.intercept import Call, Intercept, Leaf
from repulsive.heads.norms import Hold
from repulsive.heads.place import clean

Key = tuple[str, int]  # a parameter's dotted name and the axis that counts its output features
PRESENT = 1e-12  # share of the largest squared gradient below which a feature is not reached


@dataclass(frozen=True, eq=False)
class Reach:
    """What one role (q, k, v) of one attention call draws from the projections behind it.

    Args:
        role: "q", "k" or "v"; "any" where a call does not tell them apart (graph convolutions).
        owner: dotted name of the module that made the call.
        energy: per parameter, squared gradient [indices, rows], float64; an index is one head of the call, or one
            (sample, head) pair where the model merges them.
        held: widths of the norms whose statistics were held constant on the way.
    """

    role: str
    owner: str
    energy: dict[Key, Tensor]
    held: frozenset[int]


def trace(model: nn.Module, example_inputs: object) -> list[list[Reach]]:
    """Run one forward pass and follow every head back to its projections.

    Args:
        model: the unwrapped model. Its parameters, gradients, training flags and random state stay as they are.
        example_inputs: a tensor, a tuple of arguments or a mapping of keyword arguments.

    Returns:
        For each attention call, in order, the reach of its roles. With a single token q and k get no gradient.
    """
    args, kwargs = _arguments(example_inputs)
    parameters = [(clean(name), p) for name, p in model.named_parameters()]
    watch = Intercept(parameters)
    with torch.inference_mode(False), torch.enable_grad():
        with _evaluating(model), _named(model, watch), _eager(model), watch:
            model(*args, **kwargs)
        reaches = [_reaches(call, watch.leaves) for call in watch.calls]
    return [found for found in reaches if found]


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
    energy = _empty(behind, heads, out)
    noise = _noise(out)
    for i, index in enumerate(_indices(out, heads)):
        for leaf, grad in _pull(out, _only(noise, heads, index), behind):
            energy[leaf.name, leaf.axis][i, leaf.rows] += _per_feature(grad, leaf)
    return [Reach(role, owner, _nonzero(energy), held)]


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
    energy = {role: _empty(behind, heads, scores) for role in "qk"}
    noise = _noise(scores)
    for i, index in enumerate(_indices(scores, heads)):
        row = _fullest(attended.unsqueeze(call.dim), heads, index, axes)
        count = int(attended.unsqueeze(call.dim)[tuple(row.get(a, 0) for a in range(scores.ndim))])
        for leaf, grad in _pull(scores, _only(noise, list(row), tuple(row.values())), behind):
            energies = grad.square().sum(leaf.inner, keepdim=True) if leaf.inner else grad.square()
            positions = energies.movedim(leaf.feature_axis, -1).flatten(0, -2)  # [positions, features]
            touched = (positions > PRESENT * positions.max(0).values).sum(0)  # [features]
            local = 2 * touched <= count
            total = _per_feature(grad, leaf)
            for role, mine in (("q", local), ("k", ~local)):
                energy[role][leaf.name, leaf.axis][i, leaf.rows] += torch.where(mine.cpu(), total, 0.0)
    return [Reach(role, call.owner, _nonzero(energy[role]), held) for role in "qk"]


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


def _empty(leaves: list[Leaf], heads: list[int], out: Tensor) -> dict[Key, Tensor]:
    count = len(list(_indices(out, heads)))
    return {
        (x.name, x.axis): torch.zeros(count, x.parameter.shape[x.axis], dtype=torch.float64) for x in leaves
    }  # [indices, rows]


def _nonzero(energy: dict[Key, Tensor]) -> dict[Key, Tensor]:
    return {key: e for key, e in energy.items() if e.any()}


def _indices(out: Tensor, axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return product(*(range(out.shape[axis]) for axis in axes))


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


def _arguments(example: object) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    return (tuple(example), {}) if isinstance(example, list | tuple) else ((example,), {})


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with _forked(model):
            yield
    finally:
        for module, flag in training:
            module.training = flag


@contextmanager
def _forked(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
        yield


@contextmanager
def _named(model: nn.Module, watch: Intercept) -> Iterator[None]:
    """Keep `watch.modules` the list of modules being run."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            title = clean(name)

            def enter(_module: nn.Module, _args: object, title: str = title) -> None:
                watch.modules.append(title)

            def leave(_module: nn.Module, _args: object, _out: object) -> None:
                watch.modules.pop()

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
            register = getattr(module, "register_propagate_forward_hook", None)
            if register is not None:
                hooks.callback(register(lambda _m, _i, out: watch.graph_output(out)).remove)
        yield


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Compiled submodules run as written."""
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
