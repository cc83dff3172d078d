"""Social card of an inspection: the model's name, the verdict and a small atlas, 1200 x 630, as SVG or PNG."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from repulsive.errors import ConfigError
from repulsive.extras import install_command
from repulsive.pages.data.card_atlas import colour, draw_atlas, png
from repulsive.pages.text import escaped, visible
from repulsive.safety import files as safe
from repulsive.safety.folders import check_creatable

WIDTH, HEIGHT, MARGIN = 1200, 630, 56
SUFFIXES = (".svg", ".png")
_ATLAS = 520  # width and height of the atlas
_COLUMN = WIDTH - 3 * MARGIN - _ATLAS  # width of the text
_LETTER, _BOLD_LETTER = 0.6, 0.66  # width of a letter relative to the font size: wide fonts must fit, too
_LINE = 1.3  # height of a line relative to the font size
_FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
Measure = Callable[[str, float, bool], float]  # text, font size, bold -> width


@dataclass(frozen=True, eq=False)
class Card:
    """Content of a card.

    Args:
        name: name of the model.
        verdict: the most important result as one sentence.
        sizes: numbers of layers and heads, as text.
        atlases: one list of layers per model, each layer uint8 [M, t, s] as from `pictures`; None for plain tiles.
        heads: number of heads of each layer of each model.
    """

    name: str
    verdict: str
    sizes: str
    atlases: Sequence[Sequence[Tensor | None]]
    heads: Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Line:
    text: str
    x: float
    y: float  # of the baseline
    size: float
    is_bold: bool
    shade: str  # name of a colour of the style sheet


def check_card(path: Path) -> None:
    """Check that a card can be written to a file, before anything is measured.

    Raises:
        ConfigError: the name does not end in .svg or .png, its folder cannot be written, or a PNG is wanted and Pillow
            is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--card {str(path)!r}: expected a file name that ends in .svg or .png")
    try:
        check_creatable(path)
    except OSError as error:
        raise ConfigError(f"--card {str(path)!r}: cannot be written ({error.strerror}); choose another file") from None
    if path.suffix.lower() == ".png":
        try:
            import PIL.ImageFont  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"a card as PNG needs Pillow; install it with: {install_command('images')}, or write a .svg file"
            ) from None


def write_card(path: Path, card: Card) -> Path:
    """Write a card as SVG or PNG, by the ending of the file name.

    Args:
        path: the file; its folder is created.
        card: the content.

    Raises:
        ConfigError: as `check_card`; or the file cannot be written.
    """
    check_card(path)
    content = render_svg(card).encode() if path.suffix.lower() == ".svg" else render_png(card)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safe.write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"--card {str(path)!r}: cannot be written ({error.strerror}); choose another file") from None
    return path


def render_svg(card: Card) -> str:
    """Render a card as a self-contained SVG file."""
    atlas = draw_atlas(card.atlases, card.heads, _ATLAS)  # [H, W, 3]
    left, top = _place(atlas)
    lines = "".join(
        f'<text x="{line.x:g}" y="{line.y:.1f}" font-size="{line.size:g}" font-weight="{700 if line.is_bold else 400}" '
        f'fill="{_hex(line.shade)}">{escaped(line.text)}</text>\n'
        for line in _layout(card, _estimated)
    )
    source = f"data:image/png;base64,{base64.b64encode(png(atlas)).decode()}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escaped(card.name)}: {escaped(card.verdict)}" font-family="{_FONT}">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{_hex("paper")}"/>\n'
        f'<rect width="12" height="{HEIGHT}" fill="{_hex("accent")}"/>\n{lines}'
        f'<image x="{left}" y="{top}" width="{atlas.shape[1]}" height="{atlas.shape[0]}" href="{source}"/>\n</svg>\n'
    )


