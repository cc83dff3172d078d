"""Tables of the study `translation`: differences in loss and BLEU, and the heads over training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.output import save

from repulsive.metrics import student
from repulsive.safety.markdown import format_table

Runs = Mapping[int, Mapping[str, Any]]  # seed -> record
BASELINE = "plain"
MEASURED = {  # column -> metric of a curve
    "NLL": "nll",
    "similarity of logits": "similarity",
    "entropy (nats)": "entropy",
    "largest logit": "largest_logit",
    "redundant heads": "redundant",
    "cost of a head": "loss_of_a_head",
}
LEAD = """Width 256, 3 + 3 layers, 4 heads, packed batches of 4,096 tokens, AdamW, a rate that falls to zero. Every arm
has its own learning rate, the best of four on the development set (one seed; for decay on Multi30k it is the highest);
then other seeds, and the test set. *logits* is the rule "logits" (in the first 500 steps), *attraction* the same with
the opposite sign, *decay* plain training with a weight decay of 0.3 instead of 1e-4. Differences are from plain
training with the same seed, with 95 % intervals over seeds.
"""
HEADS = """Means over seeds at the end of an epoch. *Similarity* is the mean cosine between the logits of two heads of a
layer, *entropy* and *largest logit* are those of an average head on the same 16 sentences. A head is *redundant* if its
removal changes the token accuracy on the development set by less than 0.5 points; *cost of a head* is the mean loss of
accuracy in points.
"""


def write_tables(records: Mapping[tuple[str, str, str, float, int], Mapping[str, Any]], results: Path) -> None:
    """Write RESULTS/translation.md.

    Args:
        records: dataset, arm, stage, rate and seed -> record of the run.
        results: folder of the tables.
    """
    final: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    in_order = sorted(records.items(), key=lambda item: (item[0][1] != BASELINE, item[0][1] == "decay", item[0]))
    for (dataset, arm, stage, _, seed), record in in_order:
        if stage == "final" and "test" in record:
            final.setdefault(dataset, {}).setdefault(arm, {})[seed] = record
    lines = ["# Repulsion between attention logits in translation", "", LEAD]
    for dataset in sorted({key[0] for key in records}, key=lambda name: (name not in final, name)):
        arms = final.get(dataset)
        lines += [f"## {dataset}", ""]
        lines += [_losses(arms), "", HEADS, _curves(arms), ""] if arms else ["Tuned only; no test results yet.", ""]
        tried = [
            [arm, f"{rate:g}", f"{r['dev']['nll']:.4f}" if "dev" in r else "diverged"]
            for (name, arm, stage, rate, _), r in sorted(records.items())
            if name == dataset and stage == "tune"
        ]
        lines += ["Learning rates tried:", "", format_table(("arm", "learning rate", "NLL, development"), tried), ""]
    about = {(r["device"], r["versions"]["torch"]) for r in records.values()}
    lines += ["`python -m studies.logits.translation`, " + ", ".join(f"{d}, torch {t}" for d, t in sorted(about)) + "."]
    save(results / "translation.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


def _losses(arms: Mapping[str, Runs]) -> str:
    rows = []
    for arm, runs in arms.items():
        nll = statistics.fmean(r["test"]["nll"] for r in runs.values())
        bleu = statistics.fmean(r["test"]["bleu"] for r in runs.values())
        rate = next(iter(runs.values()))["rate"]
        cells = [arm, str(len(runs)), f"{rate:g}", f"{nll:.4f}", f"{bleu:.2f}"]
        for name, factor, unit in (("nll", 100.0, " %"), ("bleu", 1.0, "")):
            cells.append("" if arm == BASELINE else _difference(runs, arms.get(BASELINE, {}), name, factor, unit))
        rows.append(cells)
    return format_table(("arm", "seeds", "rate", "NLL", "BLEU", "NLL minus plain", "BLEU minus plain"), rows)


def _difference(ours: Runs, plain: Runs, name: str, factor: float, unit: str) -> str:
    """Format a paired difference; of the NLL relative to plain training."""
    seeds = sorted(ours.keys() & plain.keys())
    values = []
    for seed in seeds:
        a, b = (runs[seed]["test"][name] for runs in (ours, plain))
        values.append(factor * ((a - b) / b if name == "nll" else a - b))
    bounds = student.interval(values)
    if bounds is None:
        return ""
    return f"{statistics.fmean(values):+.2f}{unit} [{bounds[0]:+.2f}{unit}, {bounds[1]:+.2f}{unit}]"


def _curves(arms: Mapping[str, Runs]) -> str:
    rows = []
    for arm, runs in arms.items():
        curves: Sequence[Sequence[Mapping[str, float]]] = [r["curve"] for r in runs.values()]
        for points in zip(*curves, strict=True):
            if "redundant" not in points[0]:
                continue
            means = [statistics.fmean(point[key] for point in points) for key in MEASURED.values()]
            rows.append([arm, f"{points[0]['epoch']:.0f}", *(f"{mean:.3g}" for mean in means)])
    return format_table(("arm", "epoch", *MEASURED), rows)
