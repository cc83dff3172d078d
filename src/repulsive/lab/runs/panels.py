"""The sections of a report: measurements of each method's runs, and how to read them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from repulsive.diagnostics.calibration import reliability
from repulsive.diagnostics.similarity import Diversity
from repulsive.diagnostics.uncertainty import detect_foreign, entropy_cdf
from repulsive.lab.engine.reporting import BOOTSTRAP_DRAWS, Measured
from repulsive.metrics.classification import BINS, brier, entropy, nll
from repulsive.pages import Grid, HeadTable, Panel, Sheet, mean_and_sd
from repulsive.pages.charts import entropy_chart, pruning_chart, redundancy_charts, reliability_charts
from repulsive.pages.text import number

Runs = Mapping[str, Mapping[int, Measured]]  # method -> seed -> measurements
SMALL = 0.5  # percentage points: a head whose removal changes the metric by less is called redundant
OVERLAP, COSINE = "shared attention", "cosine of weights"


def similarity(measured: Runs) -> Panel:
    """Make the section on head similarity, by method: similarity of attention, outputs and weights."""
    grids = [grid for method, runs in measured.items() for grid in _grids(method, runs[min(runs)])]
    columns: dict[str, Callable[[Measured], float]] = {
        OVERLAP: lambda run: math.nan if run.overlap is None else _pairs(run.overlap),
        "cosine of attention": lambda run: _mean_cosine(run.running.get("attention", ())),
        "cosine of outputs": lambda run: _mean_cosine(run.running.get("outputs", ())),
        COSINE: lambda run: _mean_cosine(run.weights),
        "effective heads": lambda run: statistics.fmean(group.effective_heads for group in run.weights),
    }
    every = [run for runs in measured.values() for run in runs.values()]
    shown = {name: value for name, value in columns.items() if any(math.isfinite(value(run)) for run in every)}
    rows = []
    for method, runs in measured.items():
        digits = [2 if name.startswith("effective") else 3 for name in shown]
        cells = [_over([of(run) for run in runs.values()], k) for of, k in zip(shown.values(), digits, strict=True)]
        rows.append([method, *cells, str(runs[min(runs)].weights[0].num_heads)])
    lead = ["Rows and columns are heads of the lowest seed."]
    if OVERLAP in shown:
        lead[0] += (
            " Shared attention is averaged over items: 1 on the diagonal and for heads that attend to the same words, "
            "0 for heads that attend to different words."
        )
    lead[0] += (
        " The cosine of weights compares the heads' rows of a projection; cosines of attention and outputs are means "
        "over items and tokens. Effective heads are computed from the weights."
    )
    sheet = Sheet("Mean over pairs of heads, and over layers where there are several", ["method", *shown, "of"], rows)
    return Panel("Similarity of heads", lead, grids, sheets=[sheet])


def _grids(method: str, run: Measured) -> list[Grid]:
    """Make the similarity grids of one run, with short layer names if there are several layers."""
    grids = [] if run.overlap is None else [Grid(method, run.overlap, OVERLAP)]
    for space, layers in run.running.items():
        for d in layers:
            layer = run.names.get(d.name, d.name) if len(layers) > 1 else ""
            grids.append(Grid(method, d.cosine.cpu(), f"cosine of {space}", layer))
    for group in run.weights:
        layer, _, part = run.names.get(group.name, group.name).rpartition(" ")
        several = len(run.weights) > 1
        what = f"{COSINE}, {part}" if several else COSINE
        grids.append(Grid(method, group.cosine.cpu(), what, layer if several else ""))
    return grids


def redundant(change: Tensor) -> float:
    """Compute the fraction of heads whose removal changes the metric by less than `SMALL` percentage points."""
    return float((change.abs() < SMALL).double().mean())


def redundancy(measured: Runs, part: str) -> Panel:
    """Make the section on head importance: the metric without a head minus that with all heads, over all seeds."""
    changes: dict[str, Tensor] = {}
    for method, runs in measured.items():
        changes[method] = 100 * torch.cat([run.change for run in runs.values() if run.change is not None])
    every = [run for runs in measured.values() for run in runs.values()]
    items, metric = max(run.items for run in every), every[0].metric
    unit = "points" if metric == "BLEU" else "percentage points"
    rows = []
    for method, change in changes.items():
        small = redundant(change)
        rows.append(
            [
                method,
                str(len(change)),
                number(float(change.mean()), 2, signed=True),
                number(float(change.min()), 2, signed=True),
                f"{100 * small:.0f} %",
            ]
        )
    lead = [
        f"Each head is removed once, without retraining, on {items:,} items of the {part}. The histogram shows the "
        f"change of {metric} over the heads of all seeds: redundant heads are around zero, important heads to the "
        "left.",
    ]
    if metric == "accuracy" and every[0].by_layer is not None:
        lead.append(
            "Accuracy is the share of tokens that are predicted correctly from the reference tokens before them."
        )
    columns = ["method", "heads", "mean change", "largest loss", f"changes less than {SMALL:g}"]
    sheet = Sheet(f"Change of {metric} in {unit} when a head is removed", columns, rows)
    charts = redundancy_charts(changes, f"change of {metric}, {unit}")
    heads = [_by_head(method, runs, f"change of {metric} in {unit}") for method, runs in measured.items()]
    return Panel("Effect of each head", lead, charts=charts, sheets=[sheet], heads=heads)


def pruning(measured: Runs) -> Panel:
    """Make the section on pruning: the metric as heads are removed and, for one layer, with a single head left."""
    curves = {
        method: [run.pruned for run in runs.values() if run.pruned is not None] for method, runs in measured.items()
    }
    metric = next(iter(next(iter(measured.values())).values())).metric
    lead = [
        f"{metric[0].upper()}{metric[1:]} as more and more heads are removed, the least important first, without "
        "retraining (Michel et al., 2019). A curve that stays high belongs to a model with redundant heads.",
    ]
    rows = []
    for method, runs in measured.items():
        alone = [100 * run.alone for run in runs.values() if run.alone is not None]  # [M] each
        whole = [100 * run.pruned.metric[0] for run in runs.values() if run.pruned is not None]
        if alone:
            best, mean = [float(one.max()) for one in alone], [float(one.mean()) for one in alone]
            rows.append([method, *(_over(values, 1) for values in (best, mean, whole))])
    columns = ["method", "best head alone", "mean head alone", "all heads"]
    sheets = [Sheet("Accuracy (%) with one head left", columns, rows)] if rows else []
    return Panel("Pruning", lead, charts=[pruning_chart(curves, metric)], sheets=sheets)


def _by_head(method: str, runs: Mapping[int, Measured], what: str) -> HeadTable:
    """Make a table of layers by heads for the lowest seed or, for models with one layer, of seeds by heads."""
    first = runs[min(runs)]
    if first.by_layer is not None:
        values, names = 100 * first.by_layer, [first.names.get(name, name) for name in first.layers]
        return HeadTable(f"{method}, seed {min(runs)}: {what}", names, values, (-values).clamp(min=0), digits=2)
    values = 100 * torch.stack([run.change for run in runs.values() if run.change is not None])  # [seeds, M]
    rows = [f"seed {seed}" for seed in runs]
    return HeadTable(f"{method}: {what}", rows, values, (-values).clamp(min=0), digits=2)


def calibration(measured: Runs, answers: Mapping[str, Mapping[int, Mapping[str, Tensor]]]) -> Panel:
    """Make the section on calibration of each method, and of the head bootstrap where it was measured.

    Args:
        measured: the measurements.
        answers: method -> seed -> logits and labels on the same data split.
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
        scored = [[float(score(sure[seed], labels[seed])) for seed in seeds] for score in (nll, brier)]
        rows.append([method, *cells, *(_over(each, 3) for each in scored)])
        again = {seed: run.bootstrap for seed, run in measured[method].items() if run.bootstrap is not None}
        if not again:  # without the data
            continue
        plain = {seed: sure[seed][: len(p)] for seed, p in again.items()}
        pairs = [(p, labels[seed][: len(p)]) for which in (plain, again) for seed, p in which.items()]
        half = len(pairs) // 2
        losses = [float(nll(*pair)) for pair in pairs]
        errors = [reliability(*pair, BINS[0]).ece for pair in pairs]
        sampled.append([method, *(_over(each, 3) for v in (losses, errors) for each in (v[:half], v[half:]))])
    lead = [
        "The accuracy of a calibrated classifier equals its confidence. ECE is the expected calibration error, OE the "
        "overconfidence error, with bins as in Guo et al. (15) and Thulasidasan et al. (100). The area of a dot is its "
        "share of the predictions of all seeds; below the diagonal a classifier is overconfident.",
    ]
    columns = ["method", *(f"{name}, {bins} bins" for bins in BINS for name in ("ECE", "OE")), "NLL", "Brier"]
    caption = (
        f"Head bootstrap: heads are resampled with replacement, {BOOTSTRAP_DRAWS} times, and the predictions averaged. "
        "It shows how much the predictions depend on individual heads."
    )
    of = ["method", "NLL", "NLL, bootstrap", f"ECE, {BINS[0]} bins", f"ECE, {BINS[0]} bins, bootstrap"]
    sheets = [Sheet("Calibration, mean over seeds; lower is better", columns, rows)]
    if sampled:
        sheets.append(Sheet(caption, of, sampled))
    return Panel("Calibration", lead, charts=reliability_charts(diagrams), sheets=sheets)


