"""Attention heads of a model: find, verify and select them.

`layout` defines a group of heads, `discover` finds groups, `select` filters them, `verify` proves them, `by_hand` lets
the caller name them, `grouping` groups experts and other modules, and `describe` prints groups. `table` lists known
attention classes; `trace` follows gradients; `products` reads weights in einsum notation. The other modules answer one
question each about a model, such as `after_projection`: what is applied to queries and keys after their projection.
"""

from repulsive.heads.by_hand import heads_by_hand
from repulsive.heads.describe import describe
from repulsive.heads.discover import find_heads
from repulsive.heads.grouping import group_modules, group_stacked
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.trace.reports import HeadReport
from repulsive.heads.verify import verify_heads

__all__ = [
    "HeadGroup",
    "HeadReport",
    "HeadSlice",
    "describe",
    "find_heads",
    "group_modules",
    "group_stacked",
    "heads_by_hand",
    "verify_heads",
]
