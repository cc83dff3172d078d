"""One attention module against the family table: which weights, how many heads, which rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from repulsive.errors import HeadLayoutError, UnsupportedWeights
from repulsive.heads.place import INNER
from repulsive.heads.table.families import FAMILIES, HEAD_DIM, NO_HEADS, Family
from repulsive.heads.table.rows import rows_of
from repulsive.heads.table.surveyed import SURVEYED


@dataclass(frozen=True)
class Weight:
    """A parameter that counts a projection's output features along `axis`."""

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
    """An attention module with its heads spelt out.

    Args:
        family: the line of the table.
        parts: part -> (weight, int64 rows [heads, features]); several weights where several adapters are active.
        serves: the kv head of each q head where there are fewer kv heads, else None.
        proof: "table" for an exact class of the table, "guess" where only names and shapes match.
    """

    family: Family
    parts: dict[str, list[tuple[Weight, Tensor]]]
    serves: tuple[int, ...] | None
    proof: str


def match(module: nn.Module) -> tuple[Match | None, str]:
    """The first line of the table that fits, and otherwise why none did ("" where nothing looks like attention).

    Raises:
        UnsupportedWeights: a line fits but a weight is quantised, parametrised or of an unknown adapter kind.
    """
    if any(name in module._modules for name in INNER):
        return None, ""  # it answers for the attributes of what it wraps, which is looked at itself
    kinds = kinds_of(module)
    reason = next((NO_HEADS[kind] for kind in kinds if kind in NO_HEADS), "")
    if reason:
        return None, reason
    for family, proof in _fitting(module):
        targets = [follow(module, path) for path, _ in family.projections]
        if not all(_is_projection(target, family) for target in targets):
            continue
        heads = _number(module, family.heads)
        if heads is None:
            reason = reason or f"has {family.name} but no number of heads ({', '.join(family.heads[:4])}, ...)"
            continue
        try:
            return _spell(module, family, heads, proof), ""
        except HeadLayoutError as error:
            reason = reason or str(error)
    return None, reason


