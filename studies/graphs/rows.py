"""What the study of graphs to text tries and compares: data alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from studies.engine import Grid

TASKS = ("webnlg", "agenda")
BASELINE, OURS = "gw", "rma"
CONTROLS = ("control-scaled", "control-smoothed")  # start from the stepsize that was chosen for ours too
LABELS = {  # methods in the order of the tables
    "gw": "GW",
    "cosine": "GW + R",
    "rma": "GW + RMA",
    "control-scaled": "control: gradient x eps/M",
    "control-smoothed": "control: alpha = 0",
}

# Of every method one or more grids, all points of which are tried. Under plain SGD the rule slows the encoder's
# attention by stepsize / M; a stepsize of M = 4 leaves its pace.
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
    "agenda": {method: [{}] for method in LABELS},  # few graphs are at hand: the paper's settings, nothing to choose
}


@dataclass(frozen=True)
class Row:
    """Runs that a table has a line for.

    Args:
        label: what it calls them.
        method: their recipe.
        changes: `key=value`.
    """

    label: str
    method: str
    changes: tuple[str, ...] = ()


# Spelt out: a recipe may be tuned some day.
PUBLISHED = Row(
    "GW + RMA, as published",
    OURS,
    ("method.stepsize=0.1", "method.alpha=0.01", "method.smoothing=1.0", "method.space=weights"),
)


@dataclass(frozen=True)
class Scale:
    """How much is trained.

    Args:
        common: `key=value` changes of all runs.
        tasks: of the runs of a task.
        dev: of runs that only the development set's likelihood is asked of.
        most: points of a grid.
    """

    common: tuple[str, ...] = ()
    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dev: tuple[str, ...] = ("search.beam=1",)
    most: int | None = None


SCALES = {
    # A machine that is given back has no use for checkpoints; many graphs at a time are written about faster.
    "full": Scale(
        common=("training.save_seconds=3600", "search.at_once=512"),
        tasks={"webnlg": ("training.batch=128",)},  # texts are short: a step of 128 takes little longer than one of 32
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
