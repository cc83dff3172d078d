"""Resize, crop and normalise pictures as the model folder or timm says, without running their code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.loading.import_path import LoadError
from repulsive.errors import short_message

FILE = "preprocessor_config.json"
_MAX_SIZE = 4096  # pixels
_BICUBIC, _BILINEAR = 3, 2  # Pillow's numbers of its filters
_FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}


@dataclass(frozen=True)
class Preprocessing:
    """How a picture becomes the input of a model.

    Args:
        height: height of the input in pixels.
        width: width of the input in pixels.
        resize: height and width to resize to; one number: length of the shorter side; None: do not resize.
        resample: Pillow's number of the filter.
        scale: factor of the bytes of a pixel.
        mean: subtracted from each channel.
        std: divisor of each channel.
        rounds: the margin of a centre crop is rounded (torchvision), not rounded down (transformers).
        resizes_positions: the model was built for another size and must resize its position embeddings.
        note: one sentence for the page.
    """

    height: int
    width: int
    resize: tuple[int, int] | int | None
    resample: int
    scale: float
    mean: Sequence[float]
    std: Sequence[float]
    rounds: bool = False
    resizes_positions: bool = False
    note: str = ""

    def apply(self, image: Any) -> Any:
        """Resize a Pillow image and crop its centre; pixels outside the image become black."""
        image = image.convert("L" if len(self.mean) == 1 else "RGB")
        if isinstance(self.resize, int):
            shorter, longer = sorted(image.size)
            long_side = max(1, int(self.resize * longer / shorter))
            size = (self.resize, long_side) if image.width <= image.height else (long_side, self.resize)
            image = image.resize(size, self.resample)
        elif self.resize is not None:
            image = image.resize((self.resize[1], self.resize[0]), self.resample)
        left, top = (self._margin(image.width, self.width), self._margin(image.height, self.height))
        return image.crop((left, top, left + self.width, top + self.height))

    def normalise(self, image: Any) -> Tensor:
        """Convert the result of `apply` to the model's input, float32 [channels, height, width]."""
        channels = len(self.mean)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(self.height, self.width, channels)
        values = pixels.permute(2, 0, 1).double() * self.scale  # [C, H, W]
        mean, std = (
            torch.tensor(list(x), dtype=torch.float64, device="cpu").view(-1, 1, 1) for x in (self.mean, self.std)
        )
        return ((values - mean) / std).float()

    def _margin(self, size: int, wanted: int) -> int:
        return round((size - wanted) / 2) if self.rounds else (size - wanted) // 2


def read_preprocessing(folder: Path | None, model: nn.Module, channels: int) -> Preprocessing:
    """Read the preprocessing of a model folder, or of timm; otherwise resize to the model's size.

    Args:
        folder: folder of the model; None for imported models.
        model: the model.
        channels: number of colour channels that it reads.

    Raises:
        LoadError: the file cannot be read, or the size of the inputs is unknown.
    """
    built_for = _built_for(model)
    timm = getattr(model, "pretrained_cfg", None)
    if folder is not None and (folder / FILE).is_file():
        return _of_folder(folder / FILE, built_for, channels)
    if isinstance(timm, dict) and timm.get("input_size"):
        return _of_timm(timm, built_for, channels)
    if built_for is None:
        raise LoadError(f"the size of the pictures that {type(model).__name__} reads is unknown; add a {FILE}")
    half = [0.5] * channels
    note = f"resized to {built_for[0]} x {built_for[1]}, mean and standard deviation 0.5: the model has no {FILE}"
    return Preprocessing(*built_for, built_for, _BICUBIC, 1 / 255, half, half, note=note)


def _of_folder(path: Path, built_for: tuple[int, int] | None, channels: int) -> Preprocessing:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("expected a JSON object")
        resize = _resize(table.get("size")) if table.get("do_resize", True) else None
        crops = table.get("do_center_crop", "crop_size" in table) and table.get("crop_size")
        target = _pair(table["crop_size"]) if crops else resize if isinstance(resize, tuple) else None
        if target is None:
            target = (resize, resize) if isinstance(resize, int) else built_for
        if target is None:
            raise ValueError("expected size or crop_size")
        normalises = table.get("do_normalize", True)
        mean = _numbers(table.get("image_mean", 0.5) if normalises else 0.0, channels)
        std = _numbers(table.get("image_std", 0.5) if normalises else 1.0, channels)
        scale = float(table.get("rescale_factor", 1 / 255)) if table.get("do_rescale", True) else 1.0
        resample = table.get("resample", _BILINEAR)
        if resample not in _FILTERS.values() or min(std) <= 0 or not math.isfinite(scale):
            raise ValueError("expected a filter from 0 to 5, positive image_std and a finite rescale_factor")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LoadError(f"cannot use {str(path)!r}: {short_message(error)}") from None
    differs = built_for is not None and target != built_for
    note = f"{FILE} of the model: {target[0]} x {target[1]} pixels"
    return Preprocessing(*target, resize, resample, scale, mean, std, resizes_positions=differs, note=note)


def _of_timm(table: dict[str, Any], built_for: tuple[int, int] | None, channels: int) -> Preprocessing:
    height, width = built_for or _pair(table["input_size"][1:])
    share = table.get("crop_pct") or 1.0
    resize = math.floor(height / share), math.floor(width / share)
    filter_ = _FILTERS.get(str(table.get("interpolation")), _BICUBIC)
    mean, std = (_numbers(table.get(name) or 0.5, channels) for name in ("mean", "std"))
    note = f"data configuration of timm: {height} x {width} pixels"
    keeps_shape = resize[0] == resize[1] and table.get("crop_mode", "center") != "squash"
    shorter = resize[0] if keeps_shape else resize
    return Preprocessing(height, width, shorter, filter_, 1 / 255, mean, std, rounds=True, note=note)


def _built_for(model: nn.Module) -> tuple[int, int] | None:
    """Return the height and width of the pictures that the model was built for, if it says so."""
    embedding: Any = getattr(model, "patch_embed", None)
    size = getattr(embedding, "img_size", None) or getattr(getattr(model, "config", None), "image_size", None)
    try:
        return None if size is None else _pair(size)
    except (TypeError, ValueError):
        return None


def _resize(size: Any) -> tuple[int, int] | int:
    if isinstance(size, dict) and "shortest_edge" in size:
        return _pair(size["shortest_edge"])[0]
    return _pair(size)


def _pair(size: Any) -> tuple[int, int]:
    """Read a height and a width: 224, [224, 224] or {"height": 224, "width": 224}."""
    if isinstance(size, dict):
        size = (size["height"], size["width"]) if "height" in size else size["shortest_edge"]
    values = (size, size) if isinstance(size, int) else tuple(size)
    if len(values) != 2 or not all(isinstance(x, int) and 0 < x <= _MAX_SIZE for x in values):
        raise ValueError(f"expected a size from 1 to {_MAX_SIZE} pixels, got {str(size)[:60]}")
    return values[0], values[1]


def _numbers(value: Any, channels: int) -> list[float]:
    """Read one number per channel; one number counts for all channels."""
    values = [float(value)] if isinstance(value, int | float) else [float(x) for x in value]
    values = values * channels if len(values) == 1 else values
    if len(values) != channels or not all(map(math.isfinite, values)):
        raise ValueError(f"expected {channels} finite numbers, got {str(value)[:60]}")
    return values
