"""Controls of the study `paper_sizes`: which part of a gain is due to repulsion, tuned settings, smoothing or time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from studies.altered_forces import ATTRACTION, WRONG_PARTNER
from studies.classification.search_space import BASELINE

LONGER = 1.5  # epochs of the control "ma, longer", as a factor
# Controls that decide most come first. Those in one row alternate, seed by seed; all others come last.
ORDER = (
    ("age/ma@cosine-smoothing", "yelp/cosine, no repulsion"),
    ("age/cosine, no repulsion",),
    ("yelp/ma, longer",),
    ("age/svgd, no repulsion",),
    ("age/ma@frobenius",),
    ("age/svgd, no smoothing",),
    ("yelp/svgd, no repulsion", "age/ma, longer"),
    ("yelp/svgd, no smoothing",),
)
SHORT = {"cosine-smoothing": "cosine", "svgd": "svgd"}  # arms with controls of their own -> short name
EXPLANATION = (
    "`ma@ARM` is plain attention with the learning rate, dropout and weight decay that were chosen for ARM, "
    "`ARM@ma` the method with those of plain attention and the strength that was tried with them. "
    "`no repulsion` is the method with alpha = 0: gradients are still smoothed over heads. "
    "`no smoothing` keeps repulsion, and every head follows its own gradient. "
    "`ma, longer` is plain attention with its own settings and half again as many epochs. "
    "`attraction` is the method with the sign of its force reversed. "
    "`wrong partner` gives every head the force of another head, in each step of a different one; the norm over all "
    "heads stays the same."
)


@dataclass(frozen=True)
class Control:
    """A control.

    Args:
        name: name in records and tables.
        recipe: arm whose recipe it changes.
        trial: number of the point whose settings it uses.
        of: arms that are compared with it.
        changes: `key=value` changes that follow those of the point.
        rank: controls of lower rank run first.
        force: altered force, see `altered_forces`.
    """

    name: str
    recipe: str
    trial: int
    of: tuple[str, ...]
    changes: tuple[str, ...] = ()
    rank: int = len(ORDER)
    force: str = ""


def list_controls(dataset: str, chosen: Mapping[str, int], epochs: int) -> list[Control]:
    """List the controls of a dataset, those that decide most first.

    Points with the same number have the same learning rate, dropout and weight decay in all arms.

    Args:
        dataset: name of the dataset.
        chosen: arm -> number of its chosen point; includes plain attention.
        epochs: epochs of all other runs.
    """
    plain = chosen[BASELINE]
    at_point: dict[int, list[str]] = {}
    for arm, trial in chosen.items():
        if trial != plain:
            at_point.setdefault(trial, []).append(arm)
    controls = [Control(f"{BASELINE}@{arms[0]}", BASELINE, trial, tuple(arms)) for trial, arms in at_point.items()]
    for arm, short in SHORT.items():
        if chosen.get(arm, plain) != plain:
            controls.append(Control(f"{short}@{BASELINE}", arm, plain, (arm,)))
    for arm, short in SHORT.items():
        if arm in chosen:
            controls.append(Control(f"{short}, no repulsion", arm, chosen[arm], (arm,), ("method.alpha=0.0",)))
    if "svgd" in chosen:
        controls.append(Control("svgd, no smoothing", "svgd", chosen["svgd"], ("svgd",), ("method.smoothing=0",)))
    for arm, short in SHORT.items():
        if arm in chosen:
            for force in (ATTRACTION, WRONG_PARTNER):
                controls.append(Control(f"{short}, {force}", arm, chosen[arm], (arm,), force=force))
    others = tuple(arm for arm in chosen if arm != BASELINE)
    longer = f"training.epochs={math.ceil(LONGER * epochs)}"
    controls.append(Control(f"{BASELINE}, longer", BASELINE, plain, others, (longer,)))
    ranked = [replace(control, rank=_rank(dataset, control)) for control in controls]
    return sorted(ranked, key=lambda control: control.rank)


def _rank(dataset: str, control: Control) -> int:
    names = {f"{dataset}/{control.name}"}
    if control.name.startswith(f"{BASELINE}@"):  # named after the first of several arms
        names |= {f"{dataset}/{BASELINE}@{arm}" for arm in control.of}
    return next((rank for rank, row in enumerate(ORDER) if names & set(row)), len(ORDER))
