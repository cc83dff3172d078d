"""Animated SVG of points that move: one panel per layer, a timeline below, and a still picture for reduced motion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from repulsive.pages.text import escaped, shortened

Position = tuple[float, float]
SIZE, GAP, TOP, FOOT, SIDE = 176, 12, 62, 56, 16  # of panels and margins, in SVG units
SECONDS, MOVING = 14.0, 0.88  # length of the film; the rest of it shows the last frame
TRAIL = 8  # points of a path in the still picture
_LIGHT = ("#4a505a", "#8f6400", "#0072b2", "#c45100", "#00825e", "#a8457f", "#7a4fc0", "#14181f")
_DARK = ("#aab2c0", "#e8b23a", "#58b4f0", "#ff8f4d", "#2fc499", "#e58fc0", "#b79cf5", "#e9ecf2")
_COLOURS = len(_LIGHT)


@dataclass(frozen=True)
class FilmLayer:
    """Positions of the heads of one layer over time.

    Args:
        name: title of the panel.
        frames: positions of each head, per frame; one for each step of the film.
    """

    name: str
    frames: Sequence[Sequence[Position]]


def film(title: str, steps: Sequence[int], layers: Sequence[FilmLayer]) -> str:
    """Render the film as an SVG document. Browsers that prefer reduced motion show the last frame and the paths.

    Args:
        title: title of the film.
        steps: step of each frame, increasing; at least two.
        layers: layers with one frame for each step.
    """
    columns = _columns(len(layers))
    rows = math.ceil(len(layers) / columns)
    width = 2 * SIDE + columns * SIZE + (columns - 1) * GAP
    height = TOP + rows * (SIZE + 24 + GAP) + FOOT
    largest = max(abs(x) for layer in layers for frame in layer.frames for point in frame for x in point) or 1.0
    times = [MOVING * (step - steps[0]) / (steps[-1] - steps[0]) for step in steps]
    keyframes, panels = "", ""
    for number, layer in enumerate(layers):
        left = SIDE + (number % columns) * (SIZE + GAP)
        top = TOP + (number // columns) * (SIZE + 24 + GAP)
        rules, panel = _panel(number, layer, times, largest)
        keyframes += rules
        panels += f'<g transform="translate({left} {top})">{panel}</g>\n'
    timeline, rule = _timeline(steps, times, width, height)
    words = f"Heads of {len(layers)} layers move from step {steps[0]} to step {steps[-1]}; close heads are similar."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title about">\n<title id="title">{escaped(title)}</title>\n'
        f'<desc id="about">{escaped(words)}</desc>\n<style>{_style()}{keyframes}{rule}</style>\n'
        f'<rect class="paper" width="{width}" height="{height}"/>\n'
        f'<text class="title" x="{SIDE}" y="26">{escaped(shortened(title, width // 10))}</text>\n'
        f'<text class="soft" x="{SIDE}" y="46">Close heads have similar attention logits.</text>\n'
        f"{panels}{timeline}</svg>\n"
    )


def _columns(count: int) -> int:
    """Choose a number of columns, at least two, for a grid that is wider than high and has few empty cells."""
    choices = range(max(2, math.ceil(math.sqrt(count))), max(2, math.ceil(math.sqrt(2 * count))) + 1)
    return min(choices, key=lambda columns: -count % columns)


def _panel(number: int, layer: FilmLayer, times: Sequence[float], largest: float) -> tuple[str, str]:
    """Render one layer: its keyframes and its markup."""
    scale = (SIZE / 2 - 14) / largest
    pixels = [[(SIZE / 2 + scale * x, SIZE / 2 - scale * y) for x, y in frame] for frame in layer.frames]
    heads = range(len(pixels[0]))
    rules, trails, dots = "", "", ""
    for head in heads:
        path = [frame[head] for frame in pixels]
        colour, name = head % _COLOURS, f"l{number}h{head}"
        stops = "".join(f"{100 * t:.4g}%{{{_move(p)}}}" for t, p in zip(times, path, strict=True))
        rules += (
            f"@keyframes {name}{{{stops}100%{{{_move(path[-1])}}}}}#{name}{{animation-name:{name};{_move(path[-1])}}}"
        )
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*path[: -1 : -(-len(path) // TRAIL)], path[-1]])
        trails += f'<path class="trail s{colour}" d="M{line}"/>'
        dot = f'<circle class="f{colour}" r="8.5"/><text class="number" y="4">{head}</text>'
        dots += f'<g class="head" id="{name}">{dot}</g>'
    name = f'<text class="name" x="2" y="-7">{escaped(shortened(layer.name, 24))}</text>'
    frame = f'<rect class="frame" width="{SIZE}" height="{SIZE}" rx="6"/>'
    return rules, f'<g transform="translate(0 18)">{name}{frame}{trails}{dots}</g>'


def _timeline(steps: Sequence[int], times: Sequence[float], width: float, height: float) -> tuple[str, str]:
    start, end, y = SIDE + 8, width - SIDE - 8, height - 34
    label = f'<text class="soft" y="{y + 24}"'
    markup = (
        f'<path class="frame" d="M{start} {y}H{end}"/>{label} x="{start - 6}">step {steps[0]:,}</text>'
        f'{label} x="{end + 6}" text-anchor="end">step {steps[-1]:,}</text>'
        f'<g class="head" id="now"><circle class="now" r="6"/></g>\n'
    )
    first, last = _move((start, y)), _move((end, y))
    return markup, _animation("now", f"0%{{{first}}}{100 * times[-1]:.4g}%{{{last}}}", last)


def _animation(name: str, stops: str, last: str) -> str:
    """Make the rules of one moving element; without animation it stays at its last position."""
    return f"@keyframes {name}{{{stops}100%{{{last}}}}}#{name}{{animation-name:{name};{last}}}"


def _move(point: Position) -> str:
    return f"transform:translate({point[0]:.1f}px,{point[1]:.1f}px)"


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(palette))

    def scheme(paper: str, ink: str, soft: str, rule: str, palette: Sequence[str]) -> str:
        return (
            f".paper{{fill:{paper}}}.title,.name,.now{{fill:{ink}}}.soft{{fill:{soft}}}.frame{{stroke:{rule}}}"
            f".number{{fill:{paper}}}.head circle{{stroke:{paper}}}{colours(palette)}"
        )

    return (
        "text{font:13px system-ui,sans-serif}.title{font-size:18px;font-weight:600}.name{font-weight:600}"
        ".number{font-size:10px;font-weight:600;text-anchor:middle}.frame{fill:none}.head circle{stroke-width:1}"
        ".trail{fill:none;stroke-width:1.5;opacity:0}"
        f".head{{animation:{SECONDS:g}s linear infinite}}"
        + scheme("#ffffff", "#14181f", "#565e6c", "#d9dde5", _LIGHT)
        + f"@media (prefers-color-scheme:dark){{{scheme('#12151b', '#e9ecf2', '#a4adbc', '#363d4a', _DARK)}}}"
        "@media (prefers-reduced-motion:reduce){.head{animation:none!important}.trail{opacity:.5}}"
        "@media print{.head{animation:none!important}.trail{opacity:.5}}"
    )
