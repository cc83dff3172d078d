"""Match one attention module against the family table: its weights, number of heads and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from repulsive.errors import HeadLayoutError, UnsupportedWeights
from repulsive.heads.module_paths import INNER
from repulsive.heads.table.families import HEAD_DIM, NO_HEADS, Family
from repulsive.heads.table.known_families import known_families
from repulsive.heads.table.parse_layout import heads_along_axis, rows_of
from repulsive.heads.table.surveyed_classes import SURVEYED


@dataclass(frozen=True)
class Weight:
    """The weight of a projection; its dimension `axis` counts the output features."""

    module: nn.Module
    attribute: str
    path: str  # dotted, from the attention module
    axis: int

    @property
    def features(self) -> int:
        return int(self.tensor.shape[self.axis])

    @property
    def tensor(self) -> Tensor:
        tensor = getattr(self.module, self.attribute)
        assert isinstance(tensor, Tensor)
        return tensor


@dataclass(frozen=True)
class Match:
    """An attention module matched to a row of the family table, with the weight rows of each head.

    Args:
        family: the row of the table that matched.
        parts: part -> (weight, int64 rows [heads, features]); several weights if several adapters are active.
        serves: the kv head that each q head uses, if there are fewer kv heads than q heads, else None.
        proof: "table" if the table lists the class, "guess" if only names and shapes match.
    """

    family: Family
    parts: dict[str, list[tuple[Weight, Tensor]]]
    serves: tuple[int, ...] | None
    proof: str


def match(module: nn.Module) -> tuple[Match | None, str]:
    """Find the first row of the table that fits a module.

    Returns:
        The match and "", or None and the reason why no row fits ("" if the module does not look like attention).

    Raises:
        UnsupportedWeights: a row fits but a weight is quantised, parametrised or of an unknown adapter kind.
    """
    if any(name in module._modules for name in INNER):
        return None, ""  # a wrapper: the module inside it is matched on its own
    kinds = kinds_of(module)
    reason = next((NO_HEADS[kind] for kind in kinds if kind in NO_HEADS), "")
    if reason:
        return None, reason
    for family, proof in _candidates(module):
        targets = [(follow(module, path), layout) for path, layout in family.projections]
        if not all(_is_projection(target, family, layout) for target, layout in targets):
            continue
        heads = _number(module, family.heads)
        if heads is None:
            reason = (
                reason
                or f"has {family.name} but no attribute for the number of heads ({', '.join(family.heads[:4])}, ...)"
            )
            continue
        try:
            return _heads_of(module, family, heads, proof), ""
        except HeadLayoutError as error:
            reason = reason or str(error)
    return None, reason


def kinds_of(module: nn.Module) -> list[str]:
    """Return the names of a module's class and its base classes, the module's own class first."""
    names = [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    return [name.removeprefix("Parametrized") for name in names]  # torch renames the class of a parametrised module


def is_conv1d(module: object) -> bool:
    """Check for transformers' `Conv1D`, whose weight is [in, out]; FSDP2 makes a subclass of another name of it."""
    return isinstance(module, nn.Module) and "Conv1D" in kinds_of(module)


