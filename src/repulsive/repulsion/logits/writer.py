"""Add forces to gradients, for whole and for sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from repulsive.heads.layout import HeadSlice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.repulsion.sharding.shard_layout import gradient_of, local_part


@dataclass(frozen=True)
class Written:
    """Rows of a parameter and the force on them.

    Args:
        slice: the rows.
        force: [M, rows, ...], added to the gradient; None for no force.
    """

    slice: HeadSlice
    force: Tensor | None


@dataclass
class _Parameter:
    """A parameter that a writer changes, with all of its slices.

    Args:
        slices: the slices.
        places: position of each slice in the writer's list.
        registry: the module's parameters, for a fast lookup; None if the tensor is not in it.
        is_whole: whether there is one slice, which covers the parameter.
        packed: force on the whole parameter, zero outside of the slices; unless `is_whole`.
        views: the rows of each slice in `packed`, [M, rows, ...]; None for rows without a regular stride.
        factor: share in the rows of the slices and 1 elsewhere; unless `is_whole`.
    """

    slices: list[HeadSlice]
    places: list[int]
    registry: dict[str, Tensor] | None = None
    is_whole: bool = False
    packed: Tensor | None = None
    views: list[Tensor | None] = field(default_factory=list)
    factor: Tensor | None = None

    def current(self) -> Tensor:
        first = self.slices[0]
        return first.parameter() if self.registry is None else self.registry[first.attribute]

    def gradient(self) -> Tensor | None:
        """Return the current gradient, or this rank's part of it; None if there is no gradient."""
        if self.current().grad is None:
            return None
        grad = gradient_of(self.slices[0])
        return grad.to_local() if is_sharded(grad) else grad


@dataclass
class _Kind:
    """Parameters whose gradients change in the same calls: by a scalar or a tensor factor, with or without a force."""

    parameters: list[_Parameter] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    forces: list[Tensor] = field(default_factory=list)
    slots: list[tuple[dict[str, Tensor], str]] | None = None  # lookups, if no parameter is sharded

    def gradients(self) -> list[Tensor | None]:
        if self.slots is None:
            return [parameter.gradient() for parameter in self.parameters]
        return [registry[name].grad for registry, name in self.slots]

    def trained_gradients(self) -> list[Tensor | None] | None:
        """Return the gradients; None if a parameter is sharded or frozen, or has no gradient."""
        if self.slots is None:
            return None
        parameters = [registry[name] for registry, name in self.slots]
        gradients = [parameter.grad for parameter in parameters]
        is_complete = all(parameter.requires_grad for parameter in parameters)
        return gradients if is_complete and not any(grad is None for grad in gradients) else None


