"""Read pictures from a folder and prepare them for a vision transformer."""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repulsive.diagnostics.hooks.capture import capture
from repulsive.diagnostics.loading.import_path import LoadError
from repulsive.diagnostics.loading.model import LoadedModel
from repulsive.diagnostics.loading.preprocessing import Preprocessing, read_preprocessing
from repulsive.diagnostics.patches import PatchLayout, check_layout, patch_embedding, patch_layout
from repulsive.errors import DataError, RepulsiveError, short_message
from repulsive.extras import install_command

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # other formats of Pillow may run external programs
MAX_PIXELS = 100_000_000
SHOWN = 4  # pictures that a page shows
_BATCH_SIZE, _LARGE = SHOWN, 400  # one picture per batch if it has more tokens than that
_TOWERS = ("vision_model", "vision_tower", "timm_model")  # parts of a larger model that read pictures


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Pictures as a vision transformer reads them.

    Args:
        model: the model, or the part of it that reads pictures.
        part: name of that part; "" if it is the whole model.
        batches: inputs of the model.
        names: file names, in the order of the batches.
        pictures: the part of each picture that the patches cover, as JPEG files.
        layout: positions of patches and special tokens.
        note: description of the preprocessing.
    """

    model: nn.Module
    part: str
    batches: list[Any]
    names: list[str]
    pictures: list[bytes]
    layout: PatchLayout
    note: str


def read_images(path: Path, limit: int) -> list[tuple[str, Any]]:
    """Read the first pictures of a folder in the order of their names, or one picture file.

    Args:
        path: a folder, or a PNG, JPEG, WebP or BMP file.
        limit: maximum number of pictures.

    Returns:
        (file name, Pillow image) pairs.

    Raises:
        DataError: Pillow is missing, there is no picture, or a picture cannot be read.
    """
    try:
        import PIL.Image
    except ImportError:
        raise DataError(f"reading pictures needs Pillow; install it with: {install_command('images')}") from None
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    elif path.is_file():
        files = [path]
    else:
        raise DataError(f"--images {str(path)!r}: no such folder or file; name a folder of PNG or JPEG pictures")
    if not files:
        raise DataError(f"--images {str(path)!r}: no picture in this folder; expected files {', '.join(SUFFIXES)}")
    result = []
    for file in files[:limit]:
        try:
            with PIL.Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{str(file)!r} has {image.width} x {image.height} pixels; make it smaller")
                result.append((file.name, _upright(image)))
        except RepulsiveError:
            raise
        except Exception as error:  # damaged files raise many types
            raise DataError(f"cannot read the picture {str(file)!r}: {short_message(error)}") from None
    return result


def prepare_images(loaded: LoadedModel, images: Sequence[tuple[str, Any]]) -> ImageInputs:
    """Resize and normalise pictures, batch them, and find the positions of the patches.

    Args:
        loaded: the model; the preprocessing is that of its folder or of timm.
        images: result of `read_images`.

    Raises:
        DataError: the model does not read pictures, or does not attend between all patches.
        LoadError: the model does not run on the pictures.
    """
    model, part = vision_part(loaded.model)
    channels = patch_embedding(model).in_channels
    steps = read_preprocessing(loaded.folder, model, channels)
    prepared = [steps.apply(image) for _, image in images]
    height, width = steps.height, steps.width
    layout = patch_layout(model, height, width)
    size = 1 if layout.tokens > _LARGE else _BATCH_SIZE
    tensors = [steps.normalise(image) for image in prepared]
    batches = [_inputs(model, torch.stack(tensors[at : at + size]), steps) for at in range(0, len(tensors), size)]
    try:
        captured = capture(model, _inputs(model, tensors[0][None], steps), strict=False)
    except RepulsiveError:
        raise
    except Exception as error:
        raise LoadError(f"the model does not run on pictures of {height} x {width}: {short_message(error)}") from error
    if captured.hidden:
        raise DataError(captured.hidden[0])
    check_layout(layout, [weights for each in captured.layers for weights in each.weights], type(model).__name__)
    pictures = [_jpeg(image, layout) for image in prepared[:SHOWN]]
    return ImageInputs(model, part, batches, [name for name, _ in images], pictures, layout, steps.note)


def vision_part(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the part of a model that reads pictures, and its name; "" for the whole model."""
    reads = getattr(model, "main_input_name", "pixel_values")
    required = inspect.signature(model.forward).parameters
    for name, module in model.named_modules():
        if name and name.rpartition(".")[2] in _TOWERS:
            return module, name
    if reads != "pixel_values" or "input_ids" in required:
        raise DataError(f"{type(model).__name__} reads {reads}, not pictures; --images needs a vision transformer")
    return model, ""


def _inputs(model: nn.Module, pixels: Tensor, steps: Preprocessing) -> Any:
    """Make the arguments of a model: `pixel_values` for transformers, else the tensor itself."""
    parameter = next(model.parameters())
    pixels = pixels.to(parameter.device, parameter.dtype)
    parameters = inspect.signature(model.forward).parameters
    if "pixel_values" not in parameters:
        return pixels
    inputs: dict[str, Any] = {"pixel_values": pixels}
    if steps.resizes_positions and "interpolate_pos_encoding" in parameters:
        inputs["interpolate_pos_encoding"] = True
    return inputs


def _upright(image: Any) -> Any:
    """Decode a picture, rotated as its camera says; transparent parts become white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image)
        image = ground
    return image.convert("RGB")


def _jpeg(image: Any, layout: PatchLayout) -> bytes:
    file = io.BytesIO()
    down, across = layout.patch
    image.crop((0, 0, layout.columns * across, layout.rows * down)).convert("RGB").save(file, "JPEG", quality=85)
    return file.getvalue()
