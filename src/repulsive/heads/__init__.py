"""Attention heads of a model: find, verify and select them."""

from repulsive.heads.by_hand import heads_by_hand
from repulsive.heads.describe import describe
from repulsive.heads.discover import find_heads
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.heads.trace.reports import HeadReport
from repulsive.heads.verify import verify_heads

__all__ = ["HeadGroup", "HeadReport", "HeadSlice", "describe", "find_heads", "heads_by_hand", "verify_heads"]
