"""Write tables and figures of the logits study from the JSON lines of `studies.logits.train`.

    python -m studies.logits.tables results/logits/raw/*.jsonl.xz --out results/logits --pictures docs/pictures

Each arm is compared at its own learning rate, the one with the lowest mean loss among those tried. Differences are
paired by seed, which fixes initial weights and the order of the data; intervals are 95 % by Student's t.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
from pathlib import Path
from typing import Any

from studies.dark_figures import follow_color_scheme

from repulsive.metrics import student
from repulsive.safety.markdown import format_table

Row = dict[str, Any]
Table = dict[tuple[str, float, int], Row]  # by arm, learning rate and seed
REFERENCE = "plain"
MANY = 12  # more arms than this get a figure
TINY = ("tiny-decide", "tiny-mechanism", "tiny-strength")  # files of one experiment
NOTE = (
    "In brackets: seeds. Bold: the arm's own rate, at which it is compared. Cosines are between logits of two heads "
    "of a layer at the end of training: mean over pairs and layers, mean over layers of the largest pair. Entropy is "
    "that of attention, in nats."
)
OVERVIEW = """# Repulsion 0.1 between logits, all experiments

Loss in nats per byte on validation text; each arm at its own learning rate, paired by seed, 95 % intervals. The
[study](../../docs/logits-study.md) says what the arms are and what follows; [commands](commands.md) has the trainings.
"""
ARM_COLORS = {
    "plain": "#444444",
    "repulsion 0.1": "#0b7a75",
    "attraction 0.1": "#b5443c",
    "wrong partner 0.1": "#c08a1e",
    "first tenth of training": "#3b6fb6",
}
FAVOURITES = ("repulsion 0.1", "attraction 0.1", "wrong partner 0.1", "QK-norm", "10 % more steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="compressed outputs of `studies.logits.train`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of the figures")
    options = parser.parse_args()
    experiments: dict[str, Table] = {}
    for file in options.files:
        name = file.name.split(".")[0]
        with lzma.open(file, "rt") as lines:
            rows = [json.loads(line) for line in lines]
        group = experiments.setdefault("tiny" if name in TINY else name, {})
        group |= {(row["arm"], row["rate"], row["seed"]): row for row in rows if row["loss"] is not None}
    for name, table in experiments.items():
        (options.out / f"{name}.md").write_text(_page(name, table))
        if len({arm for arm, _, _ in table}) > MANY:
            _draw_differences(table, options.pictures / f"logits-{name}.svg")
    (options.out / "README.md").write_text(_overview(experiments))
    _draw_training(experiments, options.pictures / "logits-training.svg")


def _overview(experiments: dict[str, Table]) -> str:
    """Compare repulsion with plain training and its two controls in every experiment."""
    header = ["experiment", "plain", "repulsion minus plain", "minus attraction", "minus wrong partner"]
    body = []
    for name, table in experiments.items():
        arms = {arm for arm, _, _ in table}
        if FAVOURITES[0] not in arms:
            continue
        plain = statistics.fmean(_losses(table, REFERENCE, best_rate(table, REFERENCE)).values())
        others = (REFERENCE, *FAVOURITES[1:3])
        cells = [_difference(table, FAVOURITES[0], other) if other in arms else "" for other in others]
        body.append([f"[{name}]({name}.md)", f"{plain:.4f}", *cells])
    return f"{OVERVIEW}\n{format_table(header, body)}\n"


def best_rate(table: Table, arm: str) -> float:
    """The learning rate with the lowest mean loss."""
    rates = {rate for name, rate, _ in table if name == arm}
    return min(rates, key=lambda rate: statistics.fmean(_losses(table, arm, rate).values()))


def difference(table: Table, arm: str, other: str) -> tuple[float, tuple[float, float] | None]:
    """Mean paired difference in loss, each arm at its own learning rate, and its interval."""
    one, two = (_losses(table, name, best_rate(table, name)) for name in (arm, other))
    values = [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]
    return statistics.fmean(values), student.interval(values)


def _losses(table: Table, arm: str, rate: float) -> dict[int, float]:
    return {seed: row["loss"] for (name, at, seed), row in table.items() if name == arm and at == rate}


def _page(name: str, table: Table) -> str:
    size = next(iter(table.values()))["size"]
    rates = sorted({rate for _, rate, _ in table})
    shape = f"{size['layers']} layers, {size['heads']} heads, width {size['width']}"
    if size["kv_heads"]:
        shape += f", {size['kv_heads']} key-value heads"
    if size.get("tied"):
        shape += ", tied embeddings"
    title = f"{shape}, {size['batch']} x {size['length']} bytes per step, {size['steps']:,} steps"
    header = ["arm", *(f"rate {rate:g}" for rate in rates), "minus plain", "mean cosine", "largest", "entropy"]
    body = []
    for arm in dict.fromkeys(arm for arm, _, _ in table):
        best = best_rate(table, arm)
        cells = []
        for rate in rates:
            losses = _losses(table, arm, rate)
            text = f"{statistics.fmean(losses.values()):.4f} ({len(losses)})" if losses else ""
            cells.append(f"**{text}**" if rate == best else text)
        rows = [row for (other, rate, _), row in table.items() if other == arm and rate == best]
        alike = [statistics.fmean(statistics.fmean(row["log"][key][-1]) for row in rows) for key in ("mean", "largest")]
        entropy = statistics.fmean(row["entropy"] for row in rows)
        numbers = [f"{alike[0]:+.2f}", f"{alike[1]:+.2f}", f"{entropy:.2f}"]
        body.append([arm, *cells, _difference(table, arm, REFERENCE), *numbers])
    lines = [f"# Logits study, {name}", "", f"{title}. Loss in nats per byte, mean over seeds.", ""]
    lines += [format_table(header, body), "", NOTE]
    known = [arm for arm in FAVOURITES if any(name == arm for name, _, _ in table)]
    if known:
        header = ["arm", *(f"minus {arm}" for arm in known[1:])]
        cells = [known[0], *(_difference(table, known[0], arm) for arm in known[1:])]
        lines += ["", "## Compared with the controls", "", format_table(header, [cells])]
    return "\n".join(lines) + "\n"


def _difference(table: Table, arm: str, other: str) -> str:
    if arm == other:
        return ""
    mean, interval = difference(table, arm, other)
    return f"{mean:+.4f}" + (f" [{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else "")


def _repels(table: Table, arm: str) -> bool:
    settings = next(row["settings"] for (name, _, _), row in table.items() if name == arm)
    return settings["qk"] > 0 and settings["partner"] == "own"


def _draw_differences(table: Table, path: Path) -> None:
    """Draw a forest plot of every arm's difference from plain training."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "repulsive"  # the same results give the same bytes
    from matplotlib import pyplot

    arms = [arm for arm in dict.fromkeys(arm for arm, _, _ in table) if arm != REFERENCE]
    differences = sorted(((arm, *difference(table, arm, REFERENCE)) for arm in arms), key=lambda row: -row[1])
    figure, axes = pyplot.subplots(figsize=(5.4, 0.2 * len(differences) + 1.0), layout="constrained")
    for height, (arm, mean, interval) in enumerate(differences):
        color = "#0b7a75" if _repels(table, arm) else "#777777"
        low, high = interval or (mean, mean)
        axes.plot([low, high], [height, height], color=color, linewidth=2)
        axes.plot(mean, height, "o", color=color, markersize=5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(differences)), [arm for arm, *_ in differences], fontsize=8)
    axes.set_xlabel("loss minus that of plain training, nats per byte\n(95 % interval; left is better)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(-0.7, len(differences) - 0.3)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title("green: heads of a layer repel in their logits; grey: other changes", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    follow_color_scheme(path)


def _draw_training(experiments: dict[str, Table], path: Path) -> None:
    """Draw the training loss minus that of plain training, and the similarity of logits, over training."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "repulsive"  # the same results give the same bytes
    from matplotlib import pyplot

    chosen = [name for name in ("tiny", "small", "tiny-long") if name in experiments]
    size = (5.4, 2.0 * len(chosen) + 0.8)
    figure, axes = pyplot.subplots(len(chosen), 2, figsize=size, layout="constrained", squeeze=False)
    for (losses, similarities), name in zip(axes, chosen, strict=True):
        table = experiments[name]
        for arm, color in ARM_COLORS.items():
            if not any(other == arm for other, _, _ in table):
                continue
            rate = best_rate(table, arm)
            rows = [row for (other, at, _), row in sorted(table.items()) if other == arm and at == rate]
            similarities.plot(*_mean_curve(list(map(_similarity, rows))), color=color, label=arm)
            pairs = [(row, twin) for row in rows if (twin := table.get((REFERENCE, rate, row["seed"])))]
            if pairs and arm != REFERENCE:
                losses.plot(*_mean_curve([_excess(*pair) for pair in pairs]), color=color)
        shape = next(iter(table.values()))["size"]
        losses.set_ylabel(f"{name}: {shape['layers']} layers,\nwidth {shape['width']}", fontsize=8)
        losses.axhline(0, color="black", linewidth=0.8)
        losses.set_ylim(-0.04, 0.06)  # early in training the loss is up to 0.3 higher
    axes[0][0].set_title("training loss minus that of\nplain training, nats per byte", fontsize=8)
    axes[0][1].set_title("mean cosine between\nthe logits of two heads", fontsize=8)
    for one in axes[-1]:
        one.set_xlabel("step", fontsize=8)
    figure.legend(
        *axes[0][1].get_legend_handles_labels(), ncols=3, fontsize=8, loc="outside lower center", frameon=False
    )
    for one in axes.flat:
        one.tick_params(labelsize=8)
        one.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    follow_color_scheme(path)


def _similarity(row: Row) -> dict[int, float]:
    """Return the mean cosine over layers at each step of the training."""
    return {step: statistics.fmean(row["log"]["mean"][i]) for i, step in _steps(row)}


def _excess(row: Row, twin: Row) -> dict[int, float]:
    """Return the training loss minus that of a twin, at the steps that both have."""
    other = {step: twin["log"]["loss"][i] for i, step in _steps(twin)}
    return {step: row["log"]["loss"][i] - other[step] for i, step in _steps(row) if step in other}


def _steps(row: Row) -> list[tuple[int, int]]:
    """List positions and steps of a log; entries after the end were written while a longer run went on beside."""
    return [(i, step) for i, step in enumerate(row["log"]["step"]) if step < row["size"]["steps"]]


def _mean_curve(curves: list[dict[int, float]]) -> tuple[list[int], list[float]]:
    """Average curves at the steps that all of them have."""
    steps = sorted(set.intersection(*map(set, curves)))
    return steps, [statistics.fmean(curve[step] for curve in curves) for step in steps]


if __name__ == "__main__":
    main()
