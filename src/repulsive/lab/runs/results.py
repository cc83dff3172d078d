"""The results table of a page: metrics, comparisons with the baseline, and notes."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.lab.engine import tables
from repulsive.pages import Cell, Metric, Row, Table

METRICS = {
    "bleu": Metric("BLEU", "higher", 2, meaning="as in the paper: on tokenised, lower-cased words"),
    "sacrebleu": Metric("sacreBLEU", "higher", 2, meaning="on detokenised text"),
    "matthews": Metric("Matthews", "higher", 3, meaning="Matthews correlation, from -1 to 1"),
    "spearman": Metric("Spearman", "higher", 3, meaning="rank correlation of predicted and true scores"),
    "pearson": Metric("Pearson", "higher", 3, meaning="correlation of predicted and true scores"),
    "accuracy": Metric("accuracy", "higher", 1, percent=True),
    "f1": Metric("F1", "higher", 3, meaning="F1 score of class 1"),
    "mse": Metric("MSE", "lower", 3, meaning="mean squared error of predicted scores"),
    "nats_per_byte": Metric(
        "nats per byte", "lower", 4, meaning="loss per byte of text, comparable between tokenizers"
    ),
    "nll": Metric("NLL", "lower", 3, meaning="negative log-likelihood of the true class, in nats"),
    "dist": Metric("Dist", "neither", 3, meaning="mean distance between the outputs of two heads"),
    "relative_dist": Metric("relative Dist", "neither", 3, meaning="Dist / mean norm: independent of scale"),
    "overlap": Metric("overlap", "neither", 3, meaning="attention that two heads share"),
    "coverage": Metric(
        "evidence coverage", "higher", 1, percent=True, meaning="aspects that at least one head attends to"
    ),
    "ece15": Metric("ECE", "lower", 3, meaning="calibration error, 15 bins"),
}
SIGNIFICANT = 0.05  # p-value up to which a difference is called significant


def results(table: Sequence[tables.Row], caption: str) -> Table:
    """Format rows as a table of a page; the first row is the baseline. Metrics that a row lacks are left out.

    If no metric is in `METRICS`, all are shown by name, without saying whether higher or lower is better.
    """
    shared = [name for name in table[0].cells if all(name in row.cells for row in table)]
    names = [name for name in METRICS if name in shared] or shared
    rows = [Row(row.label, [_cell(row, name) for name in names]) for row in table]
    metrics = [METRICS.get(name, Metric(name, "neither")) for name in names]
    return Table(metrics, rows, table[0].label, caption, notes(table), SIGNIFICANT)


def notes(table: Sequence[tables.Row]) -> list[str]:
    """List warnings, and which differences from the baseline are significant."""
    lines = [f"{warning}." for row in table for warning in row.warnings]
    for row in table[1:]:
        verdicts = []
        for name, metric in METRICS.items():
            if name not in row.against:
                continue
            comparison = row.against[name]
            significant = comparison.p_value <= SIGNIFICANT and (comparison.low > 0 or comparison.high < 0)
            verdict = "better" if (comparison.difference > 0) == (metric.better == "higher") else "worse"
            verdicts.append(f"{metric.name} {verdict if significant else 'not significantly different'}")
        compared = ", ".join(verdicts) or "not compared: they share no seed"
        lines.append(f"{row.label} against {table[0].label}: {compared}.")
    shared = [c.seeds for row in table for c in row.against.values()]
    least = 2 ** (1 - min(shared)) if shared else 0
    if SIGNIFICANT < least < 1:
        lines.append(f"With {min(shared)} seeds no p-value over seeds falls below {least:g}: read the intervals.")
    return lines


def _cell(row: tables.Row, name: str) -> Cell:
    cell = row.cells[name]
    return Cell(cell.mean, None if cell.deviation != cell.deviation else cell.deviation, row.against.get(name))
