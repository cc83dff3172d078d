"""Groups of particles that are not attention heads: experts of a mixture, members of an ensemble, adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from repulsive.errors import SelectionError, UnsupportedWeights, did_you_mean, list_first
from repulsive.heads.layout import HeadGroup, HeadSlice, consecutive_rows
from repulsive.heads.module_paths import check_model, clean, dotted, unwrap
from repulsive.heads.sharded_tensors import is_sharded

ModuleParticle = Literal["parameter", "module"]


def group_modules(
    modules: Sequence[nn.Module],
    part: str = "expert",
    name: str | None = None,
    parameters: str | Sequence[str] | None = None,
    particle: ModuleParticle = "parameter",
) -> list[HeadGroup]:
    """Group modules of equal shape, so that `repel(model, optimizer, groups=...)` makes them repel each other.

    Particle i is module i. A module without a gradient in a step, such as an expert that got no token, stays where it
    is in that step; the others are repelled from it. A step in which no module has a gradient counts as skipped.

    Args:
        modules: M modules with parameters of equal names, shapes and types.
        part: what a module is, for reports: "expert", "member", "adapter", ...
        name: prefix of the names of groups, `part` by default; needed if there are several such lists in a model.
        parameters: names or patterns of parameters within a module, such as "weight" or "*.lora_A.weight". By default
            all with at least two dimensions: biases and norms often start equal, and equal particles exert no force.
        particle: "parameter" makes one group for each parameter; "module" joins them into one vector per module.

    Returns:
        One group per parameter, or a single one.

    Raises:
        SelectionError: `modules` is not a sequence of at least two modules, one is given twice, they share weights,
            their parameters differ in name, shape or type, or `parameters` or `particle` is unknown.
        UnsupportedWeights: a parameter is a scalar or is not initialised yet.

    Example:
        >>> experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(8))
        >>> [(g.name, g.num_heads, g.dim) for g in group_modules(experts, part="expert")]
        [('expert.weight', 8, 12)]
    """
    members = [unwrap(module) for module in _checked_modules(modules)]
    if len(members) < 2:
        raise SelectionError(f"group_modules: expected at least two modules, got {len(members)}")
    _check_distinct(members, part)
    named = [{clean(key): value for key, value in member.named_parameters()} for member in members]
    _check_alike(named, part)
    chosen = _choose(named[0], parameters, f"{part} ({type(members[0]).__name__})")
    _check_untied([{key: tensors[key] for key in chosen} for tensors in named], part)

    def runs(key: str) -> tuple[HeadSlice, ...]:
        return tuple(_whole_slice(member, key, f"{part}.{index}.{key}") for index, member in enumerate(members))

    return _groups({key: runs(key) for key in chosen}, part, name, particle, "modules", len(members))


def group_stacked(
    module: nn.Module,
    parameters: str | Sequence[str],
    axis: int = 0,
    part: str = "expert",
    name: str | None = None,
    particle: ModuleParticle = "parameter",
) -> list[HeadGroup]:
    """Group particles that are stacked in one parameter, such as experts in a weight [E, out, in].

    All particles share one gradient tensor: an expert that got no token has gradient zero, and is repelled.

    Args:
        module: the module that owns the parameters, or contains their owner.
        parameters: names or patterns of parameters within it, such as "gate_up_proj" or "experts.*_proj".
        axis: the dimension that counts particles.
        part: what a particle is, for reports.
        name: prefix of the names of groups, `part` by default; needed for each of several layers.
        particle: "parameter" makes one group for each parameter; "module" joins them into one vector per particle.

    Returns:
        One group per parameter, or a single one.

    Raises:
        SelectionError: a name is unknown, the dimension does not exist or counts fewer than two particles, or joined
            parameters count different numbers of them.

    Example:
        >>> layer = nn.Module()
        >>> layer.gate = nn.Parameter(torch.randn(8, 5, 4))
        >>> [(g.name, g.num_heads, g.dim) for g in group_stacked(layer, "gate")]
        [('expert.gate', 8, 20)]
    """
    check_model(module)
    inner = unwrap(module)
    tensors = {clean(key): value for key, value in inner.named_parameters()}
    slices: dict[str, tuple[HeadSlice, ...]] = {}
    for key in _choose(tensors, parameters, type(inner).__name__):
        shape = list(tensors[key].shape)
        if not -len(shape) <= axis < len(shape):
            raise SelectionError(f"{key}: axis={axis} does not exist; the shape is {shape}")
        dim = axis % len(shape)
        if shape[dim] < 2:
            raise SelectionError(f"{key}: expected at least two particles along axis {axis}, got shape {shape}")
        owner, attribute = _owner(inner, key)
        rows = consecutive_rows(shape[dim])  # [M, 1]
        slices[key] = (HeadSlice(owner, attribute, dotted(name or "", key), rows, dim),)
    counts = {key: run[0].num_heads for key, run in slices.items()}
    if particle == "module" and len(set(counts.values())) > 1:
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        raise SelectionError(f"particle='module' needs parameters with the same number of particles, got {listed}")
    return _groups(slices, part, name, particle, "stacked", 1)


def _checked_modules(modules: object) -> list[nn.Module]:
    if isinstance(modules, nn.ModuleDict):
        raise SelectionError("group_modules: expected a sequence of modules, got an nn.ModuleDict; pass its values()")
    if not isinstance(modules, Iterable):
        raise SelectionError(f"group_modules: expected a sequence of modules, got one {type(modules).__name__}")
    members = list(modules)
    if wrong := [type(one).__name__ for one in members if not isinstance(one, nn.Module)]:
        raise SelectionError(f"group_modules: expected a sequence of modules, got one with a {wrong[0]} in it")
    return members


def _groups(
    runs: dict[str, tuple[HeadSlice, ...]], part: str, name: str | None, particle: str, family: str, modules: int
) -> list[HeadGroup]:
    if particle not in get_args(ModuleParticle):
        hint = did_you_mean(particle, get_args(ModuleParticle))
        raise SelectionError(f"particle={particle!r} is unknown; {hint}use 'parameter' or 'module'")
    prefix = name or part
    slices = {f"{prefix}.{key}": run for key, run in runs.items()}
    if particle == "module":
        slices = {prefix: tuple(one for run in runs.values() for one in run)}
    return [HeadGroup(key, 0, part, "-", prefix, family, run, modules=modules) for key, run in slices.items()]


def _choose(tensors: Mapping[str, Tensor], parameters: str | Sequence[str] | None, owner: str) -> list[str]:
    """Names of the chosen parameters, in the order of the module."""
    known = list_first(list(tensors), 6)
    if parameters is None:
        chosen = [key for key, tensor in tensors.items() if tensor.ndim >= 2]
        if not chosen:
            raise SelectionError(
                f"{owner} has no parameter with at least two dimensions; choose among {known} by parameters="
            )
        return chosen
    patterns = [parameters] if isinstance(parameters, str) else list(parameters)
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in tensors):
            hint = did_you_mean(pattern, tensors)
            raise SelectionError(f"parameters={pattern!r} match nothing in {owner}; {hint}it has {known}")
    if not patterns:
        raise SelectionError(f"parameters is empty; leave it out, or choose among {known}")
    return [key for key in tensors if any(fnmatchcase(key, pattern) for pattern in patterns)]


def _check_distinct(members: Sequence[nn.Module], part: str) -> None:
    first: dict[int, int] = {}
    for index, member in enumerate(members):
        if (other := first.setdefault(id(member), index)) != index:
            raise SelectionError(f"{part} {other} and {part} {index} are the same module; give each module once")


def _check_alike(named: Sequence[Mapping[str, Tensor]], part: str) -> None:
    """Check that all modules have parameters of equal names, shapes and types."""
    facts: list[tuple[str, Callable[[Tensor], object]]] = [
        ("shape", lambda tensor: list(tensor.shape)),
        ("type", lambda tensor: tensor.dtype),
    ]
    for key, tensor in named[0].items():
        if is_lazy(tensor):
            raise UnsupportedWeights(f"{part} 0: {key} is not initialised yet; run the model once before")
    for index, tensors in enumerate(named[1:], start=1):
        if odd := sorted(set(tensors) ^ set(named[0])):
            raise SelectionError(f"{part} 0 and {part} {index} have different parameters: {', '.join(odd[:4])}")
        for key, tensor in named[0].items():
            for fact, of in facts:
                if of(tensor) != of(tensors[key]):
                    raise SelectionError(
                        f"{part} 0 and {part} {index} differ in the {fact} of {key}: {of(tensor)} and "
                        f"{of(tensors[key])}; particles of one group must be equal in it"
                    )


def _check_untied(named: Sequence[Mapping[str, Tensor]], part: str) -> None:
    """Check that no two modules share a tensor or its memory."""
    first: dict[int, int] = {}
    for index, tensors in enumerate(named):
        for key, tensor in tensors.items():
            if (other := first.setdefault(_identity(tensor), index)) != index:
                raise SelectionError(
                    f"{part} {other} and {part} {index} share the weights of {key}, which cannot be repelled from "
                    "themselves; untie them, or leave this parameter out by parameters="
                )


def _identity(tensor: Tensor) -> int:
    """The address of a tensor's values; of the tensor object if it has none (sharded, or on the meta device)."""
    has_address = not is_sharded(tensor) and tensor.device.type != "meta" and tensor.numel()
    return (tensor.data_ptr() if has_address else 0) or id(tensor)


def _owner(module: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The submodule that owns a parameter, and the parameter's name on it."""
    names = {clean(path): path for path, _ in module.named_parameters()}
    path, _, attribute = names[key].rpartition(".")
    return module.get_submodule(path), attribute


def _whole_slice(module: nn.Module, key: str, shown: str) -> HeadSlice:
    """One head: the whole parameter."""
    owner, attribute = _owner(module, key)
    parameter = getattr(owner, attribute)
    if not parameter.ndim:
        raise UnsupportedWeights(f"{shown}: is a scalar; leave it out by parameters=")
    return HeadSlice(owner, attribute, shown, torch.arange(parameter.shape[0], device="cpu").unsqueeze(0))
