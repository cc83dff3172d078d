"""Combine the GLUE results of several pre-trainings of each method in one table.

    python -m studies.pretraining.run --out runs/one --results results/pretraining/one ...
    python -m studies.pretraining.combine results/pretraining/one results/pretraining/two --out results/pretraining

Reads `glue.json` and `curve.json`, which `studies.pretraining.run` writes. The unit is a pre-training, however often it
was fine-tuned: its score is the mean over its repeats, and deviations and intervals are between pre-trainings.
Pre-trainings of two methods with the same seed in the same folder are a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.arguments import errors_in_one_line
from studies.output import save
from studies.pretraining.rows import BASELINE, METHODS, SEEDS

from repulsive.errors import RunError
from repulsive.lab.engine.files import read_json
from repulsive.lab.engine.tables import cell
from repulsive.lab.systems.glue.data import TASKS
from repulsive.lab.systems.glue.table import COLUMNS, FROM_RUN, System, as_markdown, title
from repulsive.metrics.student import interval

Values = dict[str, dict[str, float]]  # column -> pre-training -> value

AUC = "auc"
MEANS = {"mean": list(TASKS), "mean, RTE from MNLI": [FROM_RUN if name == "rte" else name for name in TASKS]}
HEAD = """\
Scores are those of the development sets, by each task's own metric, times 100. The score of a pre-training is the mean
over its fine-tunings. Deviations and the 95 % intervals of differences (Student's t) are between pre-trainings;
intervals from few pre-trainings are wide.
"""


def values_in(folder: Path, method: str) -> Values:
    """Scores of each pre-training of a method, its means over tasks, and the final AUC of its discriminator."""
    system = read_json(folder / "glue.json")["systems"].get(method)
    if system is None:
        return {}
    repeats: dict[str, dict[str, list[float]]] = {}
    for column, scores in system["scores"].items():
        for seed, score in scores.items():
            name = f"{folder.name}/seed-{int(seed) // SEEDS}"
            repeats.setdefault(column, {}).setdefault(name, []).append(score)
    values = {
        column: {name: statistics.fmean(some) for name, some in by_name.items()} for column, by_name in repeats.items()
    }
    for mean, columns in MEANS.items():
        complete = set.intersection(*(set(values.get(column, {})) for column in columns))
        values[mean] = {name: statistics.fmean(values[c][name] for c in columns) for name in sorted(complete)}
    curves = (read_json(folder / "curve.json") or {}).get(method, {}).get("pretraining", {}).get(AUC, {})
    values[AUC] = {f"{folder.name}/seed-{seed}": points[-1][1] for seed, points in curves.items()}
    return values


def gather(folders: Sequence[Path]) -> dict[str, Values]:
    """Method -> values of its pre-trainings in all folders.

    Raises:
        RunError: a folder has no table, appears twice, or its models saw another number of tokens.
    """
    by_method: dict[str, Values] = {}
    tokens: dict[int, Path] = {}
    for folder in folders:
        table = read_json(folder / "glue.json")
        if table is None:
            raise RunError(f"{folder}: has no glue.json; write it with `studies.pretraining.run --stage tables`")
        tokens.setdefault(table["tokens"], folder)
        for method in METHODS:
            for column, some in values_in(folder, method).items():
                values = by_method.setdefault(method, {}).setdefault(column, {})
                if values.keys() & some.keys():
                    raise RunError(f"{folder}: given twice, or another folder has the same name; pass each once")
                values.update(some)
    if len(tokens) > 1:
        counts = ", ".join(f"{path} has {count:,}" for count, path in tokens.items())
        raise RunError(f"expected pre-trainings on equal numbers of tokens: {counts}")
    return by_method


def differences(mine: Values, theirs: Values) -> dict[str, dict[str, Any]]:
    """Column -> difference of two methods, over the pre-trainings that both have."""
    by_column = {}
    for column, values in mine.items():
        shared = [name for name in values if name in theirs.get(column, {})]
        if not shared:
            continue
        each = [values[name] - theirs[column][name] for name in shared]
        low, high = interval(each) or (None, None)
        counts = {"pretrainings": len(each), "seeds": len({_seed_of(name) for name in shared})}
        facts = {"difference": statistics.fmean(each), "low": low, "high": high}
        by_column[column] = facts | counts | {"each": each}
    return by_column


def repeated_seeds(by_method: Mapping[str, Values]) -> str:
    """Say which pre-trainings of a method share a seed; empty if none do."""
    parts = []
    for method, values in by_method.items():
        counts = Counter(_seed_of(name) for name in {name for column in values.values() for name in column})
        parts += [f"{METHODS[method]}: {count} with {seed}" for seed, count in sorted(counts.items()) if count > 1]
    if not parts:
        return ""
    return (
        "Pre-trainings with the same seed are not independent seeds. They differ only by rounding on the GPU, and "
        f"their\nintervals do not include the variation between seeds. {'; '.join(parts)}.\n"
    )


def _seed_of(name: str) -> str:
    """`one/seed-0` -> `seed 0`."""
    return name.rpartition("/")[2].replace("-", " ")


def format_difference(facts: Mapping[str, Any], digits: int) -> str:
    """Mean, interval and single differences: `-0.55 [-16.04, +14.95] (-1.77, +0.67)`."""
    text = f"{facts['difference']:+.{digits}f}"
    if facts["low"] is None:
        return f"{text} (one pre-training)"
    each = ", ".join(f"{x:+.{digits}f}" for x in facts["each"])
    return f"{text} [{facts['low']:+.{digits}f}, {facts['high']:+.{digits}f}] ({each})"


def write(by_method: Mapping[str, Values], tokens: int, out: Path) -> None:
    """Write the table and all numbers."""
    rows = []
    for method, values in by_method.items():
        cells = {column: cell(list(values[column].values())) for column in COLUMNS if values.get(column)}
        rows.append(System(METHODS[method], cells, {column: len(values[column]) for column in cells}))
    against = {}
    if BASELINE in by_method:
        others = {method: values for method, values in by_method.items() if method != BASELINE}
        against = {method: differences(values, by_method[BASELINE]) for method, values in others.items()}
    lines = [as_markdown(rows, "pre-trainings"), ""]
    for method, values in by_method.items():
        if aucs := values.get(AUC):
            shown = ", ".join(f"{value:.3f}" for value in aucs.values())
            lines.append(f"{METHODS[method]}, AUC of the discriminator: {shown}.  ")
    for method, by_column in against.items():
        lines += ["", f"{METHODS[method]} minus {METHODS[BASELINE]}:", ""]
        for column, facts in by_column.items():
            name = title(column) if column in COLUMNS else column.replace(AUC, AUC.upper())
            lines.append(f"- {name}: {format_difference(facts, 3 if column == AUC else 2)}")
    print("\n".join(lines), flush=True)
    head = ["# GLUE after several pre-trainings", "", f"After {tokens:,} tokens.", "", HEAD]
    head += [note] if (note := repeated_seeds(by_method)) else []
    save(out / "glue.md", "\n".join([*head, *lines]) + "\n")
    systems = {}
    for (method, values), row in zip(by_method.items(), rows, strict=True):
        means = {name: values.get(name, {}) for name in MEANS}
        systems[method] = dataclasses.asdict(row) | {"values": values, "means": means}
    save(out / "glue.json", {"tokens": tokens, "systems": systems, "against": against})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results of `studies.pretraining.run`")
    parser.add_argument("--out", type=Path, default=Path("results/pretraining"), help="folder of the table")
    arguments = parser.parse_args(words)
    with errors_in_one_line(parser):
        by_method = gather(arguments.folders)
        write(by_method, read_json(arguments.folders[0] / "glue.json")["tokens"], arguments.out)


if __name__ == "__main__":
    main()
