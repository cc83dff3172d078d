"""Change the number of heads in the config of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from repulsive.errors import HeadLayoutError, short_message

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_SIZE = ("head_dim", "d_kv")
ADVICE = (
    "In Python, prune(model, heads) and save_pruned of repulsive.diagnostics.prune support some of these classes; any "
    "heads can be ablated"
)


def config_with_heads(model: nn.Module) -> Any:
    """Return the config of a model.

    Raises:
        HeadLayoutError: the model has no config, or the config has no number of heads.
    """
    config = getattr(model, "config", None)
    if config is None or _field(config, _HEADS) is None:
        raise HeadLayoutError(f"{type(model).__name__} has no transformers config with a number of heads. {ADVICE}")
    return config


def accepts(config: Any, heads: int, kv_heads: int) -> bool:
    """Check whether the config's own validation accepts these numbers of heads."""
    try:
        changed = type(config).from_dict({**config.to_dict(), **_changes(config, heads, kv_heads)})
        if hasattr(changed, "validate"):
            changed.validate()
    except Exception:  # validators raise exceptions of any type
        return False
    return True


def smaller_config(config: Any, heads: int, kv_heads: int, head_dim: int) -> Any:
    """Copy a config with other numbers of heads and key-value heads, of the same size.

    Raises:
        HeadLayoutError: the config does not accept them.
    """
    fields = _changes(config, heads, kv_heads, head_dim)
    try:
        changed = type(config).from_dict({**config.to_dict(), **fields})
    except Exception as error:  # a config may compute the head size, or refuse values for reasons of its own
        computed = isinstance(getattr(type(config), "head_dim", None), property)
        reason = "it computes the head size as width / heads" if computed else short_message(error)
        raise HeadLayoutError(
            f"{type(config).__name__} does not accept {heads} heads of size {head_dim}: {reason}. {ADVICE}"
        ) from error
    changed._attn_implementation = config._attn_implementation
    return changed


def _field(config: Any, names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(getattr(config, name, None), int)), None)


def _changes(config: Any, heads: int, kv_heads: int, head_dim: int | None = None) -> dict[str, int]:
    """Compute new values of the config fields that depend on the number of heads."""
    fields = {_field(config, _HEADS) or "num_attention_heads": heads}
    if (name := _field(config, _KV_HEADS)) is not None:
        fields[name] = kv_heads
    if head_dim is not None and _field(config, _HEAD_SIZE) is None:  # otherwise the size does not depend on the number
        fields["head_dim"] = head_dim
    return fields
