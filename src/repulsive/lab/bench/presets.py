"""Models of transformers at published sizes, with random weights and random inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.errors import RepulsiveError, SelectionError, did_you_mean, short_message

MASKED_SHARE = 0.15  # share of masked tokens, as in BERT
MASK_ID = 103  # [MASK] of BERT's vocabulary
SEED = 0


@dataclass(frozen=True)
class Preset:
    """A transformers model and the size of its training step.

    Args:
        model: class name in transformers, of a model that returns a loss.
        config: class name of its configuration.
        task: "masked" or "causal" language modelling, or "images" for classification.
        depth: name of the setting that holds the number of layers.
        items: tokens (or images) per step on CUDA.
        items_on_cpu: tokens (or images) per step on a CPU.
        length: tokens of one sequence; 1 for images, so that a batch has `items / length` rows.
        positions: name of the setting that limits the length of a sequence; None for images.
        settings: arguments of the configuration that differ from its defaults.
    """

    model: str
    config: str
    task: str
    items: int
    items_on_cpu: int = 2048
    length: int = 1
    depth: str = "num_hidden_layers"
    positions: str | None = "max_position_embeddings"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return "images" if self.task == "images" else "tokens"

    def size(self, device: str, batch: int | None = None, length: int | None = None) -> tuple[int, int]:
        """Return rows and length of a batch; if only `length` is given, the tokens per step stay the same."""
        if length is not None and self.task == "images":
            raise SelectionError(f"--length={length}: {self.model} reads images of one size; leave --length out")
        length = length or self.length
        items = self.items if device == "cuda" else self.items_on_cpu
        return batch or max(1, items // length), length

    def build(
        self, device: str, *, layers: int | None = None, length: int = 1, overrides: Mapping[str, Any] | None = None
    ) -> Any:
        """Make the model in training mode; two calls give equal weights.

        Args:
            device: "cpu", "cuda", or "meta" for shapes without weights.
            layers: depth, if not the preset's.
            length: length of the sequences that the model has to accept.
            overrides: further settings, such as a smaller width for tests.

        Raises:
            RepulsiveError: transformers cannot import the model.
        """
        import transformers

        settings = {**self.settings, **(overrides or {})}
        if layers is not None:
            settings[self.depth] = layers
        try:
            kind, build = getattr(transformers, self.config), getattr(transformers, self.model)
        except ImportError as error:  # transformers imports the classes now
            reason = short_message(error)
            raise RepulsiveError(
                f"transformers cannot import {self.model}: {reason}; see `repulsive doctor`"
            ) from error
        if self.positions is not None:
            settings[self.positions] = max(getattr(kind(**settings), self.positions), length)
        cuda = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices=cuda), torch.device(device):
            torch.manual_seed(SEED)
            model: nn.Module = build(kind(**settings))
        return model.train()

    def inputs(self, config: Any, batch: int, length: int, device: str) -> dict[str, Tensor]:
        """Draw random inputs with labels, as arguments of the model."""
        source = torch.Generator().manual_seed(SEED)
        if self.task == "images":
            size = (batch, config.num_channels, config.image_size, config.image_size)
            made = {
                "pixel_values": torch.randn(size, generator=source),
                "labels": torch.randint(config.num_labels, (batch,), generator=source),
            }
        else:
            tokens = torch.randint(config.vocab_size, (batch, length), generator=source)  # [B, T]
            made = {"input_ids": tokens, "labels": tokens}
            if self.task == "masked":
                chosen = torch.rand(batch, length, generator=source) < MASKED_SHARE  # [B, T]
                chosen[:, 0] = True  # without any target there is no loss
                made["input_ids"] = tokens.masked_fill(chosen, min(MASK_ID, config.vocab_size - 1))
                made["labels"] = tokens.masked_fill(~chosen, -100)
        return {name: value.to(device) for name, value in made.items()}


PRESETS = {
    "bert-base": Preset("BertForMaskedLM", "BertConfig", "masked", items=32 * 128, length=128),
    "vit-b16": Preset(
        "ViTForImageClassification",
        "ViTConfig",
        "images",
        items=64,
        items_on_cpu=10,
        positions=None,
        settings={"num_labels": 1000},
    ),
    "gpt2": Preset(
        "GPT2LMHeadModel",
        "GPT2Config",
        "causal",
        items=8 * 1024,
        length=1024,
        depth="n_layer",
        positions="n_positions",
        settings={"use_cache": False},
    ),
    "llama": Preset(
        "LlamaForCausalLM",
        "LlamaConfig",
        "causal",
        items=4 * 1024,
        length=1024,
        settings={
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 32_000,
            "use_cache": False,
        },
    ),
}


def find_preset(name: str) -> Preset:
    """Look up a model by name.

    Raises:
        SelectionError: the name is unknown.
    """
    if name in PRESETS:
        return PRESETS[name]
    raise SelectionError(f"unknown model {name!r}; {did_you_mean(name, PRESETS)}choose from {', '.join(PRESETS)}")
