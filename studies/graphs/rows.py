"""Grids and rows of the graph-to-text study, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from studies.engine import Grid

TASKS = ("webnlg", "agenda")
BASELINE, OURS = "gw", "rma"
CONTROLS = ("control-scaled", "control-smoothed")  # also start from the stepsize that was chosen for ours
LABELS = {  # methods in the order of the tables
    "gw": "GW",
    "cosine": "GW + R",
    "rma": "GW + RMA",
    "control-scaled": "control: gradient x eps/M",
    "control-smoothed": "control: alpha = 0",
}

# One or more grids for every method; all points are tried. Under plain SGD the rule scales the updates of the encoder's
# attention by stepsize / M, so a stepsize of M = 4 leaves them unscaled.
_UNSMOOTHED: Grid = {"method.smoothing": (0.0,)}
_SPHERE: Grid = {"method.alpha": ("auto",), **_UNSMOOTHED, "method.space": ("sphere",), "method.ratio": (0.1,)}
_METHODS: dict[str, list[Grid]] = {
    "cosine": [{"method.penalty": (0.1, 1.0, 10.0)}],
    "rma": [
        {"method.alpha": (0.001, 0.01, 0.1)},
        {"method.alpha": (0.01,), **_UNSMOOTHED},
        {**_SPHERE, "method.stepsize": (0.1, 4.0)},
    ],
    "control-scaled": [{}],
    "control-smoothed": [{}],
}
GRIDS: dict[str, dict[str, list[Grid]]] = {
    "webnlg": {"gw": [{"optimizer.lr": (0.1, 0.2, 0.4), "model.dropout": (0.1, 0.3)}], **_METHODS},
    "agenda": {method: [{}] for method in LABELS},  # few graphs are available: the paper's settings, no tuning
}


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        label: name of the row.
        method: recipe of its runs.
        changes: `key=value` changes of the recipe.
    """

    label: str
    method: str
    changes: tuple[str, ...] = ()


# The published settings, written out because recipes may be tuned later.
PUBLISHED = Row(
    "GW + RMA, as published",
    OURS,
    ("method.stepsize=0.1", "method.alpha=0.01", "method.smoothing=1.0", "method.space=weights"),
)


@dataclass(frozen=True)
class Scale:
    """The amount of training.

    Args:
        common: `key=value` changes of all runs.
        tasks: dataset -> changes of its runs.
        dev: changes of runs that are evaluated on the development set alone.
        most: maximum number of points of a grid; None for all.
    """

    common: tuple[str, ...] = ()
    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dev: tuple[str, ...] = ("search.beam=1",)
    most: int | None = None


SCALES = {
    # Runs are short, so they need few checkpoints; large batches of graphs decode faster.
    "full": Scale(
        common=("training.save_seconds=3600", "search.at_once=512"),
        tasks={"webnlg": ("training.batch=128",)},  # texts are short: 128 take little longer than 32
    ),
    "tiny": Scale(
        common=(
            "model.width=32",
            "model.layers=1",
            "model.lstm_layers=1",
            "model.dropout=0",
            "training.epochs=2",
            "training.batch=16",
            "training.log_every=5",
            "search.beam=2",
            "search.longest=20",
        ),
        most=2,
    ),
}
