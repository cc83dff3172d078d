"""Claims that compare sentence classifiers with other methods than plain attention, and claims on what heads do.

A row is a call in `ROWS`: a function of this file and its arguments. "Smaller models" have 150 units and word vectors
of 50 numbers; their methods are compared by means over seeds.
"""

from __future__ import annotations

from functools import partial

from repulsive.lab.paper.classifier_claims import COSINE, DATA, METHODS, after_wider_search, trained_on
from repulsive.lab.paper.result_claims import (
    ACCURACY,
    DIST,
    ECE,
    ENTROPY,
    OVERLAP,
    Judge,
    ResultClaim,
    gain_of,
    reason_of,
)
from repulsive.lab.paper.result_files import ResultFiles

PENALTY = "frobenius"
NAMES = METHODS | {PENALTY: "the penalty"}
SHORT = NAMES | {PENALTY: "penalty"}  # names in the figure
SMALL = {  # dataset -> what the smaller models are trained on
    "yelp": "107K of 500K reviews, smaller model, 6 seeds",
    "age": "PAN15 for PAN16, smaller model, 6 seeds",
    "snli": "100K of 550K pairs, smaller model, 6 seeds",
}
LABELS = {  # method -> its row in tables of smaller models
    "svgd": "SVGD",
    "sgld": "SGLD",
    "gaussian": "SVGD, Gaussian prior",
    COSINE: "cosine: smoothing",
    "cosine-regulariser": "cosine: regulariser",
}


def more_accurate(files: ResultFiles, data: str, method: str, other: str, why: str = "") -> ResultClaim:
    """A method against another one than plain attention, both tuned, at the paper's sizes.

    Without a reason, it is what the other method gains over plain attention.
    """
    name, _, kind = DATA[data]
    paper = gain_of("table1", data, "accuracy", method, other)
    ours, what = files.between(data, method, other, "accuracy"), trained_on(files, data, method)
    claim = f"{name}, {NAMES[method]}: more accurate than {NAMES[other]}"
    why = why or f"{NAMES[other]} gains {files.sizes(data, other, 'accuracy').text(2)} over plain attention"
    return ResultClaim(claim, paper, ours, what, why, ACCURACY, f"{name}, {SHORT[method]} - {SHORT[other]}", kind)


def more_accurate_after_wider_search(files: ResultFiles, data: str, method: str, other: str) -> ResultClaim:
    """The same with the best settings of the method's wider search; the reason is the result of the first search."""
    return after_wider_search(files, more_accurate(files, data, method, other), data, method, other)


def more_diverse(files: ResultFiles, data: str, method: str, other: str) -> ResultClaim:
    """Dist of a method against plain attention ("ma") or another method."""
    name, _, kind = DATA[data]
    ours = files.sizes(data, method, "dist") if other == "ma" else files.between(data, method, other, "dist")
    than = "plain attention" if other == "ma" else NAMES[other]
    claim = f"{name}, {NAMES[method]}: heads are more diverse than {than}'s (Dist)"
    title = f"{name}, {SHORT[method]}" + ("" if other == "ma" else f" - {SHORT[other]}")
    paper = gain_of("table1", data, "dist", method, other)
    why = reason_of(ours, paper)
    return ResultClaim(claim, paper, ours, trained_on(files, data, method), why, DIST, title, kind)


def overlap(files: ResultFiles, data: str) -> ResultClaim:
    """The share of attention that two heads of SVGD have in common, against plain attention."""
    name, _, kind = DATA[data]
    arms = files.summary(data)["arms"]
    ours, plain = (arms[arm]["test"]["overlap"]["mean"] for arm in ("svgd", "ma"))
    why = f"{ours:.2f}, plain {plain:.2f}"
    claim, gain = f"{name}, SVGD: heads overlap less", files.sizes(data, "svgd", "overlap")
    return ResultClaim(claim, None, gain, trained_on(files, data), why, OVERLAP, f"{name}, SVGD", kind, lower=True)


