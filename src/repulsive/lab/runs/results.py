"""A table of runs as a page shows it: columns, comparisons, and sentences that say no more than the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from repulsive.lab.engine import tables
from repulsive.pages import Cell, Metric, Row, Table

METRICS = {
    "bleu": Metric("BLEU", "higher", 2, meaning="as the paper counts it: on words"),
    "sacrebleu": Metric("sacreBLEU", "higher", 2, meaning="on text as it is written"),
    "accuracy": Metric("accuracy", "higher", 1, percent=True),
    "nats_per_byte": Metric("nats per byte", "lower", 4, meaning="loss per byte of text, whatever the tokens are"),
    "nll": Metric("NLL", "lower", 3, meaning="negative log-likelihood of the true class, in nats"),
    "dist": Metric("Dist", "neither", 3, meaning="mean distance between what two heads make of a sentence"),
    "relative_dist": Metric("relative Dist", "neither", 3, meaning="Dist over the mean norm: the same at any scale"),
    "overlap": Metric("overlap", "neither", 3, meaning="attention that two heads have in common"),
    "coverage": Metric("evidence coverage", "higher", 1, percent=True, meaning="aspects that some head looks at"),
    "ece15": Metric("ECE", "lower", 3, meaning="calibration error, 15 bins"),
}
SURE = 0.05  # p-value below which a difference is called one


def results(found: Sequence[tables.Row], caption: str) -> Table:
    """The table of some rows; the first is the baseline. Metrics that not every row has are left out.

    A task whose metrics are all unknown here shows them as they are called, without a word on which is better.
    """
    shared = [name for name in found[0].cells if all(name in row.cells for row in found)]
    names = [name for name in METRICS if name in shared] or shared
    rows = [Row(row.label, [_cell(row, name) for name in names]) for row in found]
    metrics = [METRICS.get(name, Metric(name, "neither")) for name in names]
    return Table(metrics, rows, found[0].label, caption, notes(found), SURE)


def notes(found: Sequence[tables.Row]) -> list[str]:
    """What the numbers say, and no more."""
    said = [f"{told}." for row in found for told in row.warnings]
    for row in found[1:]:
        verdicts = []
        for metric, better in (("bleu", 1), ("accuracy", 1), ("nll", -1)):
            if metric not in row.against:
                continue
            seen = row.against[metric]
            told = seen.p_value <= SURE and (seen.low > 0 or seen.high < 0)
            verdict = ("better" if seen.difference * better > 0 else "worse") if told else "no difference can be told"
            verdicts.append(f"{METRICS[metric].name} {verdict}")
        compared = ", ".join(verdicts) or "not compared: they share no seed"
        said.append(f"{row.label} against {found[0].label}: {compared}.")
    shared = [c.seeds for row in found for c in row.against.values()]
    least = 2 ** (1 - min(shared)) if shared else 0
    if SURE < least < 1:
        said.append(f"With {min(shared)} seeds no p-value over seeds falls below {least:g}: read the intervals.")
    return said


def _cell(row: tables.Row, name: str) -> Cell:
    cell = row.cells[name]
    return Cell(cell.mean, None if cell.deviation != cell.deviation else cell.deviation, row.against.get(name))
