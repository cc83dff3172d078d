"""The sections of a report: what was measured on each method's runs, and how to read it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.report import Grid, Panel, Sheet, mean_and_sd
from repulsive.diagnostics.report.figures import entropy_chart, redundancy_charts, reliability_charts
from repulsive.diagnostics.report.text import number
from repulsive.diagnostics.uncertainty import detect_foreign, entropy_cdf
from repulsive.metrics.classification import BINS, nll
from repulsive.recipes.measure import DRAWS, Measured

Runs = Mapping[str, Mapping[int, Measured]]  # method -> seed -> what was measured
SMALL = 0.5  # percentage points of accuracy: a head whose absence changes less is called redundant
OVERLAP, COSINE = "attention in common", "cosine of weights"


def alike(found: Runs) -> Panel:
    """How alike the heads of each method are, in attention and in weights."""
    grids, rows = [], []
    for method, runs in found.items():
        first = runs[min(runs)]
        if first.overlap is not None:
            grids.append(Grid(method, first.overlap, OVERLAP))
        common = _over([_pairs(run.overlap) for run in runs.values() if run.overlap is not None], 3)
        for group in first.weights:
            name = COSINE if len(first.weights) == 1 else f"{COSINE}, {group.name}"
            grids.append(Grid(method, group.cosine.cpu(), name))
        rows.append([
            method, common,
            _over([statistics.fmean(group.mean_cosine for group in run.weights) for run in runs.values()], 3),
            _over([statistics.fmean(group.effective_heads for group in run.weights) for run in runs.values()], 2),
            str(first.weights[0].num_heads),
        ])  # fmt: skip
    lead = [
        "Rows and columns are heads of the lowest seed. Attention in common is averaged over items: 1 on the diagonal "
        "and for heads that read the same words, 0 for heads that share none. The cosine is that of the heads' "
        "weights; heads at a right angle and opposite heads are drawn alike.",
    ]
    columns = ["method", "attention in common", "cosine of weights", "effective heads", "of"]
    sheet = Sheet("Mean over pairs of heads, and over layers where there are several", columns, rows)
    return Panel("How alike the heads are", lead, grids, sheets=[sheet])


def redundancy(found: Runs, part: str) -> Panel:
    """What each head is worth: accuracy without it minus accuracy with all, over the heads of all seeds."""
    changes: dict[str, Tensor] = {}
    for method, runs in found.items():
        changes[method] = 100 * torch.cat([run.change for run in runs.values() if run.change is not None])
    items = max(run.items for runs in found.values() for run in runs.values())
    rows = []
    for method, change in changes.items():
        small = float((change.abs() < SMALL).double().mean())
        rows.append([
            method, str(len(change)), number(float(change.mean()), 2, signed=True),
            number(float(change.min()), 2, signed=True), f"{100 * small:.0f} %",
        ])  # fmt: skip
    lead = [
        f"Each head is taken away once, without retraining, on {items:,} items of the {part}. Bars show how the heads "
        "of all seeds are spread over the change of accuracy: around zero are heads that are not missed, to the left "
        "heads that are.",
    ]
    columns = ["method", "heads", "mean change", "most missed", f"changes less than {SMALL:g}"]
    sheet = Sheet("Change of accuracy in percentage points when a head is taken away", columns, rows)
    charts = redundancy_charts(changes, "change of accuracy, percentage points")
    return Panel("What each head is worth", lead, charts=charts, sheets=[sheet])


def calibration(found: Runs, answers: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> Panel:
    """Whether each method is as often right as it is sure, and what its heads say as a sample.

    Args:
        found: what was measured.
        answers: method -> seed -> logits and labels on the same part.
    """
    diagrams, rows, sampled = {}, [], []
    for method, seeds in answers.items():
        sure = {seed: items["logits"].double().softmax(-1) for seed, items in seeds.items()}  # [N, C]
        labels = {seed: items["labels"] for seed, items in seeds.items()}
        diagrams[method] = reliability(torch.cat(list(sure.values())), torch.cat(list(labels.values())), BINS[0])
        cells = []
        for bins in BINS:
            each = [reliability(sure[seed], labels[seed], bins) for seed in seeds]
            cells += [_over([one.ece for one in each], 3), _over([one.oe for one in each], 3)]
        rows.append([method, *cells])
        again = {seed: run.bootstrap for seed, run in found[method].items() if run.bootstrap is not None}
        plain = {seed: sure[seed][: len(p)] for seed, p in again.items()}
        pairs = [(p, labels[seed][: len(p)]) for which in (plain, again) for seed, p in which.items()]
        half = len(pairs) // 2
        losses = [float(nll(*pair)) for pair in pairs]
        errors = [reliability(*pair, BINS[0]).ece for pair in pairs]
        sampled.append([method, *(_over(each, 3) for v in (losses, errors) for each in (v[:half], v[half:]))])
    lead = [
        "A calibrated classifier is right as often as it is sure. ECE is the expected calibration error, OE the "
        "overconfidence error, with bins as in Guo et al. (15) and Thulasidasan et al. (100). The area of a dot is its "
        "share of the predictions of all seeds; below the diagonal a classifier is too sure.",
    ]
    columns = ["method", *(f"{name}, {bins} bins" for bins in BINS for name in ("ECE", "OE"))]
    told = (
        f"Heads as a sample: heads are drawn anew with replacement, {DRAWS} times, and the predictions averaged (head "
        "bootstrap). It shows how much predictions hang on these very heads."
    )
    of = ["method", "NLL", "NLL, bootstrap", f"ECE, {BINS[0]} bins", f"ECE, {BINS[0]} bins, bootstrap"]
    sheets = [Sheet("Calibration, mean over seeds; lower is better", columns, rows), Sheet(told, of, sampled)]
    return Panel("Sure and right", lead, charts=reliability_charts(diagrams), sheets=sheets)


def foreign(
    found: Runs, answers: Mapping[str, Mapping[int, Mapping[str, Tensor]]], name: str, unknown: float
) -> Panel:
    """Entropy of predictions on the runs' own data and on other data.

    Args:
        found: what was measured.
        answers: method -> seed -> logits on the runs' own data.
        name: of the other data.
        unknown: share of its words that the runs' vocabulary does not have.
    """
    inside, outside, rows = {}, {}, []
    for method, seeds in answers.items():
        own = {seed: items["logits"].double().softmax(-1) for seed, items in seeds.items()}
        other = {seed: run.foreign for seed, run in found[method].items() if run.foreign is not None}
        each = [detect_foreign(own[seed], other[seed]) for seed in own]
        inside[method] = entropy_cdf(torch.cat(list(own.values())))
        outside[method] = entropy_cdf(torch.cat(list(other.values())))
        spread = [[getattr(one, part) for one in each] for part in ("inside", "outside", "auroc")]
        rows.append([method, *(_over(values, 3) for values in spread)])
    lead = [
        f"A model should be unsure of texts it was not made for. The foreign texts are those of {name}, in the words "
        f"the runs know: {100 * unknown:.1f} % of them are unknown. A curve further to the lower right has fewer sure "
        "predictions: better on foreign texts. AUROC: how well entropy tells the two apart; 0.5 is chance.",
    ]
    columns = ["method", "entropy, own", "entropy, foreign", "AUROC"]
    charts = [
        entropy_chart("Foreign texts", outside, file="entropy-foreign"),
        entropy_chart("Own texts", inside, file="entropy-own"),
    ]
    sheet = Sheet("Mean entropy of predictions in nats, and detection of foreign texts by it", columns, rows)
    return Panel("Familiar and foreign", lead, charts=charts, sheets=[sheet])


def _over(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation over seeds; one head has no pairs, and so no number."""
    if not values or not all(map(math.isfinite, values)):
        return "–"
    return mean_and_sd(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, digits)


def _pairs(matrix: Tensor) -> float:
    """Mean over pairs i < j; nan for one head."""
    return float(matrix[tuple(torch.triu_indices(len(matrix), len(matrix), 1))].mean())
