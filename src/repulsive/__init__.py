"""Multi-head attention whose heads do not collapse.

`repel(model, optimizer)` turns the training of any attention model into particle-optimisation sampling over its heads.
"""

from repulsive import safety as _safety  # noqa: F401  first, so that Ctrl-C is answered while torch is imported
from repulsive._version import __version__
from repulsive.errors import (
    HeadLayoutError,
    NoHeadsFound,
    OptimizerError,
    RepulsiveError,
    RuleError,
    SelectionError,
    StateError,
    UnknownSetting,
    UnsupportedWeights,
)
from repulsive.heads import HeadGroup, HeadReport, HeadSlice, describe, find_heads, heads_by_hand, verify_heads
from repulsive.particles import SGLD, SPOS, SVGD, CollapsedHeads, CosineLadder, Gaussian, Rule, Uniform
from repulsive.repulsion import GroupReport, Handle, repel

__all__ = [
    "SGLD",
    "SPOS",
    "SVGD",
    "CollapsedHeads",
    "CosineLadder",
    "Gaussian",
    "GroupReport",
    "Handle",
    "HeadGroup",
    "HeadLayoutError",
    "HeadReport",
    "HeadSlice",
    "NoHeadsFound",
    "OptimizerError",
    "RepulsiveError",
    "Rule",
    "RuleError",
    "SelectionError",
    "StateError",
    "Uniform",
    "UnknownSetting",
    "UnsupportedWeights",
    "__version__",
    "describe",
    "find_heads",
    "heads_by_hand",
    "repel",
    "verify_heads",
]
