"""The order of the axes of tokens in an attention layer."""

from __future__ import annotations

from torch import nn

# Files of attention classes whose inputs are [T, B, D].
_TIME_FIRST = ("transformers.models.fsmt.modeling_fsmt", "transformers.models.xlnet.modeling_xlnet")

_TRANSPOSING = ("LongformerSelfAttention", "LEDEncoderSelfAttention")  # they project [T, B, D] of inputs [B, T, D]


def is_time_first(attention: nn.Module) -> bool:
    """Check whether the tokens of an attention module are [T, B, D] instead of [B, T, D]."""
    if isinstance(attention, nn.MultiheadAttention):
        return not attention.batch_first
    return type(attention).__module__ in _TIME_FIRST


def projects_time_first(attention: nn.Module) -> bool:
    """Check whether the projections of an attention module read tokens as [T, B, D] instead of [B, T, D]."""
    return is_time_first(attention) or type(attention).__name__ in _TRANSPOSING
