"""Systems of the study of equal tuning budgets, as data: arms, search spaces, sizes and amounts of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from studies.tuning.space import Range, Space


@dataclass(frozen=True)
class Arm:
    """A method.

    Args:
        label: name in tables.
        recipe: name of the method's recipe.
        own: ranges of its own strength.
        changes: `key=value` changes of the recipe.
        has_force: its rule is `SVGD`, so its force can be altered (`studies.altered_forces`).
    """

    label: str
    recipe: str
    own: tuple[Range, ...] = ()
    changes: tuple[str, ...] = ()
    has_force: bool = False


@dataclass(frozen=True)
class Metric:
    """A metric of the tables.

    Args:
        title: name in tables.
        digits: digits after the decimal point.
        sign: 1 if higher is better, -1 if lower is better.
    """

    title: str
    digits: int
    sign: int


@dataclass(frozen=True)
class Lengths:
    """Amounts of training.

    Args:
        screen: epochs of the stage screen.
        later: epochs to choose from for the other stages, ascending.
    """

    screen: int
    later: tuple[int, ...]


@dataclass(frozen=True)
class System:
    """A system and its budget.

    Args:
        dataset: name of the dataset, its recipes and its prepared folder.
        prepare: command that prepares the dataset.
        common: ranges of all arms.
        arms: the methods; the first is plain attention.
        changes: `key=value` changes of all runs.
        tiny: further changes for a trial of the script.
        lengths: amounts of training.
        trials: trials of every arm.
        refined: trials of every arm in the stage refine.
        seeds: seeds of the final stage.
        start_seconds: expected seconds of a run before its first epoch, and for captured graphs.
        epoch_seconds: expected seconds of an epoch of one of many runs side by side, divided by their number.
        shown: metric of a record -> how it is shown.
    """

    dataset: str
    prepare: str
    common: tuple[Range, ...]
    arms: Mapping[str, Arm]
    changes: tuple[str, ...]
    tiny: tuple[str, ...]
    lengths: Lengths
    trials: int
    refined: int
    seeds: int
    start_seconds: float
    epoch_seconds: float
    shown: Mapping[str, Metric]

    @cached_property
    def space(self) -> Space:
        return Space(self.common, {name: arm.own for name, arm in self.arms.items()})

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))


TINY = Lengths(screen=1, later=(1, 2))
_ALPHA = Range("method.alpha", 1e-4, 0.1)
_RATIO = Range("method.ratio", 1e-3, 0.3)
_SPHERE = (  # the recommended rule, for systems without a recipe of it
    "method.stepsize=heads",
    "method.alpha=auto",
    "method.smoothing=0",
    "method.space=sphere",
    "method.act_every=4",
)

TRANSLATION = System(
    dataset="multi30k",
    prepare="repulsive prepare translation --data multi30k --most 8000 --out prepared/multi30k",
    common=(
        Range("optimizer.lr", 5e-4, 1e-2),
        Range("model.dropout", 0.0, 0.5, is_log=False),
        Range("optimizer.weight_decay", 1e-3, 3.0),  # decoupled
    ),
    arms={
        "ma": Arm("MA", "ma"),
        "svgd": Arm("SVGD, published rule", "svgd", (_ALPHA,), has_force=True),
        "sphere": Arm("SVGD, recommended rule", "svgd-sphere", (_RATIO,), has_force=True),
        "kernel-free": Arm("kernel-free control", "kernel-free", (_ALPHA,)),
        "disagreement": Arm("MA + R (disagreement)", "disagreement", (Range("method.penalty", 1e-3, 3.0),)),
        "spos": Arm("SPOS", "spos", (_ALPHA, Range("method.beta", 1e5, 1e9))),
    },
    changes=(
        "packed=true",
        "model.width=256",
        "model.depth=[3, 3]",
        "model.feed_forward=1024",
        "model.heads=4",
        "optimizer.schedule=cosine",
        "optimizer.warmup=0",
        "optimizer.warmup_share=0.2",
        "training.batch=4096",
        "training.precision=bf16",
        "training.average=0",
        "search.at_once=16384",
    ),
    tiny=(
        "data.share=0.01",
        "packed=false",
        "model.width=16",
        "model.depth=[1, 1]",
        "model.feed_forward=16",
        "training.batch=300",
        "training.precision=fp32",
        "search.beam=1",
        "search.longest=5",
    ),
    lengths=Lengths(screen=6, later=(6, 8, 10, 12, 15, 20, 25, 30)),
    trials=12,
    refined=3,
    seeds=5,
    start_seconds=5.0,
    epoch_seconds=0.3,  # results/translation/README.md: 111 runs of 30 epochs, 14 side by side, in 990 s
    shown={"bleu": Metric("BLEU", 2, 1), "nll": Metric("NLL", 4, -1), "accuracy": Metric("accuracy", 4, 1)},
)

GRAPHS = System(
    dataset="webnlg",
    prepare="repulsive prepare graphs --data webnlg --out prepared/webnlg",
    common=(
        Range("optimizer.lr", 0.02, 1.0),
        Range("model.dropout", 0.0, 0.5, is_log=False),
        Range("optimizer.weight_decay", 1e-6, 1e-3),  # coupled
    ),
    arms={
        "gw": Arm("GW", "gw"),
        "rma": Arm("GW + RMA, published rule", "rma", (Range("method.alpha", 1e-4, 1.0),), has_force=True),
        "sphere": Arm("GW + RMA, recommended rule", "rma", (_RATIO,), _SPHERE, has_force=True),
        "kernel-free": Arm("kernel-free control", "kernel-free", (Range("method.alpha", 1e-4, 1.0),)),
        "cosine": Arm("GW + R (cosine)", "cosine", (Range("method.penalty", 0.1, 300.0),)),
    },
    changes=(
        "optimizer.schedule=cosine",
        "optimizer.warmup_share=0.05",
        "training.batch=128",
        "training.precision=bf16",
        "search.at_once=512",
    ),
    tiny=(
        "data.share=0.01",
        "model.width=16",
        "model.layers=1",
        "model.lstm_layers=1",
        "training.batch=16",
        "training.precision=fp32",
        "search.beam=1",
        "search.longest=5",
    ),
    lengths=Lengths(screen=2, later=(2, 3, 4, 5, 6, 8, 10, 14, 20)),
    trials=8,
    refined=2,
    seeds=3,
    start_seconds=12.0,
    epoch_seconds=1.43,  # results/graphs/README.md: 20 epochs in 258 s, 9 runs side by side, in float32
    shown={
        "bleu": Metric("BLEU-4", 2, 1),
        "nll": Metric("NLL", 4, -1),
        "accuracy": Metric("accuracy", 4, 1),
        "entity coverage": Metric("entity coverage", 1, 1),
    },
)
SYSTEMS = {"translation": TRANSLATION, "graphs": GRAPHS}