def kinds_of(module: nn.Module) -> list[str]:
    """Names of a module's class and of those it is made from, its own first."""
    names = [kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    return [name.removeprefix("Parametrized") for name in names]  # as torch's parametrisations rename a class


def _fitting(module: nn.Module) -> Iterator[tuple[Family, str]]:
    """Lines of the table with their proof: the class's own before those it inherits from, and signatures last."""
    known = [family for family in FAMILIES if not family.generic]
    base = getattr(module, "base_layer", None)
    module = base if isinstance(base, nn.Module) else module  # an adapter computes with the heads of what it adapts
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    for kind, name in zip(kinds, kinds_of(module), strict=True):
        for family in known:
            if any(fnmatchcase(name, pattern) for pattern in family.classes):
                exact = _package(kind) == family.package and _runs_as(module, kind)
                yield family, "table" if exact else "guess"
    for family in (family for family in FAMILIES if family.generic):
        exact = any(_is_surveyed(kind, family) and _runs_as(module, kind) for kind in kinds)
        yield family, "table" if exact else "guess"


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Does the module compute what `kind` computes? A subclass or an instance with its own forward may not."""
    replaced = "forward" in vars(module) and not hasattr(module, "_hf_hook")  # Accelerate wraps it, and says so
    processor = getattr(module, "processor", None)  # diffusers computes attention in an object that users replace
    foreign = processor is not None and _package(type(processor)) != _package(kind)
    return type(module).forward is kind.forward and not replaced and not foreign


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_surveyed(kind: type[nn.Module], family: Family) -> bool:
    """Was this class, in its own package, built, run and proved with this signature?"""
    package, _, path = kind.__module__.partition(".")
    names = SURVEYED.get((package, family.name), ())
    return kind.__name__ in names or f"{path}.{kind.__name__}" in names


def weights_of(module: nn.Module, path: str) -> list[Weight]:
    """The trainable weights behind an attribute path: the weight itself, or the rows of each active LoRA adapter.

    Raises:
        UnsupportedWeights: the weight is quantised, parametrised or of another adapter kind.
    """
    target = follow(module, path)
    owner_path, _, attribute = path.rpartition(".")
    if isinstance(target, nn.Module):
        if adapters := _adapters(target, path):
            return adapters
        axis = 1 if type(target).__name__ == "Conv1D" else 0
        return [_checked(target, "weight", f"{path}.weight", axis)]
    owner = follow(module, owner_path) if owner_path else module
    assert isinstance(owner, nn.Module)
    return _adapters(owner, owner_path) or [_checked(owner, attribute, path, 0)]  # some are called what they adapt


def follow(module: nn.Module, path: str) -> object:
    """`module.a.b` for "a.b", None where an attribute is missing."""
    target: object = module
    for attribute in path.split("."):
        target = getattr(target, attribute, None)
    return target


def _spell(module: nn.Module, family: Family, heads: int, proof: str) -> Match:
    weights = [weights_of(module, path) for path, _ in family.projections]
    features = [ws[0].features for ws in weights]
    kv_heads = _kv_heads(module, family, heads, features)
    parts: dict[str, list[tuple[Weight, Tensor]]] = {}
    for (_, layout), projection in zip(family.projections, weights, strict=True):
        if family.generic and layout == "qkv head dim" and kv_heads != heads:
            layout = "q head dim | kv head dim"  # there is less of k and v than of q
        for weight in projection:
            for part, rows in rows_of(layout, weight.features, heads, kv_heads).items():
                parts.setdefault(part, []).append((weight, rows))
    if family.generic:
        _check_widths(module, family, heads, parts)
    serves = tuple(h * kv_heads // heads for h in range(heads)) if kv_heads != heads else None
    return Match(family, parts, serves, proof)


def _kv_heads(module: nn.Module, family: Family, heads: int, features: list[int]) -> int:
    """Key-value heads: what the module declares where the shapes agree, else what the shapes say."""
    layouts = [layout for _, layout in family.projections]
    declared = _number(module, family.kv_heads)
    if layouts[:2] not in (["q head dim", "k head dim"], ["q head dim", "kv head dim"]):
        kv_heads = declared or heads
    else:  # q and k meet in a dot product, so their heads are equally wide
        keys = features[1] / len(layouts[1].split()[0])
        kv_heads, rest = divmod(int(keys * heads), features[0])
        if declared is not None and features[0] * declared == keys * heads:
            kv_heads = declared
        elif rest or keys % 1:
            raise HeadLayoutError(f"{heads} q heads over {features[0]} features do not fit {keys:g} k features")
    if kv_heads < 1 or heads % kv_heads:
        raise HeadLayoutError(f"{heads} query heads do not share {kv_heads} key-value heads evenly")
    return kv_heads


def _check_widths(module: nn.Module, family: Family, heads: int, parts: dict[str, list[tuple[Weight, Tensor]]]) -> None:
    """A signature is only a guess: shapes must give the head width that is declared, and what the output takes."""
    width = parts["q"][0][1].shape[1]
    if width == 1 and _number(module, tuple(name for name in family.heads if name != "h")) is None:
        raise HeadLayoutError(f"{family.name}: h={heads} would be heads of one number each; is h the width instead?")
    values = parts["v"][0][1].shape[1] if "v" in parts else width
    declared = _number(module, HEAD_DIM)
    if declared is not None and declared != width:
        raise HeadLayoutError(f"{family.name}: heads are {width} wide by shape but {declared} by attribute")
    out = follow(module, family.out) if family.out else None
    taken = getattr(out, "in_features", None)
    if isinstance(taken, int) and taken != heads * values:
        raise HeadLayoutError(
            f"{family.name}: {heads} heads give {heads * values} features by shape, and {family.out} takes {taken}; "
            "are there fewer key-value heads?"
        )


def _is_projection(target: object, family: Family) -> bool:
    if isinstance(target, nn.Module):
        weight = getattr(target, "weight", None)
        return hasattr(target, "lora_B") or hasattr(target, "base_layer") or isinstance(weight, Tensor)
    # In a known class a tensor that is no parameter is a weight computed from others: `_checked` says so.
    return isinstance(target, Tensor if not family.generic else nn.Parameter) and target.ndim == 2


def _number(module: nn.Module, paths: tuple[str, ...]) -> int | None:
    for path in paths:
        value = follow(module, path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _adapters(layer: nn.Module, path: str) -> list[Weight]:
    """The rows of a layer's active LoRA adapters; none where it has no adapter at all."""
    adapters: nn.ModuleDict = getattr(layer, "lora_B", None) or nn.ModuleDict()
    if not len(adapters):
        if hasattr(layer, "base_layer"):
            told = f"{path or 'itself'}: {type(layer).__name__} is an adapter without lora_B"
            raise UnsupportedWeights(f"{told}; only LoRA adapters keep heads as rows")
        return []
    active = getattr(layer, "active_adapters", list(adapters))
    found = [
        _checked(adapters[name], "weight", f"{path}.lora_B.{name}.weight".lstrip("."), 0)
        for name in active
        if name in adapters
    ]
    if not found:
        raise UnsupportedWeights(f"{path}: none of the adapters {list(adapters)} is active; activate one or merge them")
    return found


def _checked(module: nn.Module, attribute: str, path: str, axis: int) -> Weight:
    weight = getattr(module, attribute, None)
    if not isinstance(weight, nn.Parameter):
        raise UnsupportedWeights(
            f"{path}: computed from other parameters (parametrised or weight-normed), so it has no rows to write; "
            "remove the parametrisation first"
        )
    if is_lazy(weight):
        raise UnsupportedWeights(f"{path}: has no shape yet; run the model once on an example first")
    if weight.ndim < 2:
        raise UnsupportedWeights(
            f"{path}: has the shape {tuple(weight.shape)}, in which heads have no rows; FSDP1 flattens weights so, "
            "torch.distributed.fsdp.fully_shard (FSDP2) does not"
        )
    if not weight.is_floating_point():
        raise UnsupportedWeights(f"{path}: {weight.dtype} weights cannot be repelled; load the model unquantised")
    return Weight(module, attribute, path, axis)
