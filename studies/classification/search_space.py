"""Arms of the study `paper_sizes`, and the space in which every arm tries the same number of points.

Learning rate, dropout and weight decay of point k are the same for all arms (`studies.tuning.space`).
"""

from __future__ import annotations

from studies.tuning.space import Range, Space

BASELINE = "ma"

COMMON = (
    Range("optimizer.lr", 2e-4, 6e-3),
    Range("model.dropout", 0.0, 0.7, is_log=False),
    Range("optimizer.weight_decay", 1e-6, 1e-3),
)
OWN: dict[str, tuple[Range, ...]] = {  # recipe of the arm -> ranges of its own strength
    "ma": (),
    "frobenius": (Range("method.penalty", 3e-4, 0.3),),
    "svgd": (Range("method.ratio", 0.03, 3.0),),
    "spos": (Range("method.ratio", 0.03, 3.0), Range("method.beta", 1e4, 1e7)),
    "cosine-smoothing": (Range("method.alpha", 1e-3, 1.0),),
    "kernel-free": (Range("method.ratio", 0.03, 3.0),),
}
ARMS = tuple(arm for arm in OWN if arm != "kernel-free")  # the paper's methods; the control is tried if it is named
# With 30 heads this stepsize keeps the size of their gradients: weight decay and clipping act as in plain training.
REPELLED = ("svgd", "spos", "cosine-smoothing", "kernel-free")
FIXED: dict[str, tuple[str, ...]] = dict.fromkeys(REPELLED, ("method.stepsize=30",))

FIRST = Space(COMMON, OWN)
WIDE = Space(  # ranges in which some arm chose a value near an end are wider than in the first space
    (
        Range("optimizer.lr", 2e-4, 1e-2),
        Range("model.dropout", 0.0, 0.7, is_log=False),
        Range("optimizer.weight_decay", 1e-7, 1e-2),
    ),
    {
        "ma": (),
        "frobenius": (Range("method.penalty", 1e-5, 3.0),),
        "svgd": (Range("method.ratio", 3e-3, 10.0),),
        "spos": (Range("method.ratio", 3e-3, 10.0), Range("method.beta", 1e3, 1e8)),
        "cosine-smoothing": (Range("method.alpha", 1e-4, 10.0),),
        "kernel-free": (Range("method.ratio", 3e-3, 10.0),),
    },
    seed=1,
)
