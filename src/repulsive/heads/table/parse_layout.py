"""Parse a layout such as "qkv head dim" into the output features of each head."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from repulsive.errors import HeadLayoutError
from repulsive.heads.layout import consecutive_rows


def rows_of(layout: str, features: int, heads: int, kv_heads: int | None = None) -> dict[str, Tensor]:
    """Divide a projection's output features among heads according to a layout.

    Args:
        layout: words as described in `families`, such as "qkv head dim".
        features: number of output features of the projection.
        heads: number of query heads.
        kv_heads: number of key-value heads; None for as many as query heads.

    Returns:
        For each part (q, k or v) in the layout, the feature indices as int64 [heads of that part, features per head].

    Raises:
        HeadLayoutError: the features do not divide into that many heads, or the layout has an unknown word.

    Example:
        >>> rows_of("head qkv dim", 12, heads=2)["k"].tolist()
        [[2, 3], [8, 9]]
    """
    kv_heads = heads if kv_heads is None else kv_heads
    blocks = [block.split() for block in layout.split("|")]
    sizes = [[_size(word, block, heads, kv_heads, layout) for word in block] for block in blocks]  # with `dim` as 1
    per_dim = sum(prod(block) for block in sizes)
    if per_dim == 0 or features % per_dim:
        raise HeadLayoutError(
            f"{features} features do not divide into {heads} heads ({kv_heads} key-value heads) as {layout!r}"
        )
    dim = features // per_dim
    tables: dict[str, Tensor] = {}
    start = 0
    for words, axes in zip(blocks, sizes, strict=True):
        shape = [dim if word == "dim" else size for word, size in zip(words, axes, strict=True)]
        grid = torch.arange(start, start + prod(shape), device="cpu").view(shape)
        start += grid.numel()
        tables |= _rows_by_part(grid, words, heads // kv_heads)
    return tables


def heads_along_axis(layout: str, shape: Sequence[int], heads: int, kv_heads: int) -> tuple[int, dict[str, Tensor]]:
    """Find the heads of a weight in einsum notation, such as "q head in dim".

    Args:
        layout: a part (q, k or v) and the axes of the weight: `head`, `in` and `dim`.
        shape: shape of the weight.
        heads: number of query heads.
        kv_heads: number of key-value heads.

    Returns:
        The axis that counts heads, and for the part its indices along that axis as int64 [heads of that part, 1].

    Raises:
        HeadLayoutError: the axis does not have as many entries as there are heads.

    Example:
        >>> axis, rows = heads_along_axis("k in head dim", (8, 2, 4), heads=4, kv_heads=2)
        >>> axis, rows["k"].tolist()
        (1, [[0], [1]])
    """
    part, *axes = layout.split()
    axis, expected = axes.index("head"), heads if part == "q" else kv_heads
    if len(shape) != len(axes) or shape[axis] != expected:
        raise HeadLayoutError(f"a weight of shape {list(shape)} does not hold {expected} heads as {layout!r}")
    return axis, {part: consecutive_rows(expected)}


def _rows_by_part(grid: Tensor, words: list[str], q_per_kv: int) -> dict[str, Tensor]:
    axis = next(i for i, word in enumerate(words) if _is_part_word(word))
    dim = words.index("dim")
    letters = words[axis]
    per_group = "+" in letters
    letters = letters.replace("+", "")
    counts = [q_per_kv if per_group and letter == "q" else 1 for letter in letters]
    pieces = grid.split(counts, dim=axis)
    return {
        letter: piece.movedim(dim, -1).flatten(0, -2).contiguous()  # [heads, dim]
        for letter, piece in zip(letters, pieces, strict=True)
        if letter in "qkv"
    }


def _is_part_word(word: str) -> bool:
    return word not in ("head", "group", "dim") and not word.isdigit()


def _size(word: str, block: list[str], heads: int, kv_heads: int, layout: str) -> int:
    """Return the length of the axis that a word of the layout names; 1 for `dim`."""
    parts = [w for w in block if _is_part_word(w)]
    if len(parts) != 1 or block.count("dim") != 1 or not set(parts[0]) & set("qkv"):
        raise HeadLayoutError(f"layout {layout!r}: each block needs one word with letters q, k, v, and one `dim`")
    if word == "dim":
        return 1
    if word.isdigit():
        return int(word)
    if word == "group":
        return kv_heads
    if word == "head":
        count = heads if "q" in parts[0] else kv_heads
        split = prod(int(w) for w in block if w.isdigit())
        if count % split:
            raise HeadLayoutError(f"layout {layout!r}: {count} heads do not divide by {split}")
        return count // split
    return len(word) if "+" not in word else sum(heads // kv_heads if x == "q" else 1 for x in word.split("+"))
