"""Groups of heads that the caller names: `heads_by_hand`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from repulsive.errors import HeadLayoutError, NoHeadsFound, check_whole, did_you_mean
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.module_paths import (
    check_model,
    clean,
    dotted,
    module_of,
    number_layers,
    stack_of,
    unwrap,
    where_of,
)
from repulsive.heads.table.match import follow, weights_of
from repulsive.heads.table.parse_layout import rows_of

ByHand = tuple[str, int] | tuple[str, int, int] | tuple[str, Tensor]


def heads_by_hand(model: nn.Module, heads: Mapping[str, ByHand]) -> list[HeadGroup]:
    """Name the heads of an attention class that is neither in the family table nor traceable.

    Args:
        model: the model.
        heads: dotted name of a projection -> its heads, in one of these forms:
            (part, number of heads), such as ("q", 8), where the part is "q", "k" or "v";
            (layout, number of heads) for a packed projection, such as ("qkv head dim", 8);
            (layout, query heads, key-value heads) if query heads share key-value heads; or
            (part, rows) with rows as int64 [heads, features].

    Returns:
        One group per part (q, k or v) of each projection, in the order given. A key-value head serves neighbouring
        query heads.

    Raises:
        HeadLayoutError: no projection has that name, or it does not divide into that many heads.
        NoHeadsFound: `heads` is empty or names no part, or `torch.jit` or `torch.export` made the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 6))
        >>> [g.name for g in heads_by_hand(model, {"0": ("qkv head dim", 1)})]
        ['q', 'k', 'v']
        >>> packed = heads_by_hand(model, {"0": ("q head dim | kv head dim", 4, 1)})
        >>> [g.slices[0].rows.tolist() for g in packed]
        [[[0], [1], [2], [3]], [[4]], [[5]]]
    """
    check_model(model)
    if not isinstance(heads, Mapping) or not all(isinstance(path, str) for path in heads):
        raise HeadLayoutError('heads: expected names of projections and their heads, such as {"layer.wq": ("q", 8)}')
    inner = unwrap(model)
    groups: list[HeadGroup] = []
    for path, entry in heads.items():
        if follow(inner, path) is None:
            known = [clean(name) for name, _ in (*inner.named_modules(), *inner.named_parameters())]
            hint = did_you_mean(path, known).strip()
            problem = f"{path!r} is neither a projection nor a parameter of {type(inner).__name__}"
            raise HeadLayoutError(f"{problem}; {hint}" if hint else problem)
        if not isinstance(entry, tuple | list) or not 2 <= len(entry) <= 3 or not isinstance(entry[0], str):
            raise HeadLayoutError(f"{path!r}: expected a part and a number of heads, such as ('q', 8), got {entry!r}")
        weights = [(weight, *_rows(path, entry, weight.features)) for weight in weights_of(inner, path)]
        for part in ("q", "k", "v"):
            slices = tuple(
                HeadSlice(weight.module, weight.attribute, weight.path, table[part], weight.axis)
                for weight, table, _ in weights
                if part in table
            )
            if slices:
                parent = path.rpartition(".")[0]
                name = dotted(clean(parent), part)
                if any(g.name == name for g in groups):
                    name = dotted(clean(path), part)
                serves = weights[0][2] if part == "q" else None
                where = where_of(inner, parent)
                groups.append(HeadGroup(name, 0, part, where, stack_of(path), "by hand", slices, serves, "given"))
    if not groups:
        raise NoHeadsFound(
            "heads_by_hand: no part was named; use ('q', number of heads) or a layout with q, k or v in it"
        )
    return number_layers(groups, [module_of(g) for g in groups])


def _rows(path: str, entry: ByHand, features: int) -> tuple[dict[str, Tensor], tuple[int, ...] | None]:
    """Compute the rows of each part, and the kv head that each q head uses if there are fewer kv heads than q heads."""
    layout, heads, *kv = entry
    if isinstance(heads, Tensor):
        return {layout: heads}, None
    kv_heads = kv[0] if kv else heads
    check_whole(f"{path!r}: number of heads", heads, error=HeadLayoutError)
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise HeadLayoutError(f"{path!r}: {heads} query heads cannot share {kv_heads} key-value heads evenly")
    serves = tuple(head * kv_heads // heads for head in range(heads)) if kv_heads < heads else None
    return rows_of(layout if " " in layout else f"{layout} head dim", features, heads, kv_heads), serves
