"""Figure 2: the change of a translator's accuracy when one head is removed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from repulsive.diagnostics.hooks.attention_layers import find_attention_layers
from repulsive.diagnostics.layer_names import short_names
from repulsive.diagnostics.redundancy import head_ablation, pruning_curve
from repulsive.diagnostics.similarity import of_weights
from repulsive.heads import find_heads
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.reporting import Measured
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.datasets import Dataset
from repulsive.lab.paper.differences import Runs, over_seeds
from repulsive.lab.paper.figure import Figure, FigureData
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import label_of
from repulsive.lab.runs.panels import pruning, redundancy, redundant
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.translation.measure import accuracy_of
from repulsive.lab.systems.translation.task import TranslationTask
from repulsive.pages import Content

MAX_SENTENCES = 2000  # maximum number of sentences on which heads are ablated
REDUNDANT, HARMFUL = "redundant heads", "heads better away"  # metrics of `published.toml`


class Redundancy(Figure):
    """Distribution over heads of the change in token accuracy when a head is removed."""

    id = "redundancy"
    title = "change in accuracy when a head is removed"
    source = "Figure 2"
    paper_datasets = ("wmt14",)
    lead = "Each head is removed in turn, without retraining."

    def measure(self, dataset: Dataset, finished: Mapping[str, Runs], options: Options, log: Log) -> FigureData:
        measured: dict[str, dict[int, Measured]] = {}
        for name, runs in finished.items():
            measured[label_of(name)] = {}
            for seed, run in runs.items():
                log(f"{run.path}: removing one head at a time")
                measured[label_of(name)][seed] = ablate_each_head(run, chosen_device(options.device))
        numbers = {}
        for name in finished:
            changes = {seed: run.change for seed, run in measured[label_of(name)].items() if run.change is not None}
            numbers[name] = {
                REDUNDANT: {seed: redundant(100 * change) for seed, change in changes.items()},
                HARMFUL: {seed: float((change > 0).double().mean()) for seed, change in changes.items()},
            }
        comparisons = {
            (metric, "svgd", "ma"): over_seeds(numbers["svgd"][metric], numbers["ma"][metric])
            for metric in (REDUNDANT, HARMFUL)
        }
        panels = [redundancy(measured, "test set"), pruning(measured)]
        return FigureData(Content("", panels=panels), numbers, comparisons)


@torch.inference_mode()
def ablate_each_head(run: RunFolder, device: torch.device) -> Measured:
    """Measure a run's token accuracy on the test set without each head in turn, and as more and more are removed."""
    task, model = load_run(run, device)
    assert isinstance(task, TranslationTask)
    part, groups, layers = task.parts["test"], find_heads(model), find_attention_layers(model)
    count = min(MAX_SENTENCES, len(part))
    evaluate = accuracy_of(part, count)
    ablation = head_ablation(model, evaluate, layers=layers)
    return Measured(
        of_weights(groups),
        change=ablation.change[~ablation.change.isnan()],
        items=count,
        names=short_names(groups),
        by_layer=ablation.change,
        layers=ablation.layers,
        pruned=pruning_curve(model, evaluate, -ablation.change, layers=layers),
    )
