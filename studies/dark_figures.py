"""Give figures of Matplotlib dark colours where the reader prefers a dark page."""

from pathlib import Path

DARK = {  # colours of the figures -> on a dark page, those of the other pictures of the site
    "#ffffff": "#23262f",
    "#000000": "#f0f0f0",
    "#444444": "#d0d3da",
    "#777777": "#9aa0ae",
    "#0b7a75": "#4db6ac",
    "#2a7f3f": "#6fcf97",
    "#b5443c": "#ff8a65",
    "#b5531c": "#ff8a65",
    "#c08a1e": "#e0b04c",
    "#0b62a8": "#8ab4f8",
    "#3b6fb6": "#8ab4f8",
}
PAINT = ("fill", "stroke")


def follow_color_scheme(path: Path) -> None:
    """Add a style sheet to an SVG file that Matplotlib wrote. Colours that `DARK` does not list stay as they are."""
    svg = path.read_text(encoding="utf-8")
    used = [f"{name}: {light}" for light in DARK for name in PAINT if f"{name}: {light}" in svg]
    rules = [f'[style*="{paint}"] {{ {paint[:-7]}{DARK[paint[-7:]]} !important }}' for paint in used]
    text = f"svg {{ fill: {DARK['#000000']} }}"  # elements without a colour are black
    style = "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", text, *rules, "}", "</style>"])
    head, tag, rest = svg.partition("<defs>")
    path.write_text(f"{head}{style}\n {tag}{rest}", encoding="utf-8")