def overconfidence(files: ResultFiles, data: str, *, scaled: bool = False) -> ResultClaim:
    """Overconfidence error of SVGD against plain attention; the reason is the difference at the same settings."""
    name, _, kind = DATA[data]
    metric = "scaled_oe15" if scaled else "oe15"
    ours = files.sizes(data, "svgd", metric)
    why = f"{files.sizes(data, 'svgd', metric, 'ma@svgd').text(2)} at the same settings"
    claim = f"{name}, SVGD: less overconfident{' after temperature scaling' if scaled else ''} (OE)"
    title, what = f"{name}, SVGD, OE{', scaled' if scaled else ''}", trained_on(files, data)
    return ResultClaim(claim, None, ours, what, why, ECE, title, kind, lower=True)


def foreign_entropy(files: ResultFiles, data: str, method: str) -> ResultClaim:
    """Entropy of predictions on texts of another dataset, against plain attention."""
    name, what, kind = DATA[data]
    ours = files.foreign_entropy(data, method)
    why = reason_of(ours, None)
    claim = f"{name}, {NAMES[method]}: less confident on texts of another dataset"
    return ResultClaim(claim, None, ours, f"{what}, 5 seeds", why, ENTROPY, f"{name}, {NAMES[method]}", kind, digits=3)


def small_difference(
    files: ResultFiles, data: str, method: str, other: str, claim: str, title: str, table: str, *, within: float = 0.0
) -> ResultClaim:
    """Accuracy of two methods in smaller models.

    Args:
        files: the results.
        data: name of the dataset.
        method: name of the method.
        other: name of the method that it is compared with.
        claim: what the paper says.
        title: short name in the figure.
        table: name of the paper's table that has both.
        within: see `ResultClaim`.
    """
    name, _, kind = DATA[data]
    first, second = LABELS[method], LABELS[other]
    ours = files.unpaired(f"classification/{data}.json", first, "accuracy", 100, second)
    paper = gain_of(table, data, "accuracy", method, other)
    why = "" if within else reason_of(ours, paper)
    claim, title = f"{name}: {claim}", f"{name}, {title}"
    return ResultClaim(claim, paper, ours, SMALL[data], why, ACCURACY, title, kind, within=within)


_AGAINST_SGLD = partial(
    small_difference,
    method="svgd",
    other="sgld",
    claim="SVGD is more accurate than SGLD",
    title="SVGD - SGLD",
    table="sgld",
)
_GAUSSIAN = partial(
    small_difference,
    method="gaussian",
    other="svgd",
    claim="a Gaussian prior changes accuracy by at most 1 point",
    title="Gaussian prior",
    table="priors",
    within=1.0,
)
_LADDER = partial(
    small_difference,
    method=COSINE,
    other="cosine-regulariser",
    claim="the cosine kernel is more accurate than its penalty",
    title="cosine - penalty",
    table="cosine",
)
_WEAK = "only one strength was tried at the chosen settings, a weak one"
_SETTINGS = "SVGD's own settings are worse here"

ROWS: tuple[Judge, ...] = (
    partial(more_accurate, data="yelp", method="svgd", other=PENALTY, why=_WEAK),
    partial(more_accurate, data="yelp", method="spos", other=PENALTY, why=_WEAK),
    partial(more_accurate, data="yelp", method="spos", other="svgd", why=_WEAK),
    partial(more_accurate, data="snli", method="svgd", other=PENALTY, why=_SETTINGS),
    partial(more_accurate, data="snli", method="spos", other=PENALTY, why=_WEAK),
    partial(more_accurate, data="snli", method="spos", other="svgd", why=_SETTINGS),
    partial(more_accurate, data="age", method="svgd", other=PENALTY),
    partial(more_accurate_after_wider_search, data="age", method="spos", other=PENALTY),
    partial(more_accurate_after_wider_search, data="age", method="spos", other="svgd"),
    *(partial(judge, data=data) for judge in (_AGAINST_SGLD, _GAUSSIAN) for data in DATA),
    *(partial(_LADDER, data=data) for data in ("yelp", "age")),
    *(partial(more_diverse, data=data, method="spos", other="ma") for data in DATA),
    *(partial(more_diverse, data=data, method="svgd", other=PENALTY) for data in DATA),
    partial(overlap, data="yelp"),
    partial(overconfidence, data="snli"),
    partial(overconfidence, data="snli", scaled=True),
    partial(foreign_entropy, data="yelp", method="svgd"),
    partial(foreign_entropy, data="yelp", method=COSINE),
)