def prediction_entropy(
    measured: Runs, answers: Mapping[str, Mapping[int, Mapping[str, Tensor]]], other: tuple[str, float] | None = None
) -> Panel:
    """Make the section on prediction entropy on the runs' own data and, if given, on foreign data.

    Args:
        measured: the measurements.
        answers: method -> seed -> logits on the runs' own data.
        other: name of the foreign data, and the fraction of its words that the runs' vocabulary lacks.
    """
    own = {
        method: {seed: items["logits"].double().softmax(-1) for seed, items in seeds.items()}
        for method, seeds in answers.items()
    }
    inside = {method: entropy_cdf(torch.cat(list(each.values()))) for method, each in own.items()}
    charts = [entropy_chart("Own texts", inside, file="entropy-own")]
    if other is None:
        rows = [[method, _over([float(entropy(p).mean()) for p in each.values()], 3)] for method, each in own.items()]
        sheet = Sheet("Mean entropy of predictions in nats", ["method", "entropy, own"], rows)
        lead = [
            "The share of predictions with at most this entropy: the further to the upper left a curve is, the more "
            "confident are the predictions. With --foreign a report also shows texts of another dataset.",
        ]
        return Panel("Entropy of predictions", lead, charts=charts, sheets=[sheet])
    there = {
        method: {seed: run.foreign for seed, run in runs.items() if run.foreign is not None}
        for method, runs in measured.items()
    }
    outside = {method: entropy_cdf(torch.cat(list(each.values()))) for method, each in there.items()}
    charts.insert(0, entropy_chart("Foreign texts", outside, file="entropy-foreign"))
    rows = []
    for method, each in own.items():
        detected = [detect_foreign(p, there[method][seed]) for seed, p in each.items()]
        spread = [[getattr(one, part) for one in detected] for part in ("inside", "outside", "auroc")]
        rows.append([method, *(_over(values, 3) for values in spread)])
    lead = [
        f"A model should be uncertain about texts of another dataset. The foreign texts are those of {other[0]}; "
        f"{100 * other[1]:.1f} % of their words are not in the runs' vocabulary. The further to the lower right a "
        "curve is, the fewer predictions are confident, which is better on foreign texts. AUROC measures how well "
        "entropy separates foreign texts from the runs' own; 0.5 is chance.",
    ]
    columns = ["method", "entropy, own", "entropy, foreign", "AUROC"]
    sheet = Sheet("Mean entropy of predictions in nats, and detection of foreign texts by it", columns, rows)
    return Panel("Entropy on foreign texts", lead, charts=charts, sheets=[sheet])


def _over(values: Sequence[float], digits: int) -> str:
    """Format mean and standard deviation over seeds; a dash if there are no values (one head has no pairs)."""
    if not values or not all(map(math.isfinite, values)):
        return "–"
    return mean_and_sd(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, digits)


def _mean_cosine(entries: Sequence[Diversity]) -> float:
    """Compute the mean cosine over head pairs and layers; NaN if there are no pairs."""
    return statistics.fmean(d.mean_cosine for d in entries) if entries else math.nan


def _pairs(matrix: Tensor) -> float:
    """Compute the mean of a matrix over pairs i < j; NaN for one head."""
    return float(matrix[tuple(torch.triu_indices(len(matrix), len(matrix), 1))].mean())
