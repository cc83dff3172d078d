"""Measure the cost of an update against the number of heads, the width and the number of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from repulsive import SVGD
from repulsive.heads.layout import HeadGroup, HeadSlice
from repulsive.lab.bench.clock import copy_rate, median_time, replayed
from repulsive.repulsion.backends.choose import Update
from repulsive.repulsion.backends.inputs import StepInputs

HEADS = (2, 4, 8, 16, 32, 64)
WIDTHS = (256, 512, 1024, 2048, 4096)
LAYERS = (1, 2, 4, 8, 16)
CACHE = 2**27  # bytes: more than the cache of a GPU


class Projections(nn.Module):
    """A model of query, key and value projections only, with random gradients."""

    def __init__(self, width: int, heads: int, layers: int, device: torch.device) -> None:
        super().__init__()
        self.groups = []
        rows = torch.arange(width).view(heads, -1)
        for layer in range(layers):
            for part in "qkv":
                name = f"{part}{layer}"
                weight = nn.Parameter(torch.randn(width, width, device=device) / width**0.5)
                weight.grad = torch.randn_like(weight) * 1e-3
                self.register_parameter(name, weight)
                own = HeadSlice(self, name, name, rows)
                self.groups.append(HeadGroup(name, layer, part, "encoder", "", "bench", (own,)))


def measure_growth(device: str, quick: bool = False) -> dict[str, Any]:
    """Measure one update along three axes, and compute its lower bound, the time of four passes over memory.

    Args:
        device: "cpu" or "cuda".
        quick: only two small points for each axis, for tests.
    """
    place = torch.device(device)
    rate = copy_rate(place)
    settings = {
        "heads": [(512, heads, 6) for heads in HEADS],
        "width": [(width, 8, 2) for width in WIDTHS],
        "layers": [(512, 8, layers) for layers in LAYERS],
    }
    axes: dict[str, list[dict[str, float]]] = {}
    for axis, points in settings.items():
        axes[axis] = []
        for width, heads, layers in points[:2] if quick else points:
            numbers = 3 * layers * width * width
            floor = 16 * numbers / rate
            point = {"width": width, "heads": heads, "layers": layers, "floor_seconds": floor}
            axes[axis].append(point | _seconds(width, heads, layers, place, repeats=3 if quick else 20))
    return {"copy_bytes_per_second": rate, "axes": axes}


def _seconds(width: int, heads: int, layers: int, place: torch.device, repeats: int) -> dict[str, float]:
    """Measure seconds of one update called from Python; on a GPU also on the device alone, with a cold cache."""
    on_gpu = place.type == "cuda"
    copies = min(16, CACHE // (8 * 3 * layers * width * width) + 1) if on_gpu else 1
    updates = [Update(Projections(width, heads, layers, place).groups, 0) for _ in range(copies)]
    runs = [lambda update=update: update.run(StepInputs(SVGD(), 1)) for update in updates]
    for run in runs:
        run()
    seconds = {"seconds": median_time(runs[0], place, repeats)}
    if on_gpu:
        seconds["device_seconds"] = replayed(runs)
    return seconds


def draw_growth(growth: dict[str, Any], path: str) -> None:
    """Draw time against size in three panels, with the lower bound, four passes over the weights; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.7), layout="constrained")
    labels = {
        "heads": "heads M (width 512, 6 layers)",
        "width": "width (8 heads, 2 layers)",
        "layers": "layers (width 512, 8 heads)",
    }
    for position, (axis, points) in enumerate(growth["axes"].items(), start=1):
        panel = figure.add_subplot(1, 3, position)
        x = [point[axis] for point in points]
        if "device_seconds" in points[0]:
            panel.loglog(x, [1e3 * p["device_seconds"] for p in points], "o-", color="#0b6e8a", label="on the device")
        panel.loglog(x, [1e3 * p["seconds"] for p in points], "o:", color="#b3541e", label="called from Python")
        panel.loglog(x, [1e3 * p["floor_seconds"] for p in points], "--", color="#555555", label="lower bound")
        panel.set_xlabel(labels[axis])
        panel.set_xticks(x, [str(value) for value in x])
        panel.minorticks_off()
        panel.grid(visible=True, which="major", alpha=0.3)
        panel.set_title(f"cost against {axis}")
        if position == 1:
            panel.set_ylabel("milliseconds of one update")
            figure.legend(*panel.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    figure.savefig(path)
