"""Rows and settings of `paper_settings`, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperRow:
    """A row of the table.

    Args:
        name: on the command line, and folder of its runs.
        label: in tables.
        method: recipe of IWSLT14.
        changes: `key=value` changes of the recipe.
        against: further rows that it is compared with, besides the first row.
    """

    name: str
    label: str
    method: str
    changes: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


def _published(name: str, label: str, *changes: str) -> PaperRow:
    return PaperRow(f"published-{name}", f"published, {label}", "svgd", changes, against=("published",))


GROUPS = (  # rows that train side by side; the first row is the baseline
    (
        PaperRow("plain", "plain", "ma"),
        PaperRow("published", "published", "svgd", against=("kernel-free",)),
        PaperRow("kernel-free", "kernel-free", "kernel-free"),
    ),
    (
        PaperRow("recommended", "recommended (sphere)", "svgd-sphere"),
        PaperRow("disagreement", "disagreement (+ R)", "disagreement"),
        PaperRow(
            "released",
            "as in the released script",
            "svgd",
            ("method.stepsize=0.01", "method.bandwidth=released-lower"),
            against=("published",),
        ),
        _published("late", "alpha warmed up", "method.schedule=warmup"),
    ),
    tuple(_published(part, f"{part} only", f"method.parts={part}") for part in "qkv"),
    (
        *(_published(place, f"{place} only", f"method.where={place}") for place in ("encoder", "decoder", "cross")),
        _published("encoder-v", "v of the encoder only", "method.where=encoder", "method.parts=v"),
    ),
    (
        _published("unsmoothed", "without smoothing", "method.smoothing=0"),
        _published("unrepelled", "smoothing alone", "method.alpha=0"),
    ),
)
ROWS = {row.name: row for group in GROUPS for row in group}
EPOCHS = 37  # 46,028 updates
COMMON = (  # the recipes of IWSLT14 have the paper's sizes, learning rate and warm-up
    "training.compile=true",
    "training.save_seconds=150",
    "training.keep=1",
    "search.at_once=32768",
)
TINY = (
    "model.width=16",
    "model.depth=[1, 1]",
    "model.feed_forward=16",
    "optimizer.warmup=10",
    "training.batch=300",
    "training.precision=fp32",
    "training.log_every=5",
    "training.average=2",
    "search.beam=2",
    "search.longest=10",
)
