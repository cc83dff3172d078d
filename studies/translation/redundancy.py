"""What is lost without a head: translators whose weights were kept, on the test set (the paper's Figure 2)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from studies.engine import drop_weights, save
from studies.translation.tables import Done, draw

from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.translator_figures import without_each
from repulsive.lab.paper.verdicts import over_seeds
from repulsive.lab.runs.panels import SMALL, redundant
from repulsive.pages.charts import redundancy_charts

if TYPE_CHECKING:
    from studies.translation.run import Translation

WITHOUT = "without.json"  # in the folder of a run
SHARE = f"less than {SMALL:g}"
COLUMNS = ("method", "seeds", "heads", "mean change", "most missed", SHARE, "better away", "difference")
LEAD = f"""Each head of every attention is taken away once, without retraining: the change of the accuracy of a piece of
the test set, those before it given, in percentage points. "{SHARE}" is the share of heads whose absence changes less,
"better away" of those whose absence helps; "difference" is that of the former from the first row's, over seeds.
"""


def measure_all(study: Translation, *, drop: bool) -> None:
    """All runs of the stage that have weights and have not been measured.

    Args:
        study: whose runs.
        drop: delete the weights of what has been measured.
    """
    specs = [spec for row in study.rows("redundancy") for spec in study.runs(row, "redundancy")]
    todo = [spec for spec in specs if not (spec.folder / WITHOUT).is_file() and (spec.folder / "best").is_dir()]
    print(f"redundancy: {len(specs)} runs, {len(todo)} to measure", flush=True)
    for spec in todo:
        found = without_each(RunFolder(spec.folder), chosen_device(study.device))
        assert found.change is not None
        save(spec.folder / WITHOUT, {"sentences": found.items, "change": found.change.tolist()})
        if drop:
            drop_weights(spec)


def redundancy(study: Translation, done: Sequence[Done], results: Path) -> None:
    """How heads are spread over what their absence changes."""
    changes = {each.row.label: _changes(each) for each in done}
    if not all(changes.values()):
        print("redundancy: no table, runs have not been measured")
        return
    small = {label: {seed: redundant(change) for seed, change in runs.items()} for label, runs in changes.items()}
    first = next(iter(small))
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for label, runs in changes.items():
        every = torch.cat(list(runs.values()))  # [heads of all seeds]
        seen = over_seeds(small[label], small[first]) if label != first else None
        cells = [
            label,
            str(len(runs)),
            str(len(every)),
            f"{every.mean():+.2f}",
            f"{every.min():+.2f}",
            f"{100 * statistics.fmean(small[label].values()):.0f} %",
            f"{100 * (every > 0).double().mean():.0f} %",
            "" if seen is None else f"{100 * seen.difference:+.0f} [{100 * seen.low:+.0f}, {100 * seen.high:+.0f}]",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    print(f"\n{study.task}: redundancy\n" + "\n".join(lines), flush=True)
    save(results / "redundancy.md", "\n".join(["# redundancy", "", LEAD, *lines]) + "\n")
    written = {label: {str(seed): change.tolist() for seed, change in runs.items()} for label, runs in changes.items()}
    save(results / "redundancy.json", written)
    whole = {label: torch.cat(list(runs.values())) for label, runs in changes.items()}
    draw(redundancy_charts(whole, "change of accuracy, percentage points"), results)


def _changes(each: Done) -> dict[int, torch.Tensor]:
    """Of every seed, in percentage points."""
    found = {seed: read_json(run.path / WITHOUT) for seed, run in each.runs.items()}
    return {seed: 100 * torch.tensor(known["change"]) for seed, known in found.items() if known is not None}
