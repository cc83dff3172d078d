"""Repel, prove, measure and prune the heads of multi-head attention.

`repel(model, optimizer)` turns the training of any attention model into particle-optimisation sampling over its heads.

Public names are imported when they are first used, so that `import repulsive` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from repulsive import safety as _safety  # noqa: F401  first: it handles Ctrl-C while torch is being imported
from repulsive._version import __version__

if TYPE_CHECKING:
    from repulsive.diagnostics.model_heads import Head, Heads
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
    from repulsive.heads import (
        HeadGroup,
        HeadReport,
        HeadSlice,
        describe,
        find_heads,
        group_modules,
        group_stacked,
        heads_by_hand,
        verify_heads,
    )
    from repulsive.monitoring.monitor import HeadMonitor
    from repulsive.monitoring.problems import HeadWarning, Thresholds
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
    "Head",
    "HeadGroup",
    "HeadLayoutError",
    "HeadMonitor",
    "HeadReport",
    "HeadSlice",
    "HeadWarning",
    "Heads",
    "NoHeadsFound",
    "OptimizerError",
    "RepulsiveError",
    "Rule",
    "RuleError",
    "SelectionError",
    "StateError",
    "Thresholds",
    "Uniform",
    "UnknownSetting",
    "UnsupportedWeights",
    "__version__",
    "describe",
    "find_heads",
    "group_modules",
    "group_stacked",
    "heads_by_hand",
    "repel",
    "verify_heads",
]

# The package that defines each public name; the TYPE_CHECKING block says the same to type checkers and editors.
_NAMES = {
    "diagnostics.model_heads": ("Head", "Heads"),
    "errors": (
        "HeadLayoutError",
        "NoHeadsFound",
        "OptimizerError",
        "RepulsiveError",
        "RuleError",
        "SelectionError",
        "StateError",
        "UnknownSetting",
        "UnsupportedWeights",
    ),
    "heads": (
        "HeadGroup",
        "HeadReport",
        "HeadSlice",
        "describe",
        "find_heads",
        "group_modules",
        "group_stacked",
        "heads_by_hand",
        "verify_heads",
    ),
    "monitoring.monitor": ("HeadMonitor",),
    "monitoring.problems": ("HeadWarning", "Thresholds"),
    "particles": ("SGLD", "SPOS", "SVGD", "CollapsedHeads", "CosineLadder", "Gaussian", "Rule", "Uniform"),
    "repulsion": ("GroupReport", "Handle", "repel"),
}
_PACKAGE_OF = {name: package for package, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMES})


if not TYPE_CHECKING:  # type checkers would accept any name of a module with `__getattr__`

    def __getattr__(name: str) -> object:
        """Import a public name, or one of the packages that define them, on first use."""
        if name in _NAMES:
            return import_module(f"repulsive.{name}")
        if name not in _PACKAGE_OF:
            raise AttributeError(f"module 'repulsive' has no attribute {name!r}")
        value = getattr(import_module(f"repulsive.{_PACKAGE_OF[name]}"), name)
        globals()[name] = value
        return value
