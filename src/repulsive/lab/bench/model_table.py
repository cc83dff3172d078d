"""Print the cost of rules as a table of at most 80 columns, with machine and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repulsive.lab.bench.model_cost import AGAIN, GIGA
from repulsive.lab.bench.turns import MEASURING, PLAIN, TRAINING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

KINDS = ("ordinary", "measuring", "renewing")


def print_costs(facts: dict[str, Any], console: Console, full: bool = False) -> None:
    """Print the result of `measure_model`.

    Args:
        facts: the result, possibly read from JSON.
        console: where to print; all lines fit 80 columns.
        full: show confidence intervals, throughput, memory, and the time inside hooks.
    """
    from rich.table import Table

    results, unit = facts["results"], facts["unit"]
    with_memory = any(row["peak_bytes"] is not None for row in results.values())
    table = Table(title=f"{facts['settings']['model']}: milliseconds per training step", title_justify="left", box=None)
    table.add_column("rule", no_wrap=True)
    columns = ["plain", "repelled", "ratio", "95 % interval", f"{unit}/s", *(["GB"] if with_memory else [])]
    for title in columns if full else columns[:3]:
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in results.items():
        if row["baseline"] is None:
            continue
        cells = [
            name,
            f"{1e3 * results[row['baseline']]['seconds']:.2f}",
            f"{1e3 * row['seconds']:.2f}",
            _ratio(row["ratio"]),
            f"{_ratio(row['low'])} to {_ratio(row['high'])}",
            f"{row['per_second']:,.0f}",
            *([_gigabytes(row["peak_bytes"])] if with_memory else []),
        ]
        table.add_row(*(cells if full else cells[:4]))
    console.print(table)
    if not full:
        console.print(f"'{AGAIN}' compares a second plain model with the first: the noise floor.", highlight=False)
        console.print(f"{facts['machine']}. --full: intervals, throughput, memory and settings.", highlight=False)
        return
    if any(row["hooks"] is not None for row in results.values()):
        console.print(_hook_table(results))
    for line in summary(facts):
        console.print(line, highlight=False)


def _hook_table(results: dict[str, Any]) -> Table:
    """Build the table of the time inside hooks, by kind of step."""
    from rich.table import Table

    table = Table(title="microseconds inside the hooks of a step", title_justify="left", box=None)
    table.add_column("rule", no_wrap=True)
    timed = {name: row for name, row in results.items() if row["hooks"] is not None}
    on_gpu = any(row["hooks"]["device"] is not None for row in timed.values())
    kinds = [kind for kind in KINDS if any(kind in row["hooks"]["host"] for row in timed.values())]
    for kind in kinds:
        table.add_column(f"{kind}\nhost{' + device' if on_gpu else ''}", justify="right", no_wrap=True)
    table.add_column("upper\nbound", justify="right", no_wrap=True)
    for name, row in timed.items():
        sides = [side for side in (row["hooks"]["host"], row["hooks"]["device"]) if side is not None]
        cells = [" + ".join(f"{1e6 * side[kind]:,.0f}" for side in sides if kind in side) for kind in kinds]
        table.add_row(name, *cells, "" if row["bound"] is None else _ratio(row["bound"]))
    return table


def summary(facts: dict[str, Any]) -> list[str]:
    """Return the sentences below the table: model, machine, and how to read the numbers."""
    settings, versions, plain = facts["settings"], facts["versions"], facts["results"][PLAIN]
    batch, length, unit = settings["batch"], settings["length"], facts["unit"]
    step = f"{batch} images" if unit == "images" else f"{batch} x {length} tokens"
    optimizer = "fused AdamW" if settings["device"] == "cuda" else "AdamW"
    compiled = ", compiled" if settings["compiled"] else ""
    lines = [
        f"{facts['parameters'] / 1e6:.0f}M parameters with random weights, {step} per step, {optimizer}, "
        f"{facts['precision']}{compiled}.",
        f"Plain: {plain['per_second']:,.0f} {unit} per second, peak memory {_peak(facts)}.",
        f"'{AGAIN}' compares a second plain model with the first: the noise floor.",
        f"{facts['rounds']} rounds; each turn of a model lies between two turns of the plain one. One step of a turn "
        f"measures, {settings['steps']} are ordinary. An average step is one of {TRAINING:,}, of which {MEASURING} "
        "measure. Step times are medians, ratios Hodges-Lehmann estimates with Wilcoxon's interval.",
        *_renewals(facts["results"]),
        "Upper bound: host and device time inside the hooks of an average step, over the plain step. The host's time "
        "is the cost if the host is the bottleneck, the device's time otherwise.",
        f"{facts['machine']}, {facts['threads']} CPU threads, torch {versions.get('torch')}, "
        f"transformers {versions.get('transformers')}, {facts['date']}.",
    ]
    return [*lines, *(f"Left out: {name} ({reason})." for name, reason in facts["left_out"].items())]


def _renewals(results: dict[str, Any]) -> list[str]:
    """Describe the renewing steps of rules that have them."""
    return [
        f"{name}: {row['renewals']} of {TRAINING:,} steps renew the force, and take "
        f"{1e3 * row['renewing_seconds']:.2f} ms; its ordinary steps take {1e3 * row['ordinary_seconds']:.2f} ms, "
        f"plain ones {1e3 * results[row['baseline']]['ordinary_seconds']:.2f} ms."
        for name, row in results.items()
        if row["renewals"]
    ]


def _ratio(value: float) -> str:
    """Format a ratio with four decimals, or with an exponent for the wide intervals of two or three rounds."""
    return f"{value:.4f}" if value < 100 else f"{value:.1e}"


def _peak(facts: dict[str, Any]) -> str:
    own = facts["results"][PLAIN]["peak_bytes"]
    if own is not None:
        return f"{_gigabytes(own)} GB"
    whole = facts["process_peak_bytes"]
    return "unknown" if whole is None else f"{_gigabytes(whole)} GB (the process, all {len(facts['results'])} models)"


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / GIGA:.2f}"
