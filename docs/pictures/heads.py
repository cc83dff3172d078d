"""Draw heads.svg: four heads that start with nearly equal directions and repel each other into a tetrahedron.

    python docs/pictures/heads.py            # writes heads.svg into this folder

The path is computed by the SVGD of the package on the sphere. The seed is fixed: the file changes only with the rule.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from repulsive import SVGD

HEADS, STEPS, RATE = 4, 600, 0.05
FRAMES = 72
SECONDS = 12
OPENED = 0.6  # share of the animation in which heads open; afterwards only the view turns
SIZE, RADIUS = 260, 104  # of the left half, in pixels
CHART = (300, 70, 200, 130)  # left, top, width, height

STYLE = """
  .ball { fill: #00796b; fill-opacity: .05; stroke: #9a9a92 } .edge { stroke: #00796b; stroke-opacity: .45 }
  .arm { stroke: #d84315; stroke-width: 3; stroke-linecap: round } .tip { fill: #d84315 } .axis { stroke: #9a9a92 }
  .curve { fill: none; stroke: #00796b; stroke-width: 2 } .now { fill: #d84315 }
  .limit { stroke: #9a9a92; stroke-dasharray: 3 4 }
  text { fill: #5a5a55; font: 13px sans-serif } .title { fill: #202020; font-weight: bold }
  .still { display: none }
  @media (prefers-color-scheme: dark) {
    .ball { fill: #4db6ac; stroke: #6f7484 } .edge { stroke: #4db6ac; stroke-opacity: .6 }
    .arm { stroke: #ff8a65 } .tip, .now { fill: #ff8a65 } .axis, .limit { stroke: #6f7484 } .curve { stroke: #4db6ac }
    text { fill: #b4b8c4 } .title { fill: #f0f0f0 }
  }
  @media (prefers-reduced-motion: reduce) { .moving { display: none } .still { display: inline } }
"""


def path() -> Tensor:
    """Move four unit vectors in space by SVGD on the sphere, without a loss: [STEPS + 1, 4, 3]."""
    generator = torch.Generator().manual_seed(5)
    direction = torch.tensor([0.25, 0.9, 0.35], dtype=torch.float64)
    theta = direction + 0.06 * torch.randn(HEADS, 3, generator=generator, dtype=torch.float64)
    theta = (theta / theta.norm(dim=1, keepdim=True)).requires_grad_()  # [4, 3]
    rule = SVGD(stepsize=1.0, alpha=1.0, space="sphere")
    optimizer = torch.optim.SGD([theta], lr=RATE)
    positions = [theta.detach().clone()]
    for _ in range(STEPS):
        theta.grad = rule.gradient(theta.detach(), torch.zeros_like(theta))
        optimizer.step()
        positions.append(theta.detach().clone())
    return torch.stack(positions)


def largest_cosines(positions: Tensor) -> Tensor:
    """Largest cosine between two heads at every step: [steps, 4, 3] -> [steps]."""
    unit = positions / positions.norm(dim=-1, keepdim=True)
    row, column = torch.triu_indices(HEADS, HEADS, offset=1)
    return (unit @ unit.mT)[:, row, column].amax(-1)


def frame_steps(cosines: Tensor) -> list[int]:
    """Choose the step of each frame so that the largest cosine falls at the same speed in all frames of the opening."""
    opening = round(OPENED * FRAMES)
    fallen = (cosines[0] - cosines) / (cosines[0] - cosines[-1])  # 0 at the start, 1 at the end
    chosen = [int((fallen >= share / opening - 1e-9).nonzero()[0]) for share in range(opening)]
    return [*chosen, *[len(cosines) - 1] * (FRAMES - opening + 1)]


def project(points: Tensor, share: float) -> Tensor:
    """Turn points [4, 3] about the vertical axis and drop the depth: pixels and depth, [4, 3]."""
    angle, tilt = 2 * math.pi * share, 0.35
    unit = points / points.norm(dim=-1, keepdim=True)
    x = unit[:, 0] * math.cos(angle) + unit[:, 2] * math.sin(angle)
    z = unit[:, 2] * math.cos(angle) - unit[:, 0] * math.sin(angle)
    y, z = unit[:, 1] * math.cos(tilt) - z * math.sin(tilt), unit[:, 1] * math.sin(tilt) + z * math.cos(tilt)
    return torch.stack([SIZE / 2 + RADIUS * x, SIZE / 2 - RADIUS * y, z], dim=1)


def draw(positions: Tensor) -> str:
    """Draw the animation as one SVG, and its last frame for readers who prefer reduced motion."""
    cosines = largest_cosines(positions)
    steps = frame_steps(cosines)
    frames = [project(positions[step], frame / FRAMES) for frame, step in enumerate(steps)]
    values = torch.stack(frames)  # [FRAMES + 1, 4, 3]
    left, top, width, height = CHART
    low = float(cosines[-1])

    def chart_point(step: int) -> tuple[float, float]:
        return left + width * step / STEPS, top + height * (1 - (float(cosines[step]) - low) / (1 - low))

    curve = " ".join("{:.1f},{:.1f}".format(*chart_point(step)) for step in range(0, STEPS + 1, 6))
    now = torch.tensor([chart_point(step) for step in steps], dtype=torch.float64)  # [FRAMES + 1, 2]
    about = "Four attention heads start with nearly equal directions and repel each other into a tetrahedron"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 {SIZE}" width="520" role="img">',
        f"<title>{about}</title>",
        f"<style>{STYLE}</style>",
        f'<circle class="ball" cx="{SIZE // 2}" cy="{SIZE // 2}" r="{RADIUS}"/>',
        f'<text class="title" x="{left}" y="36">Four heads repel each other</text>',
        f'<text x="{left}" y="54">largest cosine between two heads</text>',
        f'<path class="axis" fill="none" d="M{left} {top}V{top + height}H{left + width}"/>',
        f'<path class="limit" d="M{left} {top + height}H{left + width}"/>',
        f'<polyline class="curve" points="{curve}"/>',
        f'<text x="{left - 6}" y="{top + 5}" text-anchor="end">1</text>',
        f'<text x="{left - 6}" y="{top + height + 4}" text-anchor="end">−1/3</text>',
        f'<text x="{left}" y="{top + height + 20}">{STEPS} steps of SVGD on the sphere</text>',
        '<g class="moving">',
        *_figure(values, now),
        "</g>",
        '<g class="still">',
        *_figure(values[-1:], now[-1:]),
        "</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _figure(values: Tensor, now: Tensor) -> list[str]:
    """Draw edges, arms, tips and the point of the chart; with several frames, animate them."""
    lines = []
    for first in range(HEADS):
        for second in range(first + 1, HEADS):
            ends = {"x1": values[:, first, 0], "y1": values[:, first, 1]}
            ends |= {"x2": values[:, second, 0], "y2": values[:, second, 1]}
            lines.append(_element("line", "edge", {}, ends))
    for head in range(HEADS):
        fixed = {"x1": SIZE // 2, "y1": SIZE // 2}
        lines.append(_element("line", "arm", fixed, {"x2": values[:, head, 0], "y2": values[:, head, 1]}))
    for head in range(HEADS):
        moving = {"cx": values[:, head, 0], "cy": values[:, head, 1], "r": 6 + 2 * values[:, head, 2]}
        lines.append(_element("circle", "tip", {}, moving))
    lines.append(_element("circle", "now", {"r": 5}, {"cx": now[:, 0], "cy": now[:, 1]}))
    return lines


def _element(tag: str, kind: str, fixed: dict[str, int], moving: dict[str, Tensor]) -> str:
    attributes = "".join(f' {name}="{value}"' for name, value in fixed.items())
    attributes += "".join(f' {name}="{float(values[-1]):.1f}"' for name, values in moving.items())
    if len(next(iter(moving.values()))) == 1:
        return f'<{tag} class="{kind}"{attributes}/>'
    animations = "".join(_animation(name, values.tolist()) for name, values in moving.items())
    return f'<{tag} class="{kind}"{attributes}>{animations}</{tag}>'


def _animation(name: str, values: Sequence[float]) -> str:
    listed = ";".join(f"{value:.1f}" for value in values)
    return f'<animate attributeName="{name}" dur="{SECONDS}s" repeatCount="indefinite" values="{listed}"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    (parser.parse_args().out / "heads.svg").write_text(draw(path()), encoding="utf-8")


if __name__ == "__main__":
    main()
