"""Effect of removing heads on translators whose weights were kept, on the test set (the paper's Figure 2)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from studies.engine import drop_weights
from studies.output import save, write_svgs
from studies.translation.end_of_training import LEAD as MODELS
from studies.translation.end_of_training import SCORES, Metrics, final_metrics, format_metrics
from studies.translation.finished_rows import FinishedRow
from torch import Tensor

from repulsive.diagnostics.redundancy import Curve
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.gpu_sharing import shared_gpu
from repulsive.lab.engine.launch import Spec
from repulsive.lab.engine.processes import chosen_device
from repulsive.lab.engine.runs import RunFolder
from repulsive.lab.engine.workers import DONE, WorkerPool
from repulsive.lab.paper.differences import over_seeds
from repulsive.lab.paper.figure2_redundancy import ablate_each_head
from repulsive.lab.runs.panels import SMALL, redundant
from repulsive.metrics.compare import Comparison
from repulsive.pages.charts import pruning_chart, redundancy_charts
from repulsive.safety.markdown import format_table

if TYPE_CHECKING:
    from studies.translation.study import Translation

ABLATIONS = "without.json"  # in the folder of a run
_POLL = 0.25  # seconds between two looks at the workers
SHARE = f"less than {SMALL:g}"
HARMFUL = "removal helps"
COLUMNS = ("method", "seeds", "heads", "mean change", "largest loss", SHARE, HARMFUL, "difference")
LEAD = f"""Each head of every attention is removed in turn, without retraining. Changes are those of the token accuracy
on the test set, given the preceding reference tokens, in percentage points. "{SHARE}" is the share of heads whose
removal changes less than that, "{HARMFUL}" that of heads whose removal increases accuracy; "difference" compares
"{SHARE}" with the first row, over seeds.
"""
PRUNING = """Change of the token accuracy, in percentage points, when so many heads are removed together, those first
whose own removal costs least on the same sentences, without retraining; mean over seeds. Below, the difference from the
first row with a 95 % interval over seeds.
"""
Curves = dict[str, dict[int, Curve]]  # row -> seed -> pruning curve


@dataclass(frozen=True)
class Job:
    """A run to measure.

    Args:
        spec: specification of the run.
        device: "cpu", "cuda" or None for a GPU where there is one.
        drop: delete weights after the measurement.
    """

    spec: Spec
    device: str | None
    drop: bool

    @property
    def folder(self) -> Path:
        return self.spec.folder


def measure(job: Job, file: TextIO | None = None) -> None:
    """Remove the heads of one run, and write the changes to its folder."""
    measured = ablate_each_head(RunFolder(job.folder), chosen_device(job.device))
    assert measured.change is not None and measured.pruned is not None
    curve = measured.pruned
    facts: dict[str, Any] = {"sentences": measured.items, "change": measured.change.tolist()}
    facts["pruned"] = {"removed": curve.removed, "metric": curve.metric, "order": curve.order}
    save(job.folder / ABLATIONS, facts)
    if job.drop:
        drop_weights(job.spec)


def measure_all(study: Translation, *, drop: bool, jobs: int = 1, end: float = float("inf")) -> None:
    """Measure all runs of the stage that have weights and have not been measured.

    Args:
        study: whose runs.
        drop: delete weights after the measurement.
        jobs: number of runs side by side; 0 measures four, 1 measures in this process.
        end: time (of `time.monotonic`); runs that would take longer are left for a later call.
    """
    specs = [spec for row in study.rows("redundancy") for spec in study.runs(row, "redundancy")]
    missing = [
        Job(spec, study.device, drop)
        for spec in specs
        if not (spec.folder / ABLATIONS).is_file() and (spec.folder / "best").is_dir()
    ]
    print(f"redundancy: {len(specs)} runs, {len(missing)} to measure", flush=True)
    if jobs == 1:
        _measure_in_sequence(missing, end)
    elif missing:
        _measure_side_by_side(missing, jobs or 4, end)
    if missing:
        print(f"redundancy: {len(missing)} runs left to measure", flush=True)


def _measure_in_sequence(missing: list[Job], end: float) -> None:
    """Measure runs in this process; those that were measured are removed from the list."""
    longest = 0.0
    while missing and (started := time.monotonic()) + longest < end:
        measure(missing.pop(0))
        longest = max(longest, time.monotonic() - started)


def _measure_side_by_side(missing: list[Job], jobs: int, end: float) -> None:
    longest, started = 0.0, dict[Path, float]()
    with shared_gpu(missing[0].device != "cpu"), WorkerPool(measure) as pool:
        while pool.busy or (missing and time.monotonic() + longest < end):
            while missing and pool.busy < jobs and time.monotonic() + longest < end:
                job = missing.pop(0)
                started[job.folder] = time.monotonic()
                pool.start(job)
            for job, outcome in pool.ended(_POLL):
                longest = max(longest, time.monotonic() - started[job.folder])
                if outcome != DONE:
                    print(job.folder, outcome, flush=True)


def write_redundancy(study: Translation, finished: Sequence[FinishedRow], results: Path) -> None:
    """Write the distribution over heads of the change in accuracy, the scores of the models, and the pruning curves."""
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
        rows.append(
            [
                label,
                str(len(runs)),
                str(len(pooled)),
                f"{pooled.mean():+.2f}",
                f"{pooled.min():+.2f}",
                f"{100 * statistics.fmean(small[label].values()):.0f} %",
                f"{100 * (pooled > 0).double().mean():.0f} %",
                "" if compared is None else _interval(compared, 100, 0),
            ]
        )
    curves = {each.row.label: _curves(each) for each in finished}
    models = {each.row.label: final_metrics(each) for each in finished}
    lines = ["# redundancy", "", LEAD, format_table(COLUMNS, rows), "", "## models", "", MODELS, *_model_lines(models)]
    if all(curves.values()):
        lines += ["", "## pruning", "", PRUNING, *pruning_lines(curves)]
        write_svgs([pruning_chart({k: list(v.values()) for k, v in curves.items()}, "token accuracy")], results)
        save(results / "pruning.json", {label: _plain(runs) for label, runs in curves.items()})
    print(f"\n{study.task}: redundancy\n" + "\n".join(lines[3:]), flush=True)
    save(results / "redundancy.md", "\n".join(lines) + "\n")
    data = {label: {str(seed): change.tolist() for seed, change in runs.items()} for label, runs in changes.items()}
    save(results / "redundancy.json", data)
    save(results / "redundancy-models.json", models)
    by_label = {label: torch.cat(list(runs.values())) for label, runs in changes.items()}
    write_svgs(redundancy_charts(by_label, "change of accuracy, percentage points"), results)


def _model_lines(models: Mapping[str, Metrics]) -> list[str]:
    """Format the scores of all models with all heads, and their differences from those of the first row."""
    (first, plain), *others = models.items()
    lines = [format_metrics({(label,): metrics for label, metrics in models.items()}, ("method",)), ""]
    for label, metrics in others:
        for name, (title, digits) in SCORES.items():
            if (compared := over_seeds(metrics[name], plain[name])) is not None:
                lines.append(f"- {label} minus {first}, {title}: {_interval(compared, 1, digits)}")
    return lines


def pruning_lines(curves: Curves) -> list[str]:
    """Format pruning curves as a table: a column for each share of removed heads that all curves have."""
    by_share = {
        label: {seed: _changes_by_share(curve) for seed, curve in runs.items()} for label, runs in curves.items()
    }
    every = [set(changes) for runs in by_share.values() for changes in runs.values()]
    shares = sorted(set.intersection(*every) - {0})
    first, rows, differences = next(iter(by_share)), [], []
    for label, runs in by_share.items():
        means = [f"{statistics.fmean(changes[share] for changes in runs.values()):+.2f}" for share in shares]
        rows.append([label, str(len(runs)), *means])
        if label == first:
            continue
        cells = []
        for share in shares:
            ours, theirs = ({s: c[share] for s, c in some.items()} for some in (runs, by_share[first]))
            compared = over_seeds(ours, theirs)
            cells.append("" if compared is None else _interval(compared, 1, 2))
        differences.append([f"{label} minus {first}", str(len(runs)), *cells])
    head = ["heads removed", "seeds", *(f"{share} %" for share in shares)]
    return [format_table(head, rows), "", format_table(head, differences)]


def _changes_by_share(curve: Curve) -> dict[int, float]:
    """Return rounded percentage of removed heads -> change of accuracy in percentage points."""
    return {
        round(100 * count / len(curve.order)): 100 * (metric - curve.metric[0])
        for count, metric in zip(curve.removed, curve.metric, strict=True)
    }


def _interval(compared: Comparison, factor: float, digits: int) -> str:
    d, low, high = (factor * x for x in (compared.difference, compared.low, compared.high))
    return f"{d:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def _plain(runs: Mapping[int, Curve]) -> dict[str, Any]:
    return {str(seed): {"removed": c.removed, "metric": c.metric, "order": c.order} for seed, c in runs.items()}


def _stored(each: FinishedRow) -> dict[int, dict[str, Any]]:
    found = {seed: read_json(run.path / ABLATIONS) for seed, run in each.runs.items()}
    return {seed: facts for seed, facts in found.items() if facts is not None}


def _changes(each: FinishedRow) -> dict[int, Tensor]:
    """Changes of all heads by seed, in percentage points."""
    return {seed: 100 * torch.tensor(facts["change"]) for seed, facts in _stored(each).items()}


def _curves(each: FinishedRow) -> dict[int, Curve]:
    """Pruning curves by seed, of runs that have one."""
    curves = {seed: facts["pruned"] for seed, facts in _stored(each).items() if "pruned" in facts}
    return {seed: Curve(c["removed"], c["metric"], tuple(map(tuple, c["order"]))) for seed, c in curves.items()}
