"""Figures on sentence classifiers: what heads look at, calibration, and how sure they are of foreign texts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.uncertainty import entropy_cdf
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.paper.datasets import DATASETS, DataSet
from repulsive.lab.paper.figures import Drawn, Figure, PerSeed, label
from repulsive.lab.paper.running import Options, Tell
from repulsive.lab.paper.verdicts import Runs, difference, values
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.foreign import open_foreign, unknown_share
from repulsive.lab.systems.classification.measure import predictions
from repulsive.lab.systems.classification.task import ClassificationTask
from repulsive.metrics.classification import BINS, entropy
from repulsive.metrics.compare import Comparison, compare
from repulsive.pages import Content, Panel
from repulsive.pages.charts import entropy_chart, reliability_charts


class AttentionMaps(Figure):
    """Heat maps of all heads, as the first seed of each method has them."""

    id = "attention-maps"
    title = "what each head looks at"
    source = "Figure 1 and Appendix D"
    data = ("yelp",)
    methods = ("ma", "frobenius", "svgd")
    lead = "Attention of every head of the first seed on sentences of the test set, and the mean over heads."

    def draw(self, data: DataSet, ended: Mapping[str, Runs], options: Options, tell: Tell) -> Drawn:
        task, models = None, {}
        for name, runs in ended.items():
            task, models[label(name)] = load_run(runs[min(runs)], torch.device("cpu"))
        assert isinstance(task, ClassificationTask)
        shown = task.examples("test", models).single
        numbers = {name: _known(runs, ("overlap", "dist")) for name, runs in ended.items()}
        seen = {("overlap", "svgd", "ma"): difference(ended["svgd"], ended["ma"], "overlap")}
        return Drawn(Content("", examples=shown), numbers, seen)


class Calibration(Figure):
    """Accuracy against confidence; nothing is evaluated again."""

    id = "calibration"
    title = "accuracy against confidence"
    source = "Appendix C.4"
    data = ("snli",)
    lead = "A calibrated classifier is right as often as it is sure; below the diagonal it is too sure. Test set."

    def draw(self, data: DataSet, ended: Mapping[str, Runs], options: Options, tell: Tell) -> Drawn:
        diagrams = {}
        for name, runs in ended.items():
            answers = [run.items("test") for run in runs.values()]
            sure = torch.cat([items["logits"].double().softmax(-1) for items in answers])  # [seeds x N, C]
            truth = torch.cat([items["labels"] for items in answers])  # [seeds x N]
            diagrams[label(name)] = reliability(sure, truth, BINS[0])
        told = ["The area of a dot is its share of the predictions of all seeds."]
        panel = Panel("Sure and right", told, charts=reliability_charts(diagrams))
        kept = [f"{error}{bins}" for bins in BINS for error in ("ece", "oe")]
        numbers = {name: _known(runs, (*kept, "accuracy", "nll")) for name, runs in ended.items()}
        seen = {(m, "svgd", "ma"): difference(ended["svgd"], ended["ma"], m) for m in ("ece15", "oe15")}
        return Drawn(Content("", panels=[panel]), numbers, seen)


class Entropy(Figure):
    """How sure models are of texts they were not made for."""

    id = "entropy"
    title = "entropy of predictions on foreign texts"
    source = "Appendix C.5"
    data = ("yelp",)
    methods = ("ma", "frobenius", "svgd")
    lead = "Share of predictions with at most this entropy: further to the lower right is better on foreign texts."
    foreign = "age"

    def needs(self, options: Options) -> list[DataSet]:
        return [*self.trained_on(options), DATASETS[self.foreign]]

    def draw(self, data: DataSet, ended: Mapping[str, Runs], options: Options, tell: Tell) -> Drawn:
        device, folder = chosen_device(options.device), DATASETS[self.foreign].folder(options.data)
        outside: dict[str, dict[int, Tensor]] = {}
        unknown = 0.0
        for name, runs in ended.items():
            outside[name] = {}
            for seed, run in runs.items():
                tell(f"{run.path}: reading {self.foreign}")
                task, model = load_run(run, device)
                assert isinstance(task, ClassificationTask)
                part = open_foreign(folder, task.data, "test").to(device)
                unknown = unknown_share(part)
                outside[name][seed] = predictions(model, part)  # [N, C]
        curves = {label(name): entropy_cdf(torch.cat(list(seeds.values()))) for name, seeds in outside.items()}
        note = f"Texts of {self.foreign}; {100 * unknown:.1f} % of their words are unknown to the models."
        panel = Panel("Foreign texts", [note], charts=[entropy_chart("Foreign texts", curves, file="entropy-foreign")])
        items = {name: {seed: entropy(p) for seed, p in seeds.items()} for name, seeds in outside.items()}
        numbers = {
            name: {
                "foreign entropy": {seed: float(h.mean()) for seed, h in items[name].items()},
                "own entropy": values(runs, "entropy"),
            }
            for name, runs in ended.items()
        }
        pairs = (("svgd", "ma"), ("svgd", "frobenius"))
        seen = {("foreign entropy", a, b): paired(items[a], items[b]) for a, b in pairs}
        return Drawn(Content("", panels=[panel]), numbers, seen)


def paired(first: Mapping[int, Tensor], second: Mapping[int, Tensor]) -> Comparison | None:
    """First - second of the mean over items, by seed and item; None where they share no seed."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    a, b = (torch.stack([each[seed].double() for seed in shared]) for each in (first, second))  # [S, N]
    return compare(a, b, "both" if len(shared) > 1 else "items")


def _known(runs: Runs, metrics: tuple[str, ...]) -> dict[str, PerSeed]:
    found = {metric: values(runs, metric) for metric in metrics}
    return {metric: each for metric, each in found.items() if each}
