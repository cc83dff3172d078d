"""Figures about sentence classifiers: Figure 1 and Appendix D, C.4 and C.5."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.uncertainty import entropy_cdf
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.paper.datasets import DATASETS, Dataset
from repulsive.lab.paper.differences import Runs, difference, values
from repulsive.lab.paper.figure import Figure, FigureData, PerSeed
from repulsive.lab.paper.options import Log, Options
from repulsive.lab.paper.report import label_of
from repulsive.lab.runs.score import load_run
from repulsive.lab.systems.classification.foreign import open_foreign, unknown_share
from repulsive.lab.systems.classification.measure import predictions
from repulsive.lab.systems.classification.task import ClassificationTask
from repulsive.metrics.classification import BINS, entropy
from repulsive.metrics.compare import Comparison, compare
from repulsive.pages import Content, Panel
from repulsive.pages.charts import entropy_chart, reliability_charts


class AttentionMaps(Figure):
    """Attention heat maps of all heads, from the first seed of each method."""

    id = "attention-maps"
    title = "attention maps of all heads"
    source = "Figure 1 and Appendix D"
    paper_datasets = ("yelp",)
    methods = ("ma", "frobenius", "svgd")
    lead = "Attention of every head on sentences of the test set, and the mean over heads. First seed of each method."

    def measure(self, dataset: Dataset, finished: Mapping[str, Runs], options: Options, log: Log) -> FigureData:
        task, models = None, {}
        for name, runs in finished.items():
            task, models[label_of(name)] = load_run(runs[min(runs)], torch.device("cpu"))
        assert isinstance(task, ClassificationTask)
        shown = task.examples("test", models).single
        numbers = {name: _available(runs, ("overlap", "dist")) for name, runs in finished.items()}
        comparisons = {("overlap", "svgd", "ma"): difference(finished["svgd"], finished["ma"], "overlap")}
        return FigureData(Content("", examples=shown), numbers, comparisons)


class Calibration(Figure):
    """Accuracy against confidence, from the stored predictions of the runs."""

    id = "calibration"
    title = "accuracy against confidence"
    source = "Appendix C.4"
    paper_datasets = ("snli",)
    lead = (
        "Confidence of a calibrated classifier equals its accuracy; below the diagonal it is overconfident. Test set."
    )

    def measure(self, dataset: Dataset, finished: Mapping[str, Runs], options: Options, log: Log) -> FigureData:
        diagrams = {}
        for name, runs in finished.items():
            stored = [run.items("test") for run in runs.values()]
            probabilities = torch.cat([items["logits"].double().softmax(-1) for items in stored])  # [seeds x N, C]
            labels = torch.cat([items["labels"] for items in stored])  # [seeds x N]
            diagrams[label_of(name)] = reliability(probabilities, labels, BINS[0])
        notes = ["The area of a dot is its share of the predictions of all seeds."]
        panel = Panel("Calibration", notes, charts=reliability_charts(diagrams))
        errors = [f"{error}{bins}" for bins in BINS for error in ("ece", "oe")]
        numbers = {name: _available(runs, (*errors, "accuracy", "nll")) for name, runs in finished.items()}
        comparisons = {(m, "svgd", "ma"): difference(finished["svgd"], finished["ma"], m) for m in ("ece15", "oe15")}
        return FigureData(Content("", panels=[panel]), numbers, comparisons)


class Entropy(Figure):
    """Predictive entropy on texts of another dataset than the models were trained on."""

    id = "entropy"
    title = "entropy of predictions on out-of-domain texts"
    source = "Appendix C.5"
    paper_datasets = ("yelp",)
    methods = ("ma", "frobenius", "svgd")
    lead = (
        "Share of predictions with at most this entropy. On out-of-domain texts, further to the lower right is better."
    )
    foreign = "age"

    def required_datasets(self, options: Options) -> list[Dataset]:
        return [*self.training_datasets(options), DATASETS[self.foreign]]

    def measure(self, dataset: Dataset, finished: Mapping[str, Runs], options: Options, log: Log) -> FigureData:
        device, folder = chosen_device(options.device), DATASETS[self.foreign].folder(options.data)
        probabilities: dict[str, dict[int, Tensor]] = {}
        unknown = 0.0
        for name, runs in finished.items():
            probabilities[name] = {}
            for seed, run in runs.items():
                log(f"{run.path}: predicting on {self.foreign}")
                task, model = load_run(run, device)
                assert isinstance(task, ClassificationTask)
                part = open_foreign(folder, task.data, "test").to(device)
                unknown = unknown_share(part)
                probabilities[name][seed] = predictions(model, part)  # [N, C]
        curves = {label_of(name): entropy_cdf(torch.cat([*seeds.values()])) for name, seeds in probabilities.items()}
        note = f"Texts of {self.foreign}; {100 * unknown:.1f} % of their words are not in the models' vocabulary."
        chart = entropy_chart("Out-of-domain texts", curves, file="entropy-foreign")
        panel = Panel("Out-of-domain texts", [note], charts=[chart])
        entropies = {name: {seed: entropy(p) for seed, p in seeds.items()} for name, seeds in probabilities.items()}
        numbers = {
            name: {
                "foreign entropy": {seed: float(h.mean()) for seed, h in entropies[name].items()},
                "own entropy": values(runs, "entropy"),
            }
            for name, runs in finished.items()
        }
        pairs = (("svgd", "ma"), ("svgd", "frobenius"))
        comparisons = {("foreign entropy", a, b): compare_items(entropies[a], entropies[b]) for a, b in pairs}
        return FigureData(Content("", panels=[panel]), numbers, comparisons)


def compare_items(first: Mapping[int, Tensor], second: Mapping[int, Tensor]) -> Comparison | None:
    """Compare means over items, first - second, paired by seed and item; None if no seed is shared."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    a, b = (torch.stack([each[seed].double() for seed in shared]) for each in (first, second))  # [S, N]
    return compare(a, b, "both" if len(shared) > 1 else "items")


def _available(runs: Runs, metrics: tuple[str, ...]) -> dict[str, PerSeed]:
    """Return metric -> values by seed, for those of the metrics that the runs have."""
    by_metric = {metric: values(runs, metric) for metric in metrics}
    return {metric: by_seed for metric, by_seed in by_metric.items() if by_seed}
