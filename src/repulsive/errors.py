"""Errors a user can meet. Each message names what was wrong, where, and what to do next."""


class RepulsiveError(Exception):
    """Base of every error this package raises on purpose."""


class RuleError(RepulsiveError, ValueError):
    """A rule, kernel, bandwidth, prior or schedule was given a value it cannot take."""


class SelectionError(RepulsiveError, ValueError):
    """`layers`, `parts`, `where`, `particle` or a name pattern selects nothing or is misspelt."""


class NoHeadsFound(RepulsiveError, LookupError):
    """The model has no attention heads that are known or could be inferred."""


class HeadLayoutError(RepulsiveError, ValueError):
    """A slice is not the head it claims to be, or a weight does not divide into the heads claimed."""


class UnsupportedWeights(RepulsiveError, TypeError):
    """Quantised, sparse, sharded or otherwise unreadable weights or gradients."""


class NoTwin(RepulsiveError, TypeError):
    """A model cannot be built again with fresh weights."""


class OptimizerError(RepulsiveError, ValueError):
    """The optimiser owns none of the heads, has no step hook, or is repulsive already."""


class StateError(RepulsiveError, ValueError):
    """A saved state does not belong to this model, rule or version."""


class DataError(RepulsiveError, ValueError):
    """A data file is damaged, empty, not in the format claimed, or does not fit what it is used with."""


class ConfigError(RepulsiveError, ValueError):
    """A recipe has an unknown key, a wrong type or a value that cannot be."""


class CheckpointError(RepulsiveError, RuntimeError):
    """A checkpoint could not be written, or none that is whole could be read."""


class RunError(RepulsiveError, RuntimeError):
    """A run folder belongs to another recipe or process, is unfinished, or is none."""


class DivergedError(RepulsiveError, ArithmeticError):
    """The loss stopped being a number."""