def _candidates(module: nn.Module) -> Iterator[tuple[Family, str]]:
    """Rows of the table with their proof: those of the class, then of its base classes, then signatures.

    For one class, rows of its own package come before rows of another package, whose class only has the same name.
    """
    families = known_families()
    named = [family for family in families if not family.generic]
    base = getattr(module, "base_layer", None)
    module = base if isinstance(base, nn.Module) else module  # an adapter has the heads of the layer it adapts
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    for kind, name in zip(kinds, kinds_of(module), strict=True):
        rows = [family for family in named if any(fnmatchcase(name, pattern) for pattern in family.classes)]
        for family in sorted(rows, key=lambda row: row.package != _package(kind)):
            exact = _package(kind) == family.package and _runs_as(module, kind)
            yield family, "table" if exact else "guess"
    for family in (family for family in families if family.generic):
        exact = any(_is_surveyed(kind, family) and _runs_as(module, kind) for kind in kinds)
        yield family, "table" if exact else "guess"


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Check that the module uses the forward of `kind`; a subclass or an instance may replace it."""
    wrapped_by_accelerate = hasattr(module, "_hf_hook")
    replaced = "forward" in vars(module) and not wrapped_by_accelerate
    processor = getattr(module, "processor", None)  # diffusers computes attention in an object that users may replace
    foreign = processor is not None and _package(type(processor)) != _package(kind)
    return type(module).forward is kind.forward and not replaced and not foreign


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_surveyed(kind: type[nn.Module], family: Family) -> bool:
    """Check whether a survey proved that this signature finds the heads of this class."""
    package, _, path = kind.__module__.partition(".")
    names = SURVEYED.get((package, family.name), ())
    return kind.__name__ in names or f"{path}.{kind.__name__}" in names


def weights_of(module: nn.Module, path: str) -> list[Weight]:
    """Find the trainable weights at an attribute path: the weight itself, or `lora_B` of each active LoRA adapter.

    Raises:
        UnsupportedWeights: the weight is quantised, parametrised or of another adapter kind.
    """
    target = follow(module, path)
    owner_path, _, attribute = path.rpartition(".")
    if isinstance(target, nn.Module):
        if adapters := _adapters(target, path):
            return adapters
        axis = 1 if is_conv1d(target) else 0
        return [_checked(target, "weight", f"{path}.weight", axis)]
    owner = follow(module, owner_path) if owner_path else module
    assert isinstance(owner, nn.Module)
    # An adapter may have the attributes of the layer it adapts, so look for adapters first.
    return _adapters(owner, owner_path) or [_checked(owner, attribute, path, 0)]


def follow(module: nn.Module, path: str) -> object:
    """Return `module.a.b` for the path "a.b"; None if an attribute is missing."""
    target: object = module
    for attribute in path.split("."):
        target = getattr(target, attribute, None)
    return target


def _heads_of(module: nn.Module, family: Family, heads: int, proof: str) -> Match:
    weights = [weights_of(module, path) for path, _ in family.projections]
    features = [ws[0].features for ws in weights]
    kv_heads = _kv_heads(module, family, heads, features)
    parts: dict[str, list[tuple[Weight, Tensor]]] = {}
    for (_, layout), projection in zip(family.projections, weights, strict=True):
        if family.generic and layout == "qkv head dim" and kv_heads != heads:
            layout = "q head dim | kv head dim"  # fewer k and v features than q features
        for weight in projection:
            if "in" in layout.split():
                axis, table = heads_along_axis(layout, weight.tensor.shape, heads, kv_heads)
                weight = replace(weight, axis=axis)
            else:
                table = rows_of(layout, weight.features, heads, kv_heads)
            for part, rows in table.items():
                parts.setdefault(part, []).append((weight, rows))
    if family.generic:
        _check_widths(module, family, heads, parts)
    serves = tuple(h * kv_heads // heads for h in range(heads)) if kv_heads != heads else None
    return Match(family, parts, serves, proof)


def _kv_heads(module: nn.Module, family: Family, heads: int, features: list[int]) -> int:
    """Find the number of key-value heads: the module's attribute if the shapes agree with it, else from the shapes."""
    layouts = [layout for _, layout in family.projections]
    declared = _number(module, family.kv_heads)
    if layouts[:2] not in (["q head dim", "k head dim"], ["q head dim", "kv head dim"]):
        kv_heads = declared or heads
    else:  # q k^T is a dot product, so q and k heads have the same width
        keys = features[1] / len(layouts[1].split()[0])
        kv_heads, rest = divmod(int(keys * heads), features[0])
        if declared is not None and features[0] * declared == keys * heads:
            kv_heads = declared
        elif rest or keys % 1:
            raise HeadLayoutError(f"{heads} q heads with {features[0]} features do not match {keys:g} k features")
    if kv_heads < 1 or heads % kv_heads:
        raise HeadLayoutError(f"{heads} query heads cannot share {kv_heads} key-value heads evenly")
    return kv_heads


