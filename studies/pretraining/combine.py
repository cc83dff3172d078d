"""GLUE after several pre-trainings of each method, as one table.

    python -m studies.pretraining.run --out runs/one --results results/pretraining/one ...
    python -m studies.pretraining.combine results/pretraining/one results/pretraining/two --out results/pretraining

Reads the `glue.json` and `curve.json` that studies/pretraining/run.py wrote. However often it was fine-tuned, a
pre-training counts as one: its score is the mean over its repeats, deviations and intervals are between pre-trainings.
Those of two methods with the same seed in the same folder are a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.engine import in_one_line, save
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
Scores are those on the development sets, by each task's own metric, times 100. A pre-training counts as one, by the
mean over its fine-tunings: deviations are between pre-trainings, and so are the 95 % intervals of differences
(Student's t), which are wide where there are few.
"""


def values_in(folder: Path, method: str) -> Values:
    """What each pre-training of a method came to; also its means over tasks, and the discriminator's AUC at the end."""
    system = read_json(folder / "glue.json")["systems"].get(method)
    if system is None:
        return {}
    repeats: dict[str, dict[str, list[float]]] = {}
    for column, scores in system["scores"].items():
        for seed, score in scores.items():
            name = f"{folder.name}/seed-{int(seed) // SEEDS}"
            repeats.setdefault(column, {}).setdefault(name, []).append(score)
    found = {
        column: {name: statistics.fmean(some) for name, some in by_name.items()} for column, by_name in repeats.items()
    }
    for mean, columns in MEANS.items():
        complete = set.intersection(*(set(found.get(column, {})) for column in columns))
        found[mean] = {name: statistics.fmean(found[c][name] for c in columns) for name in sorted(complete)}
    curves = (read_json(folder / "curve.json") or {}).get(method, {}).get("pretraining", {}).get(AUC, {})
    found[AUC] = {f"{folder.name}/seed-{seed}": points[-1][1] for seed, points in curves.items()}
    return found


def gather(folders: Sequence[Path]) -> dict[str, Values]:
    """Method -> its pre-trainings in all folders.

    Raises:
        RunError: a folder has no table, is there twice, or its models saw another number of tokens.
    """
    found: dict[str, Values] = {}
    tokens: dict[int, Path] = {}
    for folder in folders:
        table = read_json(folder / "glue.json")
        if table is None:
            raise RunError(f"{folder}: holds no glue.json; studies/pretraining/run.py --stage tables writes it")
        tokens.setdefault(table["tokens"], folder)
        for method in METHODS:
            for column, some in values_in(folder, method).items():
                known = found.setdefault(method, {}).setdefault(column, {})
                if known.keys() & some.keys():
                    raise RunError(f"{folder}: another folder has its name; a pre-training counts once")
                known.update(some)
    if len(tokens) > 1:
        told = ", ".join(f"{path} has {count:,}" for count, path in tokens.items())
        raise RunError(f"pre-trainings of different lengths are no repeats: {told} tokens")
    return found


def differences(mine: Values, theirs: Values) -> dict[str, dict[str, Any]]:
    """Column -> how much higher a method is than another, over the pre-trainings that both have."""
    found = {}
    for column, values in mine.items():
        shared = [name for name in values if name in theirs.get(column, {})]
        if not shared:
            continue
        each = [values[name] - theirs[column][name] for name in shared]
        low, high = interval(each) or (None, None)
        seen = {"difference": statistics.fmean(each), "low": low, "high": high, "seeds": len(each), "each": each}
        found[column] = seen
    return found


def told(seen: Mapping[str, Any], digits: int) -> str:
    """`-0.55 [-16.04, +14.95] (-1.77, +0.67)`."""
    text = f"{seen['difference']:+.{digits}f}"
    if seen["low"] is None:
        return f"{text} (one pre-training)"
    each = ", ".join(f"{x:+.{digits}f}" for x in seen["each"])
    return f"{text} [{seen['low']:+.{digits}f}, {seen['high']:+.{digits}f}] ({each})"


def write(found: Mapping[str, Values], tokens: int, out: Path) -> None:
    """The table and all numbers."""
    rows = []
    for method, values in found.items():
        cells = {column: cell(list(values[column].values())) for column in COLUMNS if values.get(column)}
        rows.append(System(METHODS[method], cells, {column: len(values[column]) for column in cells}))
    against = {m: differences(values, found[BASELINE]) for m, values in found.items() if m != BASELINE}
    against = against if BASELINE in found else {}
    lines = [as_markdown(rows, "pre-trainings"), ""]
    for method, values in found.items():
        if aucs := values.get(AUC):
            shown = ", ".join(f"{value:.3f}" for value in aucs.values())
            lines.append(f"{METHODS[method]}, AUC of the discriminator: {shown}.  ")
    for method, seen in against.items():
        lines += ["", f"{METHODS[method]} less {METHODS[BASELINE]}:", ""]
        for column, compared in seen.items():
            name = title(column) if column in COLUMNS else column.replace(AUC, AUC.upper())
            lines.append(f"- {name}: {told(compared, 3 if column == AUC else 2)}")
    print("\n".join(lines), flush=True)
    head = ["# GLUE after several pre-trainings", "", f"After {tokens:,} tokens.", "", HEAD]
    save(out / "glue.md", "\n".join([*head, *lines]) + "\n")
    systems = {}
    for (method, values), row in zip(found.items(), rows, strict=True):
        means = {name: values.get(name, {}) for name in MEANS}
        systems[method] = dataclasses.asdict(row) | {"values": values, "means": means}
    save(out / "glue.json", {"tokens": tokens, "systems": systems, "against": against})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results of a study")
    parser.add_argument("--out", type=Path, default=Path("results/pretraining"))
    given = parser.parse_args(words)
    with in_one_line(parser):
        found = gather(given.folders)
        write(found, read_json(given.folders[0] / "glue.json")["tokens"], given.out)


if __name__ == "__main__":
    main()