class Writer:
    """Apply gradient <- share x gradient + force to the rows of many slices in a few calls.

    Args:
        slices: the rows.
        share: factor on the gradient of these rows.
    """

    def __init__(self, slices: Sequence[HeadSlice], share: float) -> None:
        self.share = share
        owners: dict[tuple[int, str], _Parameter] = {}
        for place, one in enumerate(slices):
            owner = owners.setdefault((id(one.module), one.attribute), _Parameter([], []))
            owner.slices.append(one)
            owner.places.append(place)
        self._parameters = list(owners.values())
        for owner in self._parameters:
            first = owner.slices[0]
            owner.is_whole = len(owner.slices) == 1 and first.is_whole
            kept: dict[str, Tensor] = first.module._parameters  # type: ignore[assignment]
            owner.registry = kept if first.attribute in kept else None
        self._factors: dict[tuple[object, ...], Tensor] = {}  # shared between equal parameters
        self._kinds: list[_Kind] = []

    def load(self, forces: Sequence[Tensor | None]) -> None:
        """Set the force on each slice, [M, rows, ...]; None for no force."""
        kinds: dict[tuple[bool, bool, bool], _Kind] = {}
        parameters = [owner.current() for owner in self._parameters]
        self._pack(forces, parameters)
        for owner, parameter in zip(self._parameters, parameters, strict=True):
            force, factor = self._force(owner, forces, parameter), self._factor(owner, parameter)
            is_slow = owner.registry is None
            if type(parameter) is not nn.Parameter and is_sharded(parameter):
                mesh, placements = parameter.device_mesh, tuple(parameter.placements)
                force, factor = (None if t is None else local_part(t, mesh, placements) for t in (force, factor))
                is_slow = True
            key = (factor is None, force is None, is_slow)
            if key not in kinds:
                kinds[key] = _Kind()
            kind = kinds[key]
            kind.parameters.append(owner)
            if factor is not None:
                kind.factors.append(factor)
            if force is not None:
                kind.forces.append(force)
        for (_, _, is_slow), kind in kinds.items():
            if not is_slow:
                kind.slots = [(one.registry or {}, one.slices[0].attribute) for one in kind.parameters]
        self._kinds = list(kinds.values())

    def trained_gradients(self) -> list[list[Tensor | None]] | None:
        """Return the current gradients for `write`; None if a parameter is sharded or frozen, or has no gradient."""
        gradients = []
        for kind in self._kinds:
            if (current := kind.trained_gradients()) is None:
                return None
            gradients.append(current)
        return gradients

    def write(self, scale: Tensor | None, gradients: Sequence[list[Tensor | None]] | None = None) -> None:
        """Change the current gradients; parameters without a gradient are skipped.

        Args:
            scale: loss scale that the gradients contain, or None.
            gradients: the result of `trained_gradients`, if it was called before.
        """
        gradients = [kind.gradients() for kind in self._kinds] if gradients is None else gradients
        for kind, current in zip(self._kinds, gradients, strict=True):
            factors, forces = kind.factors, kind.forces
            grads = [grad for grad in current if grad is not None]
            if len(grads) < len(current):
                if not grads:
                    continue
                factors, forces = (_where_not_none(some, current) for some in (factors, forces))
            if factors:
                torch._foreach_mul_(grads, factors)
            elif self.share != 1:
                torch._foreach_mul_(grads, self.share)
            if forces and scale is not None:
                forces = list(torch._foreach_mul(forces, scale.to(forces[0])))
            if forces:
                torch._foreach_add_(grads, forces)

    def _pack(self, forces: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> None:
        """Copy the forces on parts of parameters into whole tensors, in one call."""
        targets, sources = [], []
        for owner, parameter in zip(self._parameters, parameters, strict=True):
            if owner.is_whole or all(forces[place] is None for place in owner.places):
                continue
            if owner.packed is None or not _are_alike(owner.packed, parameter):
                owner.packed = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                owner.views = [part.view(owner.packed) for part in owner.slices]
            for part, place, view in zip(owner.slices, owner.places, owner.views, strict=True):
                force = forces[place]
                if view is None:
                    part.put(owner.packed, torch.zeros_like(part.take(owner.packed)) if force is None else force)
                elif force is None:
                    view.zero_()
                else:
                    targets.append(view)
                    sources.append(force if force.shape == view.shape else force.reshape(view.shape))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _force(self, owner: _Parameter, forces: Sequence[Tensor | None], parameter: Tensor) -> Tensor | None:
        """Return the force on a whole parameter."""
        if owner.is_whole:
            force = forces[owner.places[0]]
            if force is None:
                return None
            force = force.reshape(parameter.shape)
            return force if force.dtype == parameter.dtype else force.to(parameter.dtype)
        return None if all(forces[place] is None for place in owner.places) else owner.packed

    def _factor(self, owner: _Parameter, parameter: Tensor) -> Tensor | None:
        """Return a tensor with the share in rows of heads and 1 in other rows; None if it is the same in all rows."""
        if owner.is_whole or self.share == 1:
            return None
        if owner.factor is None or not _are_alike(owner.factor, parameter):
            rows = [(one.axis, tuple(one.rows.flatten().tolist())) for one in owner.slices]
            key = (*rows, parameter.shape, parameter.dtype, parameter.device)
            if key not in self._factors:
                factor = torch.ones(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                for one in owner.slices:
                    one.put(factor, torch.full_like(one.take(factor), self.share))
                self._factors[key] = factor
            owner.factor = self._factors[key]
        return owner.factor


def _are_alike(tensor: Tensor, parameter: Tensor) -> bool:
    is_same_kind = tensor.dtype == parameter.dtype and tensor.device == parameter.device
    return is_same_kind and tensor.shape == parameter.shape


def _where_not_none(tensors: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    if not tensors:
        return tensors
    return [tensor for tensor, grad in zip(tensors, gradients, strict=True) if grad is not None]
