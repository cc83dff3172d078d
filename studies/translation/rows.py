"""Grids and rows of the translation study, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from studies.engine import Grid

MAIN_TASK = "multi30k"  # the dataset of the stages question, ablation, heads and redundancy
TASKS = (MAIN_TASK, "tatoeba", "europarl")
PREFIX = {MAIN_TASK: "small-"}  # of the recipes with the paper's model sizes
BASELINE, OURS = "ma", "svgd"
LABELS = {  # methods in the order of the tables, the most important first
    "ma": "MA",
    "svgd": "SVGD",
    "disagreement": "MA + R",
    "sgld": "SGLD",
    "spos": "SPOS",
    "control-scaled": "control: gradient x eps/M",
    "control-smoothed": "control: alpha = 0",
}
FOLLOWS = {"spos": "svgd"}  # starts from the tuned settings of that method; all others from the baseline's

# One or more grids for every method; all points are tried.
UNSMOOTHED: Grid = {"method.smoothing": (0.0,)}
AUTO: Grid = {"method.alpha": ("auto",)}
SPHERE: Grid = {**AUTO, **UNSMOOTHED, "method.space": ("sphere",)}
WHOLE: dict[str, list[Grid]] = {
    "ma": [{"optimizer.lr": (5e-4, 1e-3, 2e-3, 3e-3), "model.dropout": (0.2, 0.4)}],
    "svgd": [
        {"method.alpha": (0.001, 0.01)},
        {"method.alpha": (0.01,), **UNSMOOTHED},
        {**AUTO, **UNSMOOTHED, "method.ratio": (0.1,)},
        {**SPHERE, "method.ratio": (0.03, 0.1)},
    ],
    "disagreement": [{"method.penalty": (0.1, 0.3, 1.0, 3.0)}],
    "sgld": [{"method.temperature": (1e-13, 1e-12, 1e-11, 1e-10)}],
    "spos": [{"method.beta": (1e6, 1e7, 1e8)}],
    "control-scaled": [{}],
    "control-smoothed": [{}],
}
SHORT: dict[str, list[Grid]] = WHOLE | {
    "ma": [{"optimizer.lr": (5e-4, 1e-3, 2e-3)}],
    "svgd": [{"method.alpha": (0.001, 0.01)}, {**SPHERE, "method.ratio": (0.1,)}],
    "disagreement": [{"method.penalty": (0.3, 1.0)}],
    "sgld": [{"method.temperature": (1e-12, 1e-11)}],
    "spos": [{"method.beta": (1e7, 1e8)}],
}
GRIDS = {MAIN_TASK: WHOLE, "tatoeba": SHORT, "europarl": SHORT}


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        label: name of the row.
        method: recipe of its runs.
        changes: `key=value` changes of the recipe.
        against: label of the row that it is compared with.
    """

    label: str
    method: str
    changes: tuple[str, ...] = ()
    against: str = "MA"


# The published settings, written out because recipes may be tuned later.
_RULE = ("method.stepsize=0.1", "method.alpha=0.01", "method.smoothing=1.0", "method.space=weights")


def _svgd(label: str, *changes: str, against: str = "MA") -> Row:
    return Row(label, OURS, (*_RULE, *changes), against)


