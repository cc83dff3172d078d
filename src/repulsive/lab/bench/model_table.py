"""Print the cost of rules as a table of at most 80 columns, with machine and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repulsive.lab.bench.model_cost import GIGA
from repulsive.lab.bench.turns import MEASURING, PLAIN, TRAINING
from repulsive.lab.bench.warm_up import AGAIN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

NOISE = f"'{AGAIN}' compares plain turns with plain turns: the noise floor."
KINDS = ("ordinary", "measuring", "renewing", "off")


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
    columns = ["plain", "repelled", "ratio", "95 % interval", f"{unit}/s", *(["+MB"] if with_memory else [])]
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
            *([_additional_megabytes(row, results)] if with_memory else []),
        ]
        table.add_row(*(cells if full else cells[:4]))
    console.print(table)
    if not full:
        for line in [NOISE, *_own_graphs(results)]:
            console.print(line, highlight=False)
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
        NOISE,
        f"{facts['rounds']} rounds; all turns train the same model, and each turn with a rule lies between two plain "
        f"ones. One step of a turn measures, {settings['steps']} are ordinary. An average step is one of "
        f"{TRAINING:,}, of which {MEASURING} measure. Step times are medians, ratios Hodges-Lehmann estimates with "
        "Wilcoxon's interval.",
        *_renewals(facts["results"]),
        *_resting(facts["results"]),
        *_own_graphs(facts["results"]),
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


def _resting(results: dict[str, Any]) -> list[str]:
    """Describe rules that do not act in every step."""
    lines = []
    for name, row in results.items():
        if row.get("act_every", 1) > 1:
            lines.append(f"{name}: acts in one of {row['act_every']} steps; its times are means over as many steps.")
        if row.get("active", TRAINING) < TRAINING:
            lines.append(f"{name}: acts in the first {row['active']:,} of {TRAINING:,} steps, and is off afterwards.")
    return lines


def _own_graphs(results: dict[str, Any]) -> list[str]:
    """Name the rules that are compiled apart from the plain model."""
    names = ", ".join(name for name, row in results.items() if row.get("own_graph"))
    reason = "compiled again, to sample tokens inside the graph, and compared with the plain graph (same weights)."
    return [f"{names}: {reason}"] if names else []


def _ratio(value: float) -> str:
    """Format a ratio with four decimals, or with an exponent for the wide intervals of two or three rounds."""
    return f"{value:.4f}" if value < 100 else f"{value:.1e}"


def _peak(facts: dict[str, Any]) -> str:
    own = facts["results"][PLAIN]["peak_bytes"]
    if own is not None:
        return f"{_gigabytes(own)} GB"
    whole = facts["process_peak_bytes"]
    return "unknown" if whole is None else f"{_gigabytes(whole)} GB (the process, all rules)"


def _gigabytes(count: int) -> str:
    return f"{count / GIGA:.2f}"


def _additional_megabytes(row: dict[str, Any], results: dict[str, Any]) -> str:
    """Format the additional peak memory of a rule over plain training."""
    own, plain = row["peak_bytes"], results[PLAIN]["peak_bytes"]
    return "" if own is None or plain is None else f"{(own - plain) / 1e6:,.1f}"
