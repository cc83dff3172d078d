"""Dummy inputs for any transformers model, from the arguments of its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterator, Mapping
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
        "pixel_values": lambda: torch.randn(2, _first(config, "num_channels", 3), *_image(config, accepted)),
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


def repaired(inputs: dict[str, Any], model: nn.Module, config: Any, error: Exception) -> Iterator[dict[str, Any]]:
    """Inputs to try after the model refused `inputs`: with arguments that it lacks, or with image or sound tokens.

    A model that also reads text silently skips its other towers if the text has no place for them.
    """
    if "input_ids" not in inputs:
        return
    accepted = inspect.signature(model.forward).parameters
    asked = re.search(r"features:?\s*(\d+)", str(error))
    if asked is None:
        yield from _completed(inputs, accepted, config)
        return
    is_sound = "pixel_values" not in inputs or str(error).startswith("Audio")
    kind = "audio" if is_sound else "image"
    token = _first(config, f"{kind}_token_id", _first(config, f"{kind}_token_index", None))
    if token is None or (inputs["input_ids"] == token).any():
        return  # tokens exist already: the error has another cause
    width = config.get_text_config().hidden_size
    for count in dict.fromkeys(
        (int(asked[1]) // (2 * width), int(asked[1]) // 2, int(asked[1]))
    ):  # the message counts numbers, rows, or rows of one text
        if not 0 < count < 2000:
            continue
        places = torch.full((2, count), token)
        ids = torch.cat([inputs["input_ids"][:, :3], places, inputs["input_ids"][:, 3:]], 1)
        kinds = {"mm_token_type_ids": (ids == token).int()} if "mm_token_type_ids" in accepted else {}
        yield inputs | {"input_ids": ids} | kinds


def _completed(inputs: dict[str, Any], accepted: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """Add the arguments that go with images or sound."""
    if "input_features" in inputs:
        yield from _with_sound_masks(inputs, accepted)
    if "pixel_values" in inputs and "image_grid_thw" in accepted:
        yield from _with_patch_grid(inputs, accepted, config)
    elif "pixel_values" in inputs:
        yield from _with_several_images(inputs, accepted)


def _with_sound_masks(inputs: dict[str, Any], accepted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Sound [B, bins, T] or [B, T, bins], with the mask of its time steps [B, T]."""
    features = inputs["input_features"]
    for name in ("input_features_mask", "feature_attention_mask"):
        if name in accepted and name not in inputs:
            for sound in (features, features[..., :100].repeat(1, 1, 2), features.mT):
                length = sound.shape[1] if sound.shape == features.mT.shape else sound.shape[2]
                yield inputs | {"input_features": sound, name: torch.ones(2, length).long()}


def _with_patch_grid(inputs: dict[str, Any], accepted: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """One image per text, as 4 x 4 patches in rows or as small images."""
    if "image_grid_thw" in inputs:
        return
    vision = next((v for k, v in vars(config).items() if k.startswith("vision") and hasattr(v, "to_dict")), config)
    side = getattr(vision, "patch_size", 14)
    frames = getattr(vision, "temporal_patch_size", None) or 1
    channels = next((n for k in ("in_channels", "in_chans", "num_channels") if (n := getattr(vision, k, None))), 3)
    more = {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
    more |= {"image_merge_sizes": torch.tensor([2, 2])} if "image_merge_sizes" in accepted else {}
    for shape in ((channels * frames * side**2,), (channels, side, side), (2 * channels * side**2,)):
        yield inputs | more | {"pixel_values": torch.randn(32, *shape)}


def _with_several_images(inputs: dict[str, Any], accepted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An axis for the images or tiles of each text, sizes of images, and smaller images."""
    images = inputs["pixel_values"]
    if images.ndim != 4 or "image_sizes" in inputs:
        return
    small = images[..., :56, :56]
    for views in (images, images[..., :128, :128]):
        tiles = views.unsqueeze(1)  # [B, images, C, H, W]
        if "image_sizes" not in accepted:
            yield inputs | {"pixel_values": tiles}
            continue
        for pixels in (small, tiles.repeat(1, 2, 1, 1, 1), tiles.repeat(1, 3, 1, 1, 1)):
            sizes = torch.tensor([list(pixels.shape[-2:])] * 2)
            yield inputs | {"pixel_values": pixels, "image_sizes": sizes}


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


def _image(config: Any, accepted: Container[str] = ()) -> tuple[int, int]:
    size = _first(config, "image_size", 64)
    height, width = (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)
    # a model that is told the size of each image takes small ones; attention over a large one takes minutes
    return (56, 56) if "image_sizes" in accepted and height > 1000 else (height, width)


def _first(config: Any, name: str, default: Any) -> Any:
    """The first value of a setting in the configuration or in one of its parts."""
    parts = [config, *(v for k, v in vars(config).items() if k.endswith("config") and hasattr(v, "to_dict"))]
    return next((v for part in parts if (v := getattr(part, name, None)) is not None), default)


def _switches(accepted: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in accepted else {}
