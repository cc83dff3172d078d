"""Figure 2: how many heads a translator would not miss."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.redundancy import head_ablation
from repulsive.diagnostics.similarity import of_weights
from repulsive.heads import find_heads
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.reporting import Measured
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.datasets import DataSet
from repulsive.lab.paper.figures import Drawn, Figure, label
from repulsive.lab.paper.running import Options, Tell
from repulsive.lab.paper.verdicts import Runs, over_seeds
from repulsive.lab.runs.panels import redundancy, redundant
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.translation.measure import accuracy_of
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.pages import Content

MOST = 2000  # sentences on which heads are taken away
REDUNDANT, AWAY = "redundant heads", "heads better away"


class Redundancy(Figure):
    """The change of accuracy, piece by piece, when a head is taken away, over all heads."""

    id = "redundancy"
    title = "what is lost without a head"
    source = "Figure 2"
    data = ("wmt14",)
    lead = "Each head is taken away once, without retraining."

    def draw(self, data: DataSet, ended: Mapping[str, Runs], options: Options, tell: Tell) -> Drawn:
        found: dict[str, dict[int, Measured]] = {}
        for name, runs in ended.items():
            found[label(name)] = {}
            for seed, run in runs.items():
                tell(f"{run.path}: taking heads away")
                found[label(name)][seed] = without_each(run, chosen_device(options.device))
        numbers = {}
        for name in ended:
            changes = {seed: run.change for seed, run in found[label(name)].items() if run.change is not None}
            numbers[name] = {
                REDUNDANT: {s: redundant(100 * c) for s, c in changes.items()},
                AWAY: {s: float((c > 0).double().mean()) for s, c in changes.items()},
            }
        seen = {
            (metric, "svgd", "ma"): over_seeds(numbers["svgd"][metric], numbers["ma"][metric])
            for metric in (REDUNDANT, AWAY)
        }
        return Drawn(Content("", panels=[redundancy(found, "test set")]), numbers, seen)


@torch.inference_mode()
def without_each(run: RunFolder, device: torch.device) -> Measured:
    """The accuracy of pieces on the test set without each head of a run, and nothing else."""
    task, model = load_run(run, device)
    assert isinstance(task, TranslationTask)
    part, groups = task.parts["test"], find_heads(model)
    count = min(MOST, len(part))
    found = head_ablation(model, accuracy_of(part, count), layers=find_attention_layers(model))
    return Measured(
        of_weights(groups),
        change=found.change[~found.change.isnan()],
        items=count,
        names=short_names(groups),
        by_layer=found.change,
        layers=found.layers,
    )
