"""Tables and figures of `paper_settings`, from its records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.output import save, write_svgs
from studies.translation.paper_records import Records
from studies.translation.paper_rows import ROWS

from repulsive.lab.engine import tables
from repulsive.metrics.compare import Comparison
from repulsive.pages.charts import learning_curve
from repulsive.pages.data.panels import Chart
from repulsive.safety.markdown import format_table

SHOWN = {"bleu": 2, "nll": 4, "accuracy": 4}  # metric -> decimals
HEADS = {  # metric -> title
    "entropy": "entropy (nats)",
    "largest_logit": "largest logit",
    "similarity": "cosine of logits",
    "cosine": "cosine of weights",
    "norm": "norm of a head",
    "ratio": "repulsion / drive",
}
FIGURES = {  # metric -> title and end of the file name
    "nll": ("NLL of the development set", "nll"),
    "entropy": ("Entropy of attention, nats", "entropy"),
    "largest_logit": ("Largest attention logit, mean over heads", "logits"),
}
OVER_TRAINING = {  # metric -> sentence before its table, and decimals
    "nll": ("NLL of the development set, mean over seeds:", 4),
    "entropy/cross": (
        "Entropy of cross-attention in nats, on 16 of its sentence pairs; log 30 = 3.401 if it is even:",
        3,
    ),
    "largest_logit/cross": ("Largest logit of cross-attention, mean over heads and layers:", 1),
    "token_cosine": ("Cosine between the states that the encoder gives to two tokens of a sentence:", 3),
    "norm": ("Norm of a head:", 1),
}
AT = (1, 2, 5, 10, 15, 20, 25, 30, 37)  # epochs of the table over training
LEAD = """\
Europarl cut to 160,000 pairs, a Transformer of 6+6 layers, width 512, 4 heads, learning rate 5e-4, warm-up of 4,000
steps, batches of 4,096 tokens. Commands: `studies/translation/paper_settings.py`. BLEU is that of lower-cased words
with beam search. Differences from the first row have 95 % intervals, paired by seed and sentence: over seeds and
sentences, or, marked "one seed", over sentences alone, which does not cover new trainings.
"""
ATTENTION = """\
Attention on 16 sentence pairs of the development set, means over all heads and layers at the last epoch that all runs
have; cosine and norm of the weights of q, k and v; ratio as logged last.
"""


@dataclass(frozen=True)
class Section:
    """The runs that were evaluated after the same number of epochs.

    Args:
        epochs: number of epochs.
        seeds: row -> seeds.
    """

    epochs: int
    seeds: dict[str, list[int]]


def sections_of(records: Records) -> list[Section]:
    """Group the runs by their number of epochs, the longest first."""
    by_epochs: dict[int, dict[str, list[int]]] = {}
    for name in ROWS:
        for row, seed in sorted(records.runs):
            if row == name and not records.runs[row, seed]["diverged"]:
                by_epochs.setdefault(records.runs[row, seed]["epochs"], {}).setdefault(row, []).append(seed)
    return [Section(epochs, by_epochs[epochs]) for epochs in sorted(by_epochs, reverse=True)]


def write_tables(records: Records, results: Path, name: str) -> None:
    """Write all tables and figures.

    Args:
        records: of the runs.
        results: folder to write to.
        name: of the files, without endings.
    """
    lines, data = ["# Translation at the paper's settings", "", LEAD], []
    for section in sections_of(records):
        text, entry = _section(records, section)
        lines += text
        data.append(entry)
    diverged = [f"{row}, seed {seed}" for (row, seed), run in sorted(records.runs.items()) if run["diverged"]]
    lines += [f"Diverged: {'; '.join(diverged)}.", ""] if diverged else []
    curves = {row: seeds for row in ROWS if (seeds := _curves_of(records, row))}
    if curves:
        lines += ["## Over training", ""]
        for metric, (title, digits) in OVER_TRAINING.items():
            measured = {row: seeds for row, seeds in curves.items() if all(metric in run for run in seeds.values())}
            lines += [title, "", _over_training(measured, metric, digits), ""] if measured else []
        lines += ["## Heads", "", ATTENTION, _heads(curves), ""]
    print("\n".join(lines), flush=True)
    save(results / f"{name}.md", "\n".join(lines).rstrip("\n") + "\n")
    means = {row: {metric: _mean(list(seeds.values()), metric) for metric in FIGURES} for row, seeds in curves.items()}
    save(results / f"{name}.json", {"sections": data, "curves": means, "diverged": diverged})
    write_svgs(_charts(curves, name), results)


def _section(records: Records, section: Section) -> tuple[list[str], dict[str, Any]]:
    """Format the comparison of all runs with the same number of epochs."""
    first = next(iter(section.seeds))
    some = records.runs[first, section.seeds[first][0]]
    updates, averaged = some["curves"]["nll"][-1][0], some["averaged"]
    weights = f"mean of the weights of the last {averaged} epochs" if averaged else "weights of that epoch"
    lines = [f"## After {section.epochs} epochs, {updates:,} updates ({weights})", ""]
    entry = {"epochs": section.epochs, "updates": updates, "averaged": averaged, "device": some["device"]}
    entry |= {"versions": some["versions"], "parts": {}}
    for part in ("test", "dev"):
        rows = tables.table([_entry(records, row, seeds, part) for row, seeds in section.seeds.items()])
        lines += [f"### {part}", "", _table(rows, compares=first == next(iter(ROWS))), ""]
        others = _other_comparisons(records, section, part)
        lines += [f"- {name}, {metric}: {_difference(c, metric)}" for name, metric, c in others]
        lines += [""] if others else []
        plain = [tables.as_plain(row) | {"folder": row.folder.name} for row in rows]
        more = [{"rows": name, "metric": metric, "comparison": _plain(c)} for name, metric, c in others]
        entry["parts"][part] = {"rows": plain, "other comparisons": more}
    return lines, entry


def _entry(records: Records, row: str, seeds: Sequence[int], part: str) -> tuple[str, Path, Mapping[int, Any]]:
    return ROWS[row].label, Path(row), {seed: records.evaluation((row, seed), part) for seed in seeds}


def _table(rows: Sequence[tables.Row], *, compares: bool) -> str:
    body = []
    shown = {name: digits for name, digits in SHOWN.items() if all(name in row.cells for row in rows)}
    for row in rows:
        cells = [row.label, str(len(row.seeds))]
        for name, digits in shown.items():
            cell = row.cells[name]
            spread = f" ± {cell.deviation:.{digits}f}" if cell.deviation == cell.deviation else ""
            cells.append(f"{cell.mean:.{digits}f}{spread}")
            cells.append(_difference(row.against[name], name) if compares and name in row.against else "")
        body.append(cells)
    return format_table(["row", "seeds", *(title for name in shown for title in (name, "difference"))], body)


def _difference(comparison: Comparison, metric: str) -> str:
    digits = SHOWN[metric]
    ends = ", ".join(f"{x:+.{digits}f}" for x in (comparison.low, comparison.high))
    note = " (one seed)" if comparison.over == "items" else ""
    return f"{comparison.difference:+.{digits}f} [{ends}]{note}"


def _other_comparisons(records: Records, section: Section, part: str) -> list[tuple[str, str, Comparison]]:
    """Compare rows whose baseline is not the first row: (names, metric, comparison)."""
    found = []
    for row, seeds in section.seeds.items():
        for other in ROWS[row].against:
            if other in section.seeds:
                pair = tables.table(
                    [_entry(records, other, section.seeds[other], part), _entry(records, row, seeds, part)]
                )[1]
                names = f"{ROWS[row].label} minus {ROWS[other].label}"
                found += [(names, metric, pair.against[metric]) for metric in SHOWN if metric in pair.against]
    return found


def _plain(comparison: Comparison) -> dict[str, Any]:
    names = ("difference", "low", "high", "p_value", "over", "seeds", "items")
    return {name: getattr(comparison, name) for name in names}


# -- over training ----------------------------------------------------------------------------------------------------

Curves = dict[str, list[tuple[float, float]]]  # metric -> (step, value) at the end of each epoch


def _curves_of(records: Records, row: str) -> dict[int, Curves]:
    runs = {seed: run for (name, seed), run in sorted(records.runs.items()) if name == row and not run["diverged"]}
    return {seed: run["curves"] for seed, run in runs.items()}


def _mean(seeds: Sequence[Curves], metric: str) -> list[tuple[float, float]]:
    """Average a curve over seeds, up to the last epoch that all have."""
    columns = zip(*(curves.get(metric, ()) for curves in seeds), strict=False)
    return [(points[0][0], statistics.fmean(y for _, y in points)) for points in columns]


def _over_training(curves: Mapping[str, Mapping[int, Curves]], metric: str, digits: int) -> str:
    means = {row: _mean(list(seeds.values()), metric) for row, seeds in curves.items()}
    last = max(len(mean) for mean in means.values())
    epochs = sorted({epoch for epoch in AT if epoch < last} | {last})
    body = []
    for row, mean in means.items():
        cells = [f"{mean[epoch - 1][1]:.{digits}f}" if epoch <= len(mean) else "" for epoch in epochs]
        body.append([ROWS[row].label, str(len(curves[row])), *cells])
    return format_table(["row", "seeds", *(f"epoch {epoch}" for epoch in epochs)], body)


def _heads(curves: Mapping[str, Mapping[int, Curves]]) -> str:
    every = [run for seeds in curves.values() for run in seeds.values()]
    common = min(len(run["nll"]) for run in every)
    shown = [name for name in HEADS if any(name in run for run in every)]
    body = []
    for row, seeds in curves.items():
        cells = [ROWS[row].label, str(common)]
        for name in shown:
            values = [run[name][common - 1][1] for run in seeds.values() if len(run.get(name, ())) >= common]
            cells.append(f"{statistics.fmean(values):.3f}" if values else "")
        body.append(cells)
    return format_table(["row", "epoch", *(HEADS[name] for name in shown)], body)


def _charts(curves: Mapping[str, Mapping[int, Curves]], name: str) -> list[Chart]:
    """Draw curves over training, and first the difference of the NLL from the first row, seed by seed."""
    charts = []
    if (baseline := next(iter(ROWS))) in curves:
        plain = {seed: dict(run["nll"]) for seed, run in curves[baseline].items()}
        differences = {
            ROWS[row].label: [
                [(x, y - plain[seed][x]) for x, y in run["nll"] if x in plain[seed]]
                for seed, run in seeds.items()
                if seed in plain
            ]
            for row, seeds in curves.items()
        }
        title = f"NLL (dev) minus that of {ROWS[baseline].label}"
        charts.append(learning_curve(title, {row: runs for row, runs in differences.items() if runs}, name))
    for metric, (title, ending) in FIGURES.items():
        lines = {
            ROWS[row].label: [[(x, y) for x, y in run[metric]] for run in seeds.values() if metric in run]
            for row, seeds in curves.items()
        }
        if lines := {label: runs for label, runs in lines.items() if runs}:
            charts.append(learning_curve(title, lines, f"{name}-{ending}"))
    return charts
