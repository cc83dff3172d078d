"""Effect of removing one head on translators whose weights were kept, on the test set (the paper's Figure 2)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from studies.engine import drop_weights
from studies.output import save, write_svgs
from studies.translation.finished_rows import FinishedRow

from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.paper.differences import over_seeds
from repulsive.lab.paper.figure2_redundancy import ablate_each_head
from repulsive.lab.runs.panels import SMALL, redundant
from repulsive.pages.charts import redundancy_charts
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.translation.study import Translation

ABLATIONS = "without.json"  # in the folder of a run
SHARE = f"less than {SMALL:g}"
HARMFUL = "removal helps"
COLUMNS = ("method", "seeds", "heads", "mean change", "largest loss", SHARE, HARMFUL, "difference")
LEAD = f"""Each head of every attention is removed in turn, without retraining. Changes are those of the token accuracy
on the test set, given the preceding reference tokens, in percentage points. "{SHARE}" is the share of heads whose
removal changes less than that, "{HARMFUL}" that of heads whose removal increases accuracy; "difference" compares
"{SHARE}" with the first row, over seeds.
"""


def measure_all(study: Translation, *, drop: bool) -> None:
    """Measure all runs of the stage that have weights and have not been measured.

    Args:
        study: whose runs.
        drop: delete weights after the measurement.
    """
    specs = [spec for row in study.rows("redundancy") for spec in study.runs(row, "redundancy")]
    missing = [spec for spec in specs if not (spec.folder / ABLATIONS).is_file() and (spec.folder / "best").is_dir()]
    print(f"redundancy: {len(specs)} runs, {len(missing)} to measure", flush=True)
    for spec in missing:
        measured = ablate_each_head(RunFolder(spec.folder), chosen_device(study.device))
        assert measured.change is not None
        save(spec.folder / ABLATIONS, {"sentences": measured.items, "change": measured.change.tolist()})
        if drop:
            drop_weights(spec)


def write_redundancy(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the distribution over heads of the change in accuracy."""
    changes = {each.row.label: _changes(each) for each in finished}
    if not all(changes.values()):
        print("redundancy: no table, runs have not been measured")
        return
    small = {label: {seed: redundant(change) for seed, change in runs.items()} for label, runs in changes.items()}
    first = next(iter(small))
    rows = []
    for label, runs in changes.items():
        pooled = torch.cat(list(runs.values()))  # [heads of all seeds]
        compared = over_seeds(small[label], small[first]) if label != first else None
        difference = ""
        if compared is not None:
            difference = f"{100 * compared.difference:+.0f} [{100 * compared.low:+.0f}, {100 * compared.high:+.0f}]"
        rows.append(
            [
                label,
                str(len(runs)),
                str(len(pooled)),
                f"{pooled.mean():+.2f}",
                f"{pooled.min():+.2f}",
                f"{100 * statistics.fmean(small[label].values()):.0f} %",
                f"{100 * (pooled > 0).double().mean():.0f} %",
                difference,
            ]
        )
    table = format_table(COLUMNS, rows)
    print(f"\n{study.task}: redundancy\n{table}", flush=True)
    save(results / "redundancy.md", "\n".join(["# redundancy", "", LEAD, table]) + "\n")
    data = {label: {str(seed): change.tolist() for seed, change in runs.items()} for label, runs in changes.items()}
    save(results / "redundancy.json", data)
    by_label = {label: torch.cat(list(runs.values())) for label, runs in changes.items()}
    write_svgs(redundancy_charts(by_label, "change of accuracy, percentage points"), results)


def _changes(each: FinishedRow) -> dict[int, torch.Tensor]:
    """Changes of all heads by seed, in percentage points."""
    stored = {seed: read_json(run.path / ABLATIONS) for seed, run in each.runs.items()}
    return {seed: 100 * torch.tensor(facts["change"]) for seed, facts in stored.items() if facts is not None}
