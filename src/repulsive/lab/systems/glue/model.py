"""A pre-trained encoder with a classification head on its first token, as in the fine-tuning of ELECTRA.

    encoder = load_encoder("models/electra-small", dropout=0.1)
    model = FineTuned(encoder, outputs=2)
    logits = model(ids, segments, real)     # three tensors [B, T] -> [B, 2]

Weights are read from local folders; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repulsive.errors import ConfigError, short_message
from repulsive.extras import install_command
from repulsive.safety.model_folders import check_size, read_config, with_attention

Head = Literal["linear", "dense"]
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FAMILIES = ("electra", "bert")
_HIDDEN = -1e9  # added to the scores of padding; finite in every precision
_SIZES = {
    "tiny": {"layers": 2, "width": 32, "heads": 4, "inner": 64, "embedding": 16},
    "small": {"layers": 12, "width": 256, "heads": 4, "inner": 1024, "embedding": 128},
    "base": {"layers": 12, "width": 768, "heads": 12, "inner": 3072, "embedding": 768},
}
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # in the first BERT files


class FineTuned(nn.Module):
    """A pre-trained encoder with a classification or regression head.

    Args:
        encoder: an encoder of the package transformers.
        outputs: number of classes, or 1 for regression.
        head: "linear", as in the official ELECTRA code, is dropout and a linear layer. "dense", as in transformers, has
            another dropout and a layer with GELU before it.
        dropout: dropout probability of the head.
    """

    def __init__(self, encoder: nn.Module, outputs: int, head: Head = "linear", dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        width = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width) if head == "dense" else None
        self.out = nn.Linear(width, outputs)
        for layer in (self.out, self.dense):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, ids: Tensor, segments: Tensor, real: Tensor) -> Tensor:
        """Compute class logits, or the predicted scores of a regression task.

        Args:
            ids: token ids, int64 [B, T].
            segments: 0 for the first text, 1 for the second, int64 [B, T].
            real: padding mask, False at padding, bool [B, T].

        Returns:
            [B, outputs].
        """
        # For a mask [B, T] transformers checks whether the mask hides anything (`.all()`), which synchronises with
        # the GPU and cannot be captured. A 4-dimensional mask is used as it is; every attention takes an additive mask.
        mask = torch.zeros_like(real, dtype=torch.float32).masked_fill(~real, _HIDDEN)[:, None, None, :]  # [B, 1, 1, T]
        states = self.encoder(input_ids=ids, token_type_ids=segments, attention_mask=mask).last_hidden_state
        first = self.dropout(states[:, 0])  # [B, width]
        if self.dense is not None:
            first = self.dropout(F.gelu(self.dense(first)))
        logits: Tensor = self.out(first)
        return logits


def depth_of(name: str, layers: int) -> int:
    """Return the depth of a parameter of a `FineTuned`: 0 for embeddings, 1 to `layers`, `layers` + 1 for the head."""
    if name.startswith("encoder.encoder.layer."):
        return int(name.split(".")[3]) + 1
    return 0 if name.startswith("encoder.") else layers + 1


def make_encoder(size: str, vocabulary: int, dropout: float = 0.1) -> nn.Module:
    """Make ELECTRA's encoder with random weights.

    Args:
        size: "small" and "base" are the published sizes, "tiny" is for tests.
        vocabulary: number of pieces.
        dropout: dropout probability on states and attention weights.
    """
    sizes = _SIZES[size]
    config = _transformers().ElectraConfig(
        vocab_size=vocabulary,
        embedding_size=sizes["embedding"],
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["inner"],
    )
    return _made(config, dropout)


def load_encoder(folder: str | Path, dropout: float = 0.1) -> nn.Module:
    """Load an encoder from a folder that transformers wrote, without its task-specific head.

    Raises:
        ConfigError: the folder holds another kind of model, is damaged, or lacks a weight.
    """
    folder = Path(folder)
    try:
        family = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{folder}: has no readable config.json; name the folder of a model") from None
    if family not in FAMILIES:
        raise ConfigError(f"{folder}: holds a model of type {family!r}; known are {', '.join(FAMILIES)}")
    _transformers()
    try:
        config = read_config(folder)
        check_size(config, lambda name: _transformers().AutoModel.from_config(config, attn_implementation=name), folder)
        model = _made(config, dropout)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises many types for impossible sizes
        raise ConfigError(f"{folder}: its config.json makes no model ({short_message(error)})") from None
    fill_encoder(model, _weights(folder), str(folder))
    return model


def fill_encoder(encoder: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into an encoder; a prefix of their names, such as "electra." or "encoder.", is detected.

    Raises:
        ConfigError: a weight is missing, or has another shape.
    """
    given = {_renamed(name): value for name, value in weights.items()}
    expected = encoder.state_dict()
    anchor = "embeddings.word_embeddings.weight"
    prefixes = sorted((name.removesuffix(anchor) for name in given if name.endswith(anchor)), key=_preferred)
    if not prefixes:
        raise ConfigError(f"{source}: has no {anchor}; these are not the weights of an encoder")
    values = {name: given.get(prefixes[0] + name) for name in expected}
    for name, value in values.items():
        if value is None and name.rpartition(".")[2] not in ("position_ids", "token_type_ids"):
            raise ConfigError(f"{source}: has no weights for {name}")
        if value is not None and value.shape != expected[name].shape:
            shapes = f"{list(value.shape)}, not {list(expected[name].shape)}"
            raise ConfigError(f"{source}: {name} has the shape {shapes}")
    encoder.load_state_dict({name: expected[name] if value is None else value for name, value in values.items()})


def weights_file(folder: Path) -> Path:
    """Find the file with the weights of a model.

    Raises:
        ConfigError: the folder has no such file.
    """
    file = next((path for name in WEIGHTS if (path := folder / name).is_file()), None)
    if file is None:
        raise ConfigError(f"{folder}: has neither {' nor '.join(WEIGHTS)}")
    return file


def _preferred(prefix: str) -> tuple[bool, int]:
    """Return a sort key for name prefixes: the discriminator before the generator, then the shortest prefix."""
    return "generator" in prefix, len(prefix)


def _weights(folder: Path) -> dict[str, Tensor]:
    file = weights_file(folder)
    try:
        if file.suffix == ".bin":
            weights = torch.load(file, map_location="cpu", weights_only=True)
        else:
            weights = importlib.import_module("safetensors.torch").load_file(str(file))
    except Exception as error:  # torch and safetensors raise many types for damaged files
        raise ConfigError(f"{file}: cannot be read ({short_message(error)}); download it again") from None
    if not isinstance(weights, dict) or not all(isinstance(x, Tensor) for x in weights.values()):
        raise ConfigError(f"{file}: expected a table of weights by name, got something else; download it again")
    return weights


def _renamed(name: str) -> str:
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def _made(config: Any, dropout: float) -> nn.Module:
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
    config.dtype = "float32"
    own = {"add_pooling_layer": False} if config.model_type == "bert" else {}
    auto = _transformers().AutoModel
    model: nn.Module = with_attention(config, lambda name: auto.from_config(config, attn_implementation=name, **own))
    return model.float()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ConfigError(f"fine-tuning needs the package transformers: {install_command('transformers')}") from None