def render_png(card: Card) -> bytes:
    """Render a card as a PNG file with Pillow."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (WIDTH, HEIGHT), _hex("paper"))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 11, HEIGHT), fill=_hex("accent"))
    fonts: dict[tuple[float, bool], Any] = {}

    def font(size: float, is_bold: bool) -> Any:
        if (size, is_bold) not in fonts:
            fonts[size, is_bold] = _load_font(size, is_bold)
        return fonts[size, is_bold]

    def measure(text: str, size: float, is_bold: bool) -> float:
        return float(draw.textlength(text, font=font(size, is_bold)))

    for line in _layout(card, measure):
        draw.text((line.x, line.y), line.text, fill=_hex(line.shade), font=font(line.size, line.is_bold), anchor="ls")
    atlas = draw_atlas(card.atlases, card.heads, _ATLAS)
    pixels = Image.frombytes("RGB", (atlas.shape[1], atlas.shape[0]), bytes(atlas.flatten().tolist()))
    image.paste(pixels, _place(atlas))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _layout(card: Card, measure: Measure) -> list[_Line]:
    """Place the lines of text in the left column; sizes shrink until everything fits."""
    name, verdict = visible(card.name), visible(card.verdict)
    lines = [_Line("Attention heads of", MARGIN, MARGIN + 26, 24, False, "soft")]
    size, words = _fitted(name, measure, (52, 46, 40, 34, 30, 26, 22), is_bold=True, most=3)
    y = MARGIN + 42.0
    for text in words:
        y += size * _LINE
        lines.append(_Line(text, MARGIN, y, size, True, "ink"))
    y += 26
    bottom = HEIGHT - MARGIN - 44
    for size in (34, 30, 27, 24, 21, 19, 17):
        words = _wrapped(verdict, size, False, measure)
        if y + len(words) * size * _LINE <= bottom:
            break
    most = max(1, int((bottom - y) / (size * _LINE)))
    words = words if len(words) <= most else [*words[: most - 1], words[most - 1][:-1].rstrip() + "…"]
    for text in words:
        y += size * _LINE
        lines.append(_Line(text, MARGIN, y, size, False, "ink"))
    last = f"{card.sizes} · repulsive inspect"
    size = next((size for size in (22, 20, 18, 16) if measure(last, size, False) <= _COLUMN), 14)
    return [*lines, _Line(last, MARGIN, HEIGHT - MARGIN, size, False, "soft")]


def _fitted(
    text: str, measure: Measure, sizes: Sequence[float], *, is_bold: bool, most: int
) -> tuple[float, list[str]]:
    """Choose the largest font size at which no part is broken and there are at most `most` lines; the rest is cut."""
    for size in sizes:
        words = _wrapped(text, size, is_bold, measure)
        is_whole = all(measure(part.strip(), size, is_bold) <= _COLUMN for part in _parts(text))
        if len(words) <= most and (is_whole or size == sizes[-1]):
            return size, words
    return sizes[-1], [*words[: most - 1], words[most - 1][:-1] + "…"]


def _wrapped(text: str, size: float, is_bold: bool, measure: Measure) -> list[str]:
    """Break text into lines of the width of the column; parts that are too long are broken anywhere."""
    lines = [""]
    for part in _parts(text):
        joined = f"{lines[-1]}{part}"
        if measure(joined.strip(), size, is_bold) <= _COLUMN:
            lines[-1] = joined
            continue
        lines += [""] if lines[-1] else []
        lines[-1] = part
        while measure(lines[-1], size, is_bold) > _COLUMN:
            fits = max(
                1, next(n for n in range(len(lines[-1])) if measure(lines[-1][: n + 1], size, is_bold) > _COLUMN)
            )
            lines[-1:] = [lines[-1][:fits], lines[-1][fits:]]
    return [line.strip() for line in lines]


def _parts(text: str) -> list[str]:
    """Split text where a line may end: after spaces, and after a slash or hyphen inside a word."""
    return re.findall(r"[^\s/-]*[/-](?=\S)|\S+\s*", text)


def _estimated(text: str, size: float, is_bold: bool) -> float:
    """Estimate the width of text from above: East Asian letters are square."""
    share = _BOLD_LETTER if is_bold else _LETTER
    return sum(size * (1.0 if letter >= "\u2e80" else share) for letter in text)


def _place(atlas: Tensor) -> tuple[int, int]:
    """Left and top of the atlas, centred in its square on the right."""
    height, width = int(atlas.shape[0]), int(atlas.shape[1])
    return WIDTH - MARGIN - _ATLAS + (_ATLAS - width) // 2, (HEIGHT - height) // 2


def _load_font(size: float, is_bold: bool) -> Any:
    """Load DejaVu Sans if Matplotlib is installed, which has it, else Pillow's own font."""
    from PIL import ImageFont

    try:
        from matplotlib import get_data_path

        name = "DejaVuSans-Bold.ttf" if is_bold else "DejaVuSans.ttf"
        return ImageFont.truetype(str(Path(get_data_path(), "fonts", "ttf", name)), size)
    except (ImportError, OSError):
        return ImageFont.load_default(size)


def _hex(shade: str) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour(shade))
