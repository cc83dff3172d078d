"""Find the projections that form the attention logits of a model, and the parameters that receive the force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from repulsive.errors import RuleError
from repulsive.heads.after_projection import added_bias, clip_limit, norm_between, own_bias, unknown_change
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import clean, module_of, unwrap
from repulsive.heads.products.per_head_weights import PerHeadSlice
from repulsive.heads.sharded_tensors import is_sharded
from repulsive.heads.token_order import projects_time_first
from repulsive.repulsion.logits.projections import LogitLayer, Projection, Target

# Weights of an `nn.MultiheadAttention` with kdim or vdim, in the order of their shares of `in_proj_bias`.
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def logit_layers(model: nn.Module, groups: Sequence[HeadGroup]) -> list[LogitLayer]:
    """Pair the q and k groups of every attention layer.

    Args:
        model: the model the groups were found in.
        groups: groups with one part (q or k) each, as returned by `find_heads`.

    Raises:
        RuleError: a layer has no q or no k, or its logits are not a dot product of two linear projections.
    """
    modules = {clean(name): module for name, module in unwrap(model).named_modules()}
    layers: dict[str, dict[str, HeadGroup]] = {}
    for group in groups:
        layers.setdefault(module_of(group), {})[group.part] = group
    pairs, refused = [], []
    for name, parts in layers.items():
        if set(parts) & {"q", "k"} != {"q", "k"}:
            refused.append(f"{name or '(the model itself)'} ({type(modules.get(name)).__name__})")
            continue
        pairs.append(_layer(name, parts, modules))
    if refused:
        raise RuleError(
            f"space='logits' needs a query and a key projection in every selected layer; missing in {refused[0]}"
            + (f" and {len(refused) - 1} more" if len(refused) > 1 else "")
            + ". Attention without q and k (additive, graph) has no such logits: choose space='sphere', or select "
            "other layers with match=..."
        )
    return pairs


def _layer(name: str, parts: dict[str, HeadGroup], modules: dict[str, nn.Module]) -> LogitLayer:
    query, key = parts["q"], parts["k"]
    attention = modules.get(name)
    if attention is None:
        raise RuleError(
            f"{query.name}: space='logits' found no module {name!r} in the model; pass the model that has these heads"
        )
    widths = query.head_dim, key.head_dim
    width = min(widths)
    content = getattr(attention, "qk_nope_head_dim", None)  # latent attention: other q features encode positions
    if widths[0] != widths[1] and width != content:
        raise RuleError(
            f"{query.name}: expected queries and keys of equal width, got {widths[0]} and {widths[1]}; choose "
            "space='sphere' for this layer"
        )
    reads = reads_of(query, key)
    left, right = (projection_of(group, width, attention, modules) for group in (query, key))
    return LogitLayer(name, attention, query.where, left, right, reads)


def reads_of(query: HeadGroup, key: HeadGroup) -> tuple[int, ...] | None:
    """Find the key-value head of each query head; None if each query head has its own.

    Raises:
        RuleError: the query heads cannot share the key-value heads evenly.
    """
    if query.num_heads == key.num_heads:
        return None
    if query.serves is not None:
        return query.serves
    shared, rest = divmod(query.num_heads, key.num_heads)
    if rest:
        raise RuleError(f"{query.name}: {query.num_heads} query heads cannot share {key.num_heads} key heads evenly")
    return tuple(head // shared for head in range(query.num_heads))


def projection_of(group: HeadGroup, width: int, attention: nn.Module, modules: dict[str, nn.Module]) -> Projection:
    """Find the module and the parameters that project tokens for one group of heads.

    Args:
        group: heads of one part (q, k or v).
        width: number of features of a head that enter the dot product.
        attention: the attention module.
        modules: all modules of the model by dotted name.

    Raises:
        RuleError: the projection is not a single matrix applied to tokens.
    """
    part = group.slices[0]
    is_parameter = part.feature_axis is not None and part.module is attention
    if len(part.parameter().shape) != 2 and not is_parameter:
        raise RuleError(
            f"{part.parameter_name}: space='logits' needs a weight matrix, got shape {list(part.parameter().shape)}; "
            "choose space='sphere' for this layer"
        )
    refuse_tensor_parallel(part)
    if (change := unknown_change(attention, group)) is not None:
        raise RuleError(
            f"{group.name}: {type(attention).__name__} {change}, which space='logits' does not support; exclude the "
            "layer with match=..., or choose space='sphere'"
        )
    added = added_bias(attention, group)
    changes = added, norm_between(attention, group.part), clip_limit(attention), projects_time_first(attention)
    more = (Target(added, is_bias=True),) if added is not None and added.parameter().requires_grad else ()
    adapted = _adapted(part, modules)
    if adapted is not None:
        _refuse_other_adapters(group, adapted)
        factors = [float(adapted.scaling[_adapter(s)]) for s in group.slices]  # type: ignore[index]
        targets = tuple(Target(s, factor) for s, factor in zip(group.slices, factors, strict=True))
        return Projection(group, adapted, (*targets, *more), width, *changes)
    if len(group.slices) > 1:
        count = len(group.slices)
        raise RuleError(
            f"{group.name}: space='logits' needs one weight per projection, got {count}; choose space='sphere'"
        )
    if is_parameter:
        return _parameter_projection(group, more, width, changes)
    targets = (Target(part), *_bias(part), *more)
    return Projection(group, part.module, targets, width, *changes)


def _parameter_projection(
    group: HeadGroup,
    more: tuple[Target, ...],
    width: int,
    changes: tuple[HeadSlice | None, nn.Module | None, float | None, bool],
) -> Projection:
    """Build the projection by a weight in einsum notation."""
    part = group.slices[0]
    if is_sharded(part.parameter()):
        raise RuleError(
            f"{part.parameter_name}: space='logits' does not support sharded weights in einsum notation; train without "
            "sharding, or choose space='sphere'"
        )
    weight, bias = PerHeadSlice.of(part), own_bias(part)
    trained = (Target(bias, is_bias=True),) if bias is not None and bias.parameter().requires_grad else ()
    targets = (Target(weight), *trained, *more)
    return Projection(replace(group, slices=(weight,)), part.module, targets, width, *changes, bias=bias)


def _bias(part: HeadSlice) -> list[Target]:
    attribute = part.attribute.replace("weight", "bias") if "weight" in part.attribute else "bias"
    if isinstance(part.module, nn.MultiheadAttention):
        attribute = "in_proj_bias"
    bias = getattr(part.module, attribute, None)
    if not isinstance(bias, nn.Parameter) or not bias.requires_grad or bias.ndim != 1:
        return []
    rows = part.rows
    if isinstance(part.module, nn.MultiheadAttention) and part.attribute != "in_proj_weight":
        rows = rows + part.module.embed_dim * _SEPARATE.index(part.attribute)
    owner = part.parameter_name.rpartition(".")[0]
    return [Target(HeadSlice(part.module, attribute, f"{owner}.{attribute}".lstrip("."), rows), is_bias=True)]


def _adapted(part: HeadSlice, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Find the layer that a LoRA adapter belongs to; None for an ordinary weight."""
    owner, mark, _ = part.parameter_name.rpartition(".lora_B.")
    if not mark:
        return None
    for name, module in modules.items():
        if hasattr(module, "lora_B") and clean(name).endswith(owner) and part.module in set(module.lora_B.children()):  # type: ignore[union-attr]
            return module
    raise RuleError(f"{part.parameter_name}: space='logits' found no layer for this adapter; choose space='sphere'")


