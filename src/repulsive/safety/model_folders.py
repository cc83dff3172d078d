"""Configurations of model folders, read without trust: nothing is downloaded, and no code of a folder runs.

    config = read_config(Path("models/electra-small"))
    with offline():
        model = with_attention(config, lambda name: AutoModel.from_config(config, attn_implementation=name))

`_attn_implementation` in a `config.json` may name a repository of kernels, which transformers downloads and imports. So
the implementation is always named by the caller, and a name with a slash is refused.
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
_WORDS = ("vocab_size", "n_vocab", "max_position_embeddings", "n_positions")


def read_config(folder: Path) -> Any:
    """The configuration of a model folder, as the package transformers reads it.

    Raises:
        ConfigError: it names code to download, or describes a model that is too large.
        Exception: whatever transformers raises for a file that it cannot read.
    """
    path = folder / "config.json"
    with offline():
        auto = importlib.import_module("transformers").AutoConfig
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raw = {}  # transformers says what is wrong with it
        _check_tables(raw, path)
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def with_attention(config: Any, make: Callable[[str], _T]) -> _T:
    """Build a model with an attention implementation that is part of transformers.

    Args:
        config: of the model; "eager" is taken from it, anything else becomes "sdpa".
        make: builds the model, given the name. Called again with "eager" where the model does not support "sdpa".
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
                raise error from None


def check_size(config: Any, make: Callable[[str], Any], where: object) -> None:
    """Count the parameters of a model without memory for them, where its architecture allows that.

    Raises:
        ConfigError: there are more than the limit.
    """
    try:
        with torch.device("meta"):
            model = with_attention(config, make)
    except Exception:  # some architectures compute with tensors while they are built: the estimate has to do
        return
    limits.check_parameters(sum(parameter.numel() for parameter in model.parameters()), str(where))


@contextmanager
def offline() -> Iterator[None]:
    """Keep the package huggingface_hub, which fetches for transformers, from every connection within a block."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_tables(value: Any, path: Path) -> None:
    """Check a table of a configuration, and the tables in it: those of a text model and a vision model, say."""
    if isinstance(value, list):
        for item in value:
            _check_tables(item, path)
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
        _check_tables(item, path)
    layers = max(_numbers(value, _LAYERS), default=0)
    limits.check_layers(layers, str(path))
    width = max(_numbers(value, _WIDTHS), default=0)
    words = max(_numbers(value, _WORDS), default=0)
    # At least one square matrix of the narrower side per layer, and a vector per word: what no architecture is below.
    narrow = min(_numbers(value, _WIDTHS), default=0)
    limits.check_parameters(layers * narrow * width + words * _embedding(value, narrow), str(path))


def _numbers(table: dict[str, Any], names: tuple[str, ...]) -> list[int]:
    found = [table.get(name) for name in names]
    return [number for number in found if isinstance(number, int) and not isinstance(number, bool) and number > 0]


def _embedding(table: dict[str, Any], usual: int) -> int:
    return min([usual, *_numbers(table, ("embedding_size", "word_embed_proj_dim"))])
