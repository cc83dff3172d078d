"""Frames of the film: positions of the heads of each layer, from the measurements of a training."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from repulsive.errors import SelectionError
from repulsive.monitoring.embedding import aligned_positions
from repulsive.monitoring.measurement import Measurement
from repulsive.pages.html.film import FilmLayer

MOST_FRAMES = 48


def film_layers(history: Iterable[Measurement]) -> tuple[list[int], list[FilmLayer]]:
    """Compute the steps and layers of the film, from measurements in which every layer with pairs was compared.

    Raises:
        SelectionError: there are fewer than two such measurements.
    """
    measured = [each for each in history if any(layer.pairs for layer in each.layers)]
    names = [{layer.name for layer in each.layers if layer.pairs} for each in measured]
    shared = set.intersection(*names) if names else set()
    if len(measured) < 2 or not shared:
        raise SelectionError(
            f"a film needs two measurements of layers with at least two comparable heads, got {len(measured)}; train "
            "longer or lower `every`"
        )
    every = -(-len(measured) // MOST_FRAMES)
    kept = [*measured[:-1:every], measured[-1]]
    layers = []
    for layer in kept[-1].layers:
        if layer.name in shared:
            cosines = [
                torch.tensor(
                    next(x for x in each.layers if x.name == layer.name).cosine, dtype=torch.float32, device="cpu"
                )
                for each in kept
            ]
            frames = [[(float(x), float(y)) for x, y in frame] for frame in aligned_positions(cosines)]
            layers.append(FilmLayer(layer.label, frames))
    return [each.step for each in kept], layers
