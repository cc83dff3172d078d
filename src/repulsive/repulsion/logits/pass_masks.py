"""The masks of one forward pass, and the tokens that are not padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from repulsive.heads.module_paths import is_encoder_decoder
from repulsive.heads.padding import valid_tokens
from repulsive.repulsion.cuda_graphs import is_capturing
from repulsive.repulsion.logits.projections import CircuitLayer


class PassMasks:
    """Masks of the model and of its attention layers in one forward pass, by argument name.

    Args:
        model: the model.
        layers: its attention layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[CircuitLayer]) -> None:
        self._layers = list(layers)
        # With an encoder and a decoder, the model's `attention_mask` refers to the encoder's tokens.
        self._has_source = is_encoder_decoder(model) or any(layer.where == "cross" for layer in layers)
        self.of_model: dict[str, Tensor] = {}
        self.of_layers: dict[int, dict[str, Tensor]] = {}  # by number of the layer
        self._valid: dict[tuple[object, ...], tuple[list[Tensor], Tensor | None]] = {}  # masks -> real tokens, [B, T]
        self._decoder: Tensor | None = None  # real tokens of the decoder's self-attention that ran last, [B, T]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # address of a mask of a compiled model -> mask and copy

    def begin_pass(self, masks: dict[str, Tensor] | None) -> None:
        """Start a forward pass.

        Args:
            masks: those of the model; None keeps the last ones.
        """
        if masks is not None:
            self.of_model = masks
        self.of_layers, self._valid, self._decoder = {}, {}, None

    def clear(self) -> None:
        """Discard all masks."""
        self.of_model, self.of_layers, self._valid, self._copies = {}, {}, {}, {}
        self._decoder = None

    def keep_copy(self, layer: int, name: str, mask: Tensor) -> None:
        """Keep a copy of a compact mask of an attention layer, whose memory compiled code may use again.

        Layers that share a mask share its copy. The mask is kept, too, so that no other mask gets its address.
        """
        address = mask.data_ptr()
        if address not in self._copies or is_capturing():
            self._copies[address] = mask, mask.clone()
        self.of_layers.setdefault(layer, {})[name] = self._copies[address][1]

    def real_tokens(self, masks: dict[str, Tensor], shape: tuple[int, int], layer: int, role: str) -> Tensor | None:
        """Find the tokens that are not padding, from the masks of the model or else of the layer.

        A layer's `key_padding_mask` comes first: its name says that True is padding. A wrapper of torch's encoder may
        pass the same tensor on from an argument `mask`, whose name does not.

        Args:
            masks: those of the layer.
            shape: (B, T) of the tokens.
            layer: its number.
            role: "q" or "k", for queries or keys; values come from the same tokens as keys.
        """
        where = self._layers[layer].where
        sources = [(self.of_model, self._has_source), (masks, False)]
        for some, of_source in reversed(sources) if "key_padding_mask" in masks else sources:
            if some and (valid := self.valid_tokens(some, shape, layer, role, of_source)) is not None:
                if where == "decoder" and not torch.compiler.is_compiling():
                    self._decoder = valid
                return valid
        if where == "cross" and role == "q" and self._decoder is not None and self._decoder.shape == shape:
            return self._decoder  # the queries are the tokens of the decoder
        return None

    def valid_tokens(
        self, masks: dict[str, Tensor], shape: tuple[int, int], layer: int, role: str, of_source: bool = False
    ) -> Tensor | None:
        """Find the tokens that are not padding in some masks.

        Layers that receive the same masks share the result, and so the sampled positions.
        """
        where = self._layers[layer].where
        if torch.compiler.is_compiling():
            return valid_tokens(masks, shape, where, role, of_source)
        tensors = list(masks.values())
        key = (*map(id, tensors), shape, where, role if where == "cross" else "", of_source)
        if key not in self._valid:  # kept with the masks, so that no other tensor gets their ids
            self._valid[key] = tensors, valid_tokens(masks, shape, where, role, of_source)
        return self._valid[key][1]
