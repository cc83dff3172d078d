"""Social cards: layout, colours, the PNG writer, and one-line errors."""

import io
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from repulsive.diagnostics.inspection import Inspection
from repulsive.diagnostics.verdict import verdict
from repulsive.errors import ConfigError
from repulsive.pages import card as cards
from repulsive.pages.card import HEIGHT, MARGIN, WIDTH, check_card, render_png, render_svg, write_card
from repulsive.pages.comparison_page import comparison_card
from repulsive.pages.data.card_atlas import card_tiles, colour, draw_atlas, palette, png
from repulsive.pages.data.pictures import Pictures
from repulsive.pages.inspection_page import inspection_card
from tests.pages import test_picture_map as on_pictures
from tests.pages.test_atlas import EVIL, made
from tests.pages.test_comparison_page import compared

SVG = "{http://www.w3.org/2000/svg}"


def made_card(name="tiny/model", text=""):
    card = inspection_card(made(), name)
    return replace(card, verdict=text) if text else card


def decoded(data):
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(data))
    return torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


def test_the_png_writer_keeps_every_pixel():
    pixels = torch.randint(256, (7, 11, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(decoded(png(pixels)), pixels)


def test_colours_are_those_of_the_page():
    assert colour("h0") == (255, 255, 255) and colour("ink") == (0x14, 0x18, 0x1F)
    shades = palette()
    assert shades[128].tolist() == list(colour("h0")) and shades[255].tolist() == list(colour("h9"))
    assert shades[1].tolist() == list(colour("l3")) and shades[0].tolist() == list(colour("ground"))
    with pytest.raises(ValueError, match="no colour --none"):
        colour("none")


def test_tiles_are_scaled_without_smoothing():
    drawn = torch.tensor([[[255, 1], [128, 0]]], dtype=torch.uint8)
    image = draw_atlas([[drawn, None]], [[1, 1]], 20)  # two layers of one head: tiles of 8 pixels and gaps of 2
    assert image.shape == (20, 10, 3)
    shades = palette()
    for row, column, byte in ((0, 0, 255), (3, 4, 1), (4, 3, 128), (7, 7, 0)):
        assert image[row, column].tolist() == shades[byte].tolist()
    assert image[8, 0].tolist() == list(colour("paper")) and image[10, 0].tolist() == list(colour("h1"))


def test_tiles_of_pictures_are_the_class_token_over_the_patches():
    inspection = on_pictures.made()
    tiles = card_tiles(inspection, Pictures(on_pictures.LAYOUT, ["a"], [b""]))
    weights = inspection.maps[0]["layer 1"][1, 0, 2:].double() * 14
    expected = (128 + 31.75 * weights.clamp(1 / 16, 16).log2()).round().clamp(1, 255)
    assert tiles[1].shape == (2, 3, 4) and tiles[1][1].flatten().tolist() == expected.tolist()


def test_the_svg_has_the_name_the_verdict_and_the_atlas():
    root = ET.fromstring(render_svg(made_card(EVIL)))
    assert (root.get("width"), root.get("height"), root.get("viewBox")) == ("1200", "630", "0 0 1200 630")
    lines = [node.text for node in root.iter(f"{SVG}text")]
    shown = verdict(made())
    assert "".join(lines[1:]).replace(" ", "").startswith((EVIL + shown).replace(" ", ""))
    assert lines[-1] == "3 layers, 11 heads · repulsive inspect"
    (image,) = root.iter(f"{SVG}image")
    assert image.get("href").startswith("data:image/png;base64,") and not list(root.iter(f"{SVG}script"))


@pytest.mark.parametrize(
    "name", ["x", "sentence-transformers/all-MiniLM-L6-v2", "w" * 300, "一个很长的模型名称" * 9], ids=len
)
@pytest.mark.parametrize("text", ["Short.", "many words of a long verdict " * 40])
def test_text_stays_in_its_column(name, text):
    for line in cards._layout(made_card(name, text), cards._estimated):
        assert MARGIN <= line.y <= HEIGHT - MARGIN and line.text
        assert cards._estimated(line.text, line.size, line.is_bold) <= WIDTH - 3 * MARGIN - 520


def test_names_break_after_slashes_and_hyphens():
    lines = cards._layout(made_card("HuggingFaceTB/SmolLM2-135M-Instruct"), cards._estimated)
    name = [line.text for line in lines if line.is_bold]
    assert name == ["HuggingFaceTB/", "SmolLM2-135M-", "Instruct"]
    assert cards._parts("a/b-c d - e/") == ["a/", "b-", "c ", "d ", "- ", "e/"]


def test_the_png_has_the_size_and_colours_of_a_card():
    pytest.importorskip("PIL")
    pixels = decoded(render_png(made_card()))
    assert pixels.shape == (HEIGHT, WIDTH, 3) and pixels[300, 5].tolist() == list(colour("accent"))
    assert pixels[0, -1].tolist() == list(colour("paper"))
    left = pixels[MARGIN : HEIGHT - MARGIN, MARGIN:600].int().sum(-1)
    assert (left < 300).any() and (pixels[100:500, 700:1100].int().sum(-1) < 700).any()  # text, and the atlas


def test_models_without_maps_and_two_models():
    plain = inspection_card(Inspection([], [("a", 0, "encoder", 2)], {}), "x")
    assert (
        plain.atlases == [[None]] and plain.sizes == "1 layer, 2 heads" and ET.fromstring(render_svg(plain)) is not None
    )
    both = comparison_card(compared(), "x")
    assert both.heads == [[4, 3, 4]] * 2 and both.sizes == "3 layers, 11 → 10 heads"
    assert both.atlases[1][0][1].max() == 0 and both.atlases[1][0][2].max() > 0  # head 1 is removed
    assert draw_atlas(both.atlases, both.heads, 520).shape == (6 * 82 + 28, 4 * 82, 3)
    assert draw_atlas([[None] * 30], [[9] * 30], 520).shape == (15 * 27, 19 * 27, 3)  # two columns of 15 layers
    assert draw_atlas([[None] * 64], [[128] * 64], 520).shape[1] <= 520
    assert ET.fromstring(render_svg(inspection_card(Inspection([], [], {}), "x"))) is not None


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"expected a file name that ends in \.svg or \.png"):
        check_card(tmp_path / "card.jpg")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_card(tmp_path / "file" / "card.svg", made_card())
    assert write_card(tmp_path / "new" / "card.svg", made_card()).read_text().startswith("<svg")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.ImageFont", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[images\]' -c constraints\.txt, or write a \.svg file"):
        check_card(tmp_path / "card.png")