def _check_widths(module: nn.Module, family: Family, heads: int, parts: dict[str, list[tuple[Weight, Tensor]]]) -> None:
    """Check a match by names and shapes: the head width must fit the module's attribute and the output projection."""
    width = parts["q"][0][1].shape[1]
    if width == 1 and _number(module, tuple(name for name in family.heads if name != "h")) is None:
        raise HeadLayoutError(f"{family.name}: h={heads} would make heads of one feature each; is h the width instead?")
    values = parts["v"][0][1].shape[1] if "v" in parts else width
    declared = _number(module, HEAD_DIM)
    if declared is not None and declared != width:
        raise HeadLayoutError(f"{family.name}: heads have {width} features by shape but {declared} by attribute")
    out = follow(module, family.out) if family.out else None
    taken = getattr(out, "in_features", None)
    if isinstance(taken, int) and taken != heads * values:
        raise HeadLayoutError(
            f"{family.name}: {heads} heads make {heads * values} features by shape, but {family.out} takes {taken}; "
            "are there fewer key-value heads?"
        )


def _is_projection(target: object, family: Family, layout: str) -> bool:
    if isinstance(target, nn.Module):
        weight = getattr(target, "weight", None)
        return hasattr(target, "lora_B") or hasattr(target, "base_layer") or isinstance(weight, Tensor)
    # In a listed class a tensor that is not a parameter is a parametrised weight; `_checked` raises for it.
    axes = 3 if "in" in layout.split() else 2
    return isinstance(target, Tensor if not family.generic else nn.Parameter) and target.ndim == axes


def _number(module: nn.Module, paths: tuple[str, ...]) -> int | None:
    for path in paths:
        value = follow(module, path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _adapters(layer: nn.Module, path: str) -> list[Weight]:
    """Find `lora_B` of each active LoRA adapter of a layer; [] if the layer has no adapter."""
    adapters = getattr(layer, "lora_B", None)
    if not isinstance(adapters, nn.ModuleDict) or not len(adapters):  # AdaLoRA has parameters there
        if hasattr(layer, "base_layer"):
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise UnsupportedWeights(
                f"{path or 'itself'}: {kind} is an adapter without modules lora_B; use LoRA (LoraConfig), which keeps "
                "heads as rows"
            )
        return []
    active = getattr(layer, "active_adapters", list(adapters))
    weights = [
        _checked(adapters[name], "weight", f"{path}.lora_B.{name}.weight".lstrip("."), 0)
        for name in active
        if name in adapters
    ]
    if not weights:
        raise UnsupportedWeights(f"{path}: none of the adapters {list(adapters)} is active; activate one or merge them")
    return weights


def _checked(module: nn.Module, attribute: str, path: str, axis: int) -> Weight:
    weight = getattr(module, attribute, None)
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedWeights(
            f"{path}: computed from other parameters (parametrised or weight-normed), so its rows cannot be written; "
            "remove the parametrisation first"
        )
    if is_lazy(weight):
        raise UnsupportedWeights(f"{path}: a lazy parameter without a shape; run the model once on an example first")
    if weight.ndim < 2:
        raise UnsupportedWeights(
            f"{path}: expected a matrix, got shape {list(weight.shape)}. FSDP1 flattens weights; use "
            "torch.distributed.fsdp.fully_shard (FSDP2) instead"
        )
    if not weight.is_floating_point():
        raise UnsupportedWeights(
            f"{path}: {weight.dtype} weights cannot be repelled; load the model without quantisation"
        )
    return Weight(module, attribute, path, axis)
