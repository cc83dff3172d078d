"""Dummy inputs for any transformers model, from the arguments of its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 12


def example_inputs(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    """Inputs to try, those with the most arguments first."""
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    makers = {
        "input_ids": lambda: token_ids(TOKENS),
        "pixel_values": lambda: torch.randn(2, _first(config, "num_channels", 3), *_image(config)),
        "input_features": lambda: _features(config),
        "input_values": lambda: torch.randn(2, 4000),
    }
    decoder = {"decoder_input_ids": token_ids(7)} if getattr(config, "is_encoder_decoder", False) else {}
    decoder = {k: v for k, v in decoder.items() if k in accepted}
    present = [name for name in makers if name in accepted]
    wanted = [present, [main], ["input_ids"], *([name] for name in present)]
    tried: list[list[str]] = []
    for names in wanted:
        if names not in tried and all(name in accepted and name in makers for name in names):
            tried.append(names)
            for extra in (decoder, {}) if decoder else ({},):
                yield {name: makers[name]() for name in names} | extra | _switches(accepted)
    if "grid_thw" in accepted:
        patch = _first(config, "patch_size", 14) ** 2 * _first(config, "temporal_patch_size", 1)
        pixels = torch.randn(16, _first(config, "in_channels", _first(config, "in_chans", 3)) * patch)
        first = next(iter(accepted))
        yield {first: pixels, "grid_thw": torch.tensor([[1, 4, 4]])}
    for values in _odd(main, config):
        yield {main: values} | decoder


def with_places(inputs: dict[str, Any], config: Any, error: Exception) -> Iterator[dict[str, Any]]:
    """Inputs with image tokens in the text, as many as the error message of the model asks for."""
    asked = re.search(r"features:?\s*(\d+)", str(error))
    token = _first(config, "image_token_id", _first(config, "image_token_index", None))
    if asked is None or token is None or not {"input_ids", "pixel_values"} <= set(inputs):
        return
    if (inputs["input_ids"] == token).any():
        return  # image tokens exist already: the error has another cause
    width = config.get_text_config().hidden_size
    for count in (
        int(asked[1]) // (2 * width),
        int(asked[1]) // 2,
        int(asked[1]),
    ):  # the message counts numbers, rows, or rows of one text
        if not 0 < count < 2000:
            continue
        places = torch.full((2, count), token)
        ids = torch.cat([inputs["input_ids"][:, :3], places, inputs["input_ids"][:, 3:]], 1)
        yield inputs | {"input_ids": ids}


def _odd(main: str, config: Any) -> Iterator[Tensor]:
    """Other shapes of the main input that some families need."""
    height, width = _image(config)
    channels = _first(config, "num_channels", 3)
    if main == "pixel_values":
        for size in (224, 384, 256, 64):
            yield torch.randn(1, channels, size, size)
    if main in ("pixel_values_videos", "pixel_values"):
        frames = _first(config, "num_frames", _first(config, "frames_per_clip", 8))
        yield torch.randn(1, frames, channels, height, width)
        yield torch.randn(1, channels, frames, height, width)
    if main in ("input_values", "input_features"):
        bins = _first(config, "num_mel_bins", 80)
        long = ((1, 1024, bins), (1, bins, 3000), (1, 1, 1024, bins), (1, 1, 8000))
        for shape in ((1, 128, bins), (1, bins, 128), *long):
            yield torch.randn(shape)
    if main in ("past_values", "inputs"):
        yield torch.randn(2, _first(config, "context_length", 32), _first(config, "num_input_channels", 1))
    if main == "inputs":
        yield token_ids(TOKENS)
        yield torch.randn(2, 20, _first(config, "d_model", 64))


def token_ids(count: int) -> Tensor:
    """Ids of ordinary tokens for two texts."""
    return torch.randint(100, 290, (2, count), generator=torch.Generator().manual_seed(0))


def _features(config: Any) -> Tensor:
    bins = _first(config, "num_mel_bins", _first(config, "feature_size", 80))
    positions = _first(config, "max_source_positions", 64)
    return torch.randn(2, bins, 2 * positions)


def _image(config: Any) -> tuple[int, int]:
    size = _first(config, "image_size", 64)
    return (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)


def _first(config: Any, name: str, default: Any) -> Any:
    """The first value of a setting in the configuration or in one of its parts."""
    parts = [config, *(v for k, v in vars(config).items() if k.endswith("config") and hasattr(v, "to_dict"))]
    return next((v for part in parts if (v := getattr(part, name, None)) is not None), default)


def _switches(accepted: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in accepted else {}