def _refuse_other_adapters(group: HeadGroup, adapted: nn.Module) -> None:
    """Raise an error for adapters that do more than add the product of two matrices to the output of a projection."""
    if isinstance(getattr(adapted, "base_layer", None), nn.MultiheadAttention):
        raise RuleError(
            f"{group.name}: space='logits' does not support LoRA on nn.MultiheadAttention, which has no projection "
            "modules; choose space='sphere'"
        )
    for part in group.slices:
        name = _adapter(part)
        variant = getattr(adapted, "lora_variant", {}).get(name)
        if variant is not None or getattr(adapted, "use_dora", {}).get(name, False):
            kind = "DoRA" if getattr(adapted, "use_dora", {}).get(name, False) else type(variant).__name__
            raise RuleError(
                f"{group.name}: the adapter {name!r} is a variant of LoRA ({kind}), which space='logits' does not "
                "support; train plain LoRA, or choose space='sphere'"
            )


def _adapter(part: HeadSlice) -> str:
    return part.parameter_name.rpartition(".lora_B.")[2].removesuffix(".weight")


def refuse_tensor_parallel(part: HeadSlice) -> None:
    """Raise an error if a module computes only a share of its output features on each rank.

    Raises:
        RuleError: the module is tensor parallel.
    """
    if is_sharded(part.parameter()) and getattr(part.module, "_distribute_module_applied", False):
        raise tensor_parallel_error(part.parameter_name)


def tensor_parallel_error(name: str) -> RuleError:
    """Build the error for a projection that is split over ranks."""
    return RuleError(
        f"{name}: space='logits' does not support tensor parallelism, because it needs the queries and keys of all "
        "heads on one rank; shard with FSDP2 (fully_shard), or choose space='sphere'"
    )