_AUTO = ("method.alpha=auto",)
_SPHERE = (*_AUTO, "method.smoothing=0", "method.space=sphere")
PUBLISHED = _svgd("SVGD, as published")
DECAYED = Row("MA, weight decay 0.3", "ma", ("optimizer.weight_decay=0.3",))
QUESTION = (  # the first eight are drawn
    Row("MA", "ma"),
    PUBLISHED,
    Row("smoothing without repulsion", "control-smoothed"),
    _svgd("repulsion without smoothing", "method.smoothing=0"),
    _svgd("sphere, no smoothing, ratio 0.1", *_SPHERE, "method.ratio=0.1"),
    _svgd("weights, no smoothing, ratio 0.1", *_AUTO, "method.smoothing=0", "method.ratio=0.1"),
    Row("gradient x eps/M", "control-scaled"),
    _svgd("first layers only", "method.layers=first"),
    _svgd("published, on the sphere", "method.space=sphere"),
    _svgd("ratio 0.03", *_AUTO, "method.ratio=0.03"),
    _svgd("ratio 0.1", *_AUTO, "method.ratio=0.1"),
    _svgd("ratio 0.3", *_AUTO, "method.ratio=0.3"),
    _svgd("alpha warmed up", "method.schedule=warmup"),
    _svgd("alpha falls linearly", "method.schedule=linear"),
    _svgd("alpha falls as a cosine", "method.schedule=cosine"),
    _svgd("stepsize = M", "method.stepsize=4.0"),
    Row("MA, pre-norm", "ma", ("model.pre_norm=true",)),
    _svgd("SVGD, pre-norm", "model.pre_norm=true", against="MA, pre-norm"),
    DECAYED,
    _svgd("SVGD, weight decay 0.3", "optimizer.weight_decay=0.3", against="MA, weight decay 0.3"),
    _svgd("sphere, no smoothing, ratio 0.03", *_SPHERE, "method.ratio=0.03"),
    _svgd("sphere, no smoothing, ratio 0.3", *_SPHERE, "method.ratio=0.3"),
    _svgd("sphere, no smoothing, ratio 0.1 falling linearly", *_SPHERE, "method.ratio=0.1", "method.schedule=linear"),
    _svgd("sphere, no smoothing, ratio 0.1, first layers", *_SPHERE, "method.ratio=0.1", "method.layers=first"),
    _svgd("sphere, pre-norm", *_SPHERE, "method.ratio=0.1", "model.pre_norm=true", against="MA, pre-norm"),
    Row("SGLD", "sgld"),
    Row("MA + R", "disagreement"),
    _svgd("whole heads as particles", "method.particle=head"),
    Row("MA, no weight decay", "ma", ("optimizer.weight_decay=0",)),
    _svgd("SVGD, no weight decay", "optimizer.weight_decay=0", against="MA, no weight decay"),
)
DRAWN = 8

ABLATION = {  # rows of the paper's table "Which attention modules to be diversified?" (Appendix C.3), after MA
    "RMA (Q)": ("method.parts=q",),
    "RMA (K)": ("method.parts=k",),
    "RMA (V)": ("method.parts=v",),
    "RMA (En)": ("method.where=encoder",),
    "RMA (De)": ("method.where=decoder",),
    "RMA (En-De)": ("method.where=cross",),
    "RMA (first layer)": ("method.layers=first",),
    "RMA (last layer)": ("method.layers=last",),
    "RMA (All)": (),
}


@dataclass(frozen=True)
class Scale:
    """The amount of training.

    Args:
        common: `key=value` changes of all runs.
        tasks: dataset -> changes of its runs.
        dev: changes of runs that are evaluated on the development set alone.
        most: maximum number of points of a grid, and of rows of the question and of the ablation; None for all.
        heads: numbers of heads to compare.
        seconds: dataset -> seconds of an epoch on one idle H200, for the plan.
    """

    common: tuple[str, ...]
    tasks: dict[str, tuple[str, ...]]
    dev: tuple[str, ...] = ("search.beam=1",)
    most: int | None = None
    heads: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds: dict[str, float] = field(default_factory=dict)


_FEW_EPOCHS = ("training.average_every=200", "training.evaluate_every=500")
_TINY_MODEL = ("model.width=32", "model.depth=[1, 1]", "model.feed_forward=64", "optimizer.warmup=10")
_TINY_TRAINING = (
    "training.epochs=2",
    "training.batch=512",
    "training.precision=fp32",
    "training.log_every=5",
    "training.average=1",
)
SCALES = {
    "full": Scale(
        # Runs are short, so they need few checkpoints; large batches of short sentences decode faster.
        common=("training.save_seconds=3600", "search.at_once=16384"),
        tasks={
            "multi30k": ("training.epochs=30", "optimizer.warmup=600"),
            "tatoeba": ("training.epochs=10", "training.average=3", "optimizer.warmup=1000"),
            "europarl": (*_FEW_EPOCHS, "training.epochs=2", "optimizer.warmup=1200"),
        },
        seconds={"multi30k": 0.5, "tatoeba": 1.6, "europarl": 10},
    ),
    "tiny": Scale(
        common=(*_TINY_MODEL, *_TINY_TRAINING, "search.beam=2", "search.longest=20"),
        tasks=dict.fromkeys(TASKS, ()),
        most=2,
        heads=(1, 2, 4),
        seconds=dict.fromkeys(TASKS, 0.1),
    ),
}
