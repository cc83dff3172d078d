"""Masks that attention layers are called with, for models that are called with a mask of another name, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from repulsive.heads.padding import masks_in, valid_tokens
from repulsive.heads.token_order import is_time_first


class Layer(Protocol):
    """An attention layer: its dotted name, "encoder", "decoder" or "cross", and its attention module."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def attention(self) -> nn.Module: ...


class LayerMasks:
    """The masks of the latest call of each attention layer, read in the same way as by `space="logits"`."""

    def __init__(self) -> None:
        self._layers: dict[str, Layer] = {}
        self._masks: dict[str, dict[str, Tensor]] = {}  # masks of a layer by argument name
        self._shapes: dict[str, tuple[int, ...]] = {}  # (B, T) of a layer's queries
        self._decoder: Layer | None = None  # the self-attention of a decoder that ran last

    @contextmanager
    def recorded(self, layers: Iterable[Layer]) -> Iterator[None]:
        """Record the masks of the calls inside this context."""
        with ExitStack() as stack:
            for layer in layers:
                self._layers[layer.name] = layer
                hook = partial(self._keep, layer)
                stack.callback(layer.attention.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _keep(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = layer.name
        self._decoder = layer if layer.where == "decoder" else self._decoder
        tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 3), None)
        shape = () if tokens is None else tokens.shape[1::-1] if is_time_first(module) else tokens.shape[:2]
        self._masks[name], self._shapes[name] = masks_in(module, args, kwargs), tuple(shape)

    def queries(self, layer: Layer, shape: Sequence[int] | None = None) -> Tensor | None:
        """Find the query tokens of a layer that are not padding, bool [B, T].

        Args:
            layer: one of the layers.
            shape: [B, T, ...] of the queries; None for those that the layer was called with.
        """
        shape = self._shapes.get(layer.name, ()) if shape is None else shape
        valid = self._valid(layer, shape, "q")
        if valid is None and layer.where == "cross" and self._decoder is not None:
            return self._valid(self._decoder, shape, "q")  # the queries are the tokens of the decoder
        return valid

    def keys(self, layer: Layer, shape: Sequence[int]) -> Tensor | None:
        """Find the key and value tokens of a layer that are not padding, bool [B, S]."""
        return self._valid(layer, shape, "k")

    def output(self, shape: Sequence[int]) -> Tensor | None:
        """Find the tokens of the model's output that are not padding: those of the last layer of its last stack."""
        layers = [layer for layer in self._layers.values() if layer.where != "cross"]
        return self.queries(layers[-1], shape) if layers else None

    def _valid(self, layer: Layer, shape: Sequence[int], part: str) -> Tensor | None:
        masks = self._masks.get(layer.name, {})
        return valid_tokens(masks, (shape[0], shape[1]), layer.where, part) if masks and len(shape) > 1 else None
