"""Read configurations of untrusted model folders: nothing is downloaded, and no code from a folder runs.

    config = read_config(Path("models/electra-small"))
    with offline():
        model = with_attention(config, lambda name: AutoModel.from_config(config, attn_implementation=name))

`_attn_implementation` in a `config.json` may name a repository of GPU kernels, which transformers would download and
import. Therefore the caller always names the implementation, and a name with a slash is refused.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from repulsive.errors import ConfigError
from repulsive.safety import limits

_T = TypeVar("_T")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "ffn_dim", "d_ff", "n_inner")
_TOKENS = ("vocab_size", "n_vocab", "max_position_embeddings", "n_positions")


def read_config(folder: Path) -> Any:
    """Read the configuration of a model folder with transformers.

    Raises:
        ConfigError: the configuration names code to download, or describes a model that is too large.
        Exception: raised by transformers for a file that it cannot read.
    """
    path = folder / "config.json"
    with offline():
        auto = importlib.import_module("transformers").AutoConfig
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raw = {}  # transformers raises an error for it below
        _check_sections(raw, path)
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def with_attention(config: Any, make: Callable[[str], _T]) -> _T:
    """Build a model with an attention implementation that is part of transformers.

    Args:
        config: configuration of the model; the implementation is "eager" if the configuration says so, else "sdpa".
        make: function that builds the model with a given implementation. It is called again with "eager" if the model
            does not support "sdpa".
    """
    with offline():
        if getattr(config, "_attn_implementation", None) == "eager":
            return make("eager")
        try:
            return make("sdpa")
        except (ValueError, ImportError) as error:
            try:
                return make("eager")
            except Exception:
                raise error from error.__cause__  # without the second error


def check_size(config: Any, make: Callable[[str], Any], where: object) -> None:
    """Check the number of parameters of a model without allocating them, if its architecture allows that.

    Raises:
        ConfigError: the model has more parameters than the limit.
    """
    try:
        with torch.device("meta"):
            model = with_attention(config, make)
    except Exception:  # some need real tensors while they are built; `read_config` has estimated their size
        return
    limits.check_parameters(sum(parameter.numel() for parameter in model.parameters()), str(where))


@contextmanager
def offline() -> Iterator[None]:
    """Block all downloads by huggingface_hub, which transformers uses, during a block."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        yield
        return
    original, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = original


def _check_sections(value: Any, path: Path) -> None:
    """Raise `ConfigError` if a configuration section, or a section nested in it, names code or is too large."""
    if isinstance(value, list):
        for item in value:
            _check_sections(item, path)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        names = item.values() if isinstance(item, dict) else [item]
        if key.endswith(("attn_implementation", "attn_implementation_internal", "experts_implementation")):
            for name in names:
                if isinstance(name, str) and ("/" in name or "\\" in name or ":" in name):
                    raise ConfigError(
                        f"{path}: {key} names {name[:80]!r}, code that would be downloaded and run; remove that entry"
                    )
        _check_sections(item, path)
    layers = max(_numbers(value, _LAYERS), default=0)
    limits.check_layers(layers, str(path))
    width = max(_numbers(value, _WIDTHS), default=0)
    tokens = max(_numbers(value, _TOKENS), default=0)
    # A lower bound for any architecture: one matrix per layer and one embedding vector per token.
    narrow = min(_numbers(value, _WIDTHS), default=0)
    limits.check_parameters(layers * narrow * width + tokens * _embedding_width(value, narrow), str(path))


def _numbers(table: dict[str, Any], names: tuple[str, ...]) -> list[int]:
    values = [table.get(name) for name in names]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool) and number > 0]


def _embedding_width(table: dict[str, Any], default: int) -> int:
    return min([default, *_numbers(table, ("embedding_size", "word_embed_proj_dim"))])
