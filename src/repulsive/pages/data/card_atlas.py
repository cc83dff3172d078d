"""Small atlas as an image: tiles of all heads in the colours of the pages, and a writer of PNG files."""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from repulsive.diagnostics.inspection import Inspection
from repulsive.pages.data.atlas import UNIFORM, pictures, ratio_bytes
from repulsive.pages.data.pictures import Pictures

_GAP = 2  # pixels between tiles
_BETWEEN = 28  # pixels between the atlases of two models
_MAX_COLUMNS = 4  # of layers
_SIZE = 24  # largest number of rows and columns of a picture


def card_tiles(inspection: Inspection, shown: Pictures | None = None) -> list[Tensor | None]:
    """Draw the heads of each layer on the first input, uint8 [M, t, s]; None for layers without maps.

    Args:
        inspection: result of `inspect_heads`.
        shown: the inputs, if they are pictures: tiles show the attention of the class token, or the mean over patches.
    """
    maps = inspection.maps[0] if inspection.maps else {}
    result: list[Tensor | None] = []
    for name, *_ in inspection.layers:
        weights = maps.get(name)
        if weights is not None and shown is not None:
            is_square = weights.shape[1:] == (shown.layout.tokens,) * 2
            row = shown.layout.default_query(weights.double()) * shown.layout.tokens if is_square else None  # [M, S]
            result.append(None if row is None else ratio_bytes(shown.layout.on_picture(row)))
        else:
            result.append(None if weights is None else pictures(weights, _SIZE))
    return result


def draw_atlas(atlases: Sequence[Sequence[Tensor | None]], heads: Sequence[Sequence[int]], size: int) -> Tensor:
    """Draw the atlases of one or two models below each other; the layers of deep models continue in a second column.

    Args:
        atlases: for each model the bytes of each layer [M, t, s]; None for plain tiles.
        heads: for each model the number of heads of each layer.
        size: largest width and height in pixels.

    Returns:
        uint8 [height, width, 3].
    """
    widest = max((count for model in heads for count in model), default=1)
    room = size - _BETWEEN * (len(heads) - 1)

    def pitch(columns: int) -> int:
        """Distance of two tiles in pixels, with one empty tile between columns of layers."""
        rows = sum(math.ceil(len(model) / columns) for model in heads) or 1
        return max(2, min(size // (columns * (widest + 1) - 1), room // rows))

    columns = max(range(1, _MAX_COLUMNS + 1), key=lambda count: (pitch(count), -count))
    step, paper = pitch(columns), torch.tensor(colour("paper"), dtype=torch.uint8)
    tile, width = max(1, step - _GAP), (columns * (widest + 1) - 1) * step
    parts = []
    for number, (layers, counts) in enumerate(zip(atlases, heads, strict=True)):
        if number:
            parts.append(paper.expand(_BETWEEN, width, 3))
        rows = math.ceil(len(counts) / columns)
        part = paper.repeat(rows * step, width, 1)
        for layer, (drawn, count) in enumerate(zip(layers, counts, strict=True)):
            top, start = layer % rows * step, layer // rows * (widest + 1) * step
            for left in range(start, start + count * step, step):
                head = (left - start) // step
                square = _tile(None if drawn is None else drawn[head], tile)
                part[top : top + tile, left : left + tile] = square
        parts.append(part)
    whole = torch.cat(parts) if any(map(len, parts)) else paper.expand(1, width, 3)
    return whole[:size, :size].contiguous()


def png(pixels: Tensor) -> bytes:
    """Encode uint8 [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.flatten(1)], 1)  # filter type 0, then pixels
    data = zlib.compress(bytes(rows.flatten().tolist()), 9)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@cache
def colour(name: str) -> tuple[int, int, int]:
    """Return a colour of the light theme of the style sheet as red, green and blue."""
    style = (files("repulsive.pages.html") / "page.css").read_text(encoding="utf-8")
    match = re.search(rf"--{name}: #([0-9a-f]{{6}});", style)
    if match is None:
        raise ValueError(f"page.css has no colour --{name}")
    return int(match[1][:2], 16), int(match[1][2:4], 16), int(match[1][4:], 16)


@cache
def palette() -> Tensor:
    """Return the colour of each byte of a picture, uint8 [256, 3], as `atlas_data.js` draws it."""
    shades = [colour("ground")]
    for byte in range(1, 256):
        less, more = round(3 * (UNIFORM - byte) / 127), round(9 * (byte - UNIFORM) / 127)
        shades.append(colour(f"l{less}" if byte < UNIFORM and less else f"h{max(0, more)}"))
    return torch.tensor(shades, dtype=torch.uint8)


def _tile(drawn: Tensor | None, size: int) -> Tensor:
    """Scale a picture [t, s] to a square of `size` pixels without smoothing, [size, size, 3]; None: a plain square."""
    if drawn is None:
        return torch.tensor(colour("h1"), dtype=torch.uint8).expand(size, size, 3)
    at = [(torch.arange(size) * length) // size for length in drawn.shape]
    return palette()[drawn[at[0]][:, at[1]].long()]
