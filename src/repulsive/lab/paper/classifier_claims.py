"""Claims on sentence classifiers: accuracy, diverse heads, calibration.

All three datasets have the paper's sizes; SNLI also has smaller models. A row is a call in `ROWS`: a function of this
file and its arguments.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from repulsive.lab.paper.mismatch import OTHER, SMALLER
from repulsive.lab.paper.result_claims import ACCURACY, DIST, ECE, Judge, ResultClaim, gain_of, name_count
from repulsive.lab.paper.result_files import ResultFiles

DATA = {  # dataset -> name, our data, and whether they are smaller than the paper's or others
    "yelp": ("Yelp", "45K of 500K reviews", SMALLER),
    "age": ("Age", "PAN15 for PAN16", OTHER),
    "snli": ("SNLI", "90K of 550K pairs", SMALLER),
}
SMALL_SNLI = "classification/snli.json", "100K of 550K pairs, smaller model, 6 seeds"
COSINE = "cosine-smoothing"
METHODS = {"svgd": "SVGD", "spos": "SPOS", COSINE: "cosine kernel"}
SHORT = {"svgd": "svgd", COSINE: "cosine"}  # method -> its name in controls
CONTROLS = {  # ending of a control's name -> the claim, and its short name
    "ma@svgd": ("against plain attention at the same settings", "… at the same settings"),
    "no repulsion": ("against itself without repulsion", "… against alpha = 0"),
    "wrong partner": ("against itself with wrong partners", "… against wrong partners"),
    "longer": ("against plain attention with more epochs", "… against more epochs"),
}


def trained_on(
    files: ResultFiles, data: str, method: str = "svgd", control: str = "", *, first_round: bool = False
) -> str:
    """Describe our data and the number of seeds of a method or a control."""
    summary = files.summary(data, first_round=first_round)
    row = summary["controls"][control] if control else summary["arms"][method]
    return f"{DATA[data][1]}, {len(row['seeds'])} seeds"


def accuracy(files: ResultFiles, data: str, method: str, why: str, *, first_round: bool = False) -> ResultClaim:
    """A method against plain attention, both tuned, with 30 heads."""
    name, _, other = DATA[data]
    paper = gain_of("cosine" if method == COSINE else "table1", data, "accuracy", method)
    return ResultClaim(
        f"{name}, {METHODS[method]}: more accurate",
        paper,
        files.sizes(data, method, "accuracy", first_round=first_round),
        trained_on(files, data, method, first_round=first_round),
        why,
        ACCURACY,
        f"{name}, {METHODS[method]}",
        other,
        is_main=paper is not None,
    )


def cosine_accuracy(files: ResultFiles, data: str) -> ResultClaim:
    """The cosine kernel against plain attention, with their best numbers of heads in the reason."""
    best, _, _ = files.best_heads(data, COSINE)
    return accuracy(files, data, COSINE, f"with the best numbers of heads {best.text(2)}")


def after_wider_search(files: ResultFiles, row: ResultClaim, data: str, method: str, other: str) -> ResultClaim:
    """A row on accuracy, but with the best settings of the method's wider search; the reason is the row's result."""
    seeds = files.wider_seeds(data, method)
    ours = files.wider_search(data, method, other, "accuracy")
    why = f"best of 20 trials; of 12 trials {row.ours.text(2)}"
    return replace(row, ours=ours, data=f"{DATA[data][1]}, {seeds} seeds", why=why)


def searched_accuracy(files: ResultFiles, data: str, method: str) -> ResultClaim:
    """A method with the best settings of its wider search against plain attention."""
    return after_wider_search(files, accuracy(files, data, method, ""), data, method, "ma")


def repeated_accuracy(files: ResultFiles, data: str, method: str) -> ResultClaim:
    """A method against plain attention in a second round, with the first round in the reason."""
    first = files.sizes(data, method, "accuracy", first_round=True)
    is_gain = first.low > 0
    why = f"a first round's {first.text(2)} did not repeat" if is_gain else f"{first.text(2)} in a first round"
    return accuracy(files, data, method, why)


def mistuned_accuracy(files: ResultFiles, data: str, method: str) -> ResultClaim:
    """A method against plain attention, with its difference at plain attention's settings in the reason."""
    alike = files.control_minus_plain(data, f"{SHORT[method]}@ma", "accuracy")
    return accuracy(files, data, method, f"at plain attention's settings {alike.text(2)}")


def accuracy_at_plain_settings(files: ResultFiles, data: str, method: str, why: str) -> ResultClaim:
    """A method with plain attention's learning rate, dropout and weight decay against plain attention."""
    name, _, other = DATA[data]
    control = f"{SHORT[method]}@ma"
    ours, what = files.control_minus_plain(data, control, "accuracy"), trained_on(files, data, control=control)
    claim, title = f"{name}, {METHODS[method]}: at plain attention's settings", "… with plain's settings"
    return ResultClaim(claim, None, ours, what, why, ACCURACY, title, other, is_control=True)


def first_accuracy(files: ResultFiles, data: str, method: str, why: str) -> ResultClaim:
    """The first round of a comparison that was repeated."""
    row = accuracy(files, data, method, why, first_round=True)
    return replace(row, claim=f"{row.claim}, first round", name="… in a first round", is_main=False)


def control_accuracy(files: ResultFiles, data: str, control: str, why: str = "", method: str = COSINE) -> ResultClaim:
    """A method against a control; without a reason, it is the difference of the control from plain attention."""
    name, _, other = DATA[data]
    text, title = next(texts for ending, texts in CONTROLS.items() if control.endswith(ending))
    ours, what = files.sizes(data, method, "accuracy", control), trained_on(files, data, control=control)
    claim = f"{name}, {METHODS[method]}: {text}"
    why = why or f"the control minus plain attention: {files.control_minus_plain(data, control, 'accuracy').text(2)}"
    return ResultClaim(claim, None, ours, what, why, ACCURACY, title, other, is_control=True)


def best_heads(files: ResultFiles, data: str) -> ResultClaim:
    """The cosine kernel against plain attention, both with their best numbers of heads."""
    name, what, other = DATA[data]
    ours, heads, seeds = files.best_heads(data, COSINE)
    why = f"plain attention is best with {name_count(heads)}"
    claim, title = f"{name}, {METHODS[COSINE]}: the best numbers of heads", "… best numbers of heads"
    return ResultClaim(claim, None, ours, f"{what}, {seeds} seeds", why, ACCURACY, title, other, is_control=True)


def small_snli_accuracy(files: ResultFiles, why: str) -> ResultClaim:
    """SVGD against plain attention on SNLI, in smaller models."""
    name, _, other = DATA["snli"]
    path, what = SMALL_SNLI
    paper, ours = gain_of("table1", "snli", "accuracy"), files.paired(path, "SVGD", "accuracy", 100)
    return ResultClaim(
        f"{name}, smaller model, SVGD: more accurate", paper, ours, what, why, ACCURACY, "… smaller model", other
    )


def diversity(files: ResultFiles, data: str, why: str) -> ResultClaim:
    """Dist of SVGD against plain attention. The claim is that heads are more diverse, not by how much."""
    name, what, other = DATA[data][0], trained_on(files, data), DATA[data][2]
    ours = files.sizes(data, "svgd", "dist")
    claim, paper = f"{name}, SVGD: heads are more diverse (Dist)", gain_of("table1", data, "dist")
    return ResultClaim(claim, paper, ours, what, why, DIST, f"{name}, SVGD", other, is_main=True)


def at_same_settings(files: ResultFiles, row: ResultClaim, data: str, metric: str, why: str) -> ResultClaim:
    """A row of SVGD, but against plain attention with SVGD's learning rate, dropout and weight decay."""
    return replace(
        row,
        claim=row.claim.replace(" (", ", at the same settings ("),
        ours=files.sizes(data, "svgd", metric, "ma@svgd"),
        data=trained_on(files, data, control="ma@svgd"),
        why=why,
        name="… at the same settings",
        is_control=True,
        is_main=False,
    )


def diversity_at_same_settings(files: ResultFiles, data: str, why: str) -> ResultClaim:
    """Dist of SVGD against plain attention at the same settings."""
    return at_same_settings(files, diversity(files, data, ""), data, "dist", why)


def small_snli_calibration(files: ResultFiles, why: str) -> ResultClaim:
    """Calibration error of SVGD against plain attention on SNLI, in smaller models."""
    name, _, other = DATA["snli"]
    path, what = SMALL_SNLI
    ours = files.unpaired(path, "SVGD", "ece15", scale=100)
    claim = f"{name}, smaller model, SVGD: better calibrated (ECE)"
    return ResultClaim(claim, None, ours, what, why, ECE, "… smaller model", other, lower=True)


def calibration(
    files: ResultFiles, data: str, why: str = "", *, scaled: bool = False, is_main: bool = False
) -> ResultClaim:
    """Calibration error of SVGD against plain attention; without a reason, that of the first round."""
    name, what, other = DATA[data][0], trained_on(files, data), DATA[data][2]
    metric = "scaled_ece15" if scaled else "ece15"
    why = why or f"{files.sizes(data, 'svgd', metric, first_round=True).text(2)} in a first round"
    claim = f"{name}, SVGD: better calibrated{' after temperature scaling' if scaled else ''} (ECE)"
    title = "… after scaling" if scaled else f"{name}, SVGD"
    ours = files.sizes(data, "svgd", metric)
    return ResultClaim(claim, None, ours, what, why, ECE, title, other, lower=True, is_main=is_main)


def main_calibration(files: ResultFiles, data: str) -> ResultClaim:
    """Calibration error of SVGD, with the difference from plain attention at the same settings in the reason."""
    why = f"at the same settings {files.sizes(data, 'svgd', 'ece15', 'ma@svgd').text(2)}"
    return calibration(files, data, why, is_main=True)


def calibration_at_same_settings(files: ResultFiles, data: str, why: str) -> ResultClaim:
    """Calibration error of SVGD against plain attention at the same settings."""
    return at_same_settings(files, main_calibration(files, data), data, "ece15", why)


ROWS: tuple[Judge, ...] = (
    partial(
        accuracy,
        data="yelp",
        method="svgd",
        why="only a weak ratio was tried: overlap 0.82, plain 0.86",
    ),
    partial(accuracy, data="yelp", method="spos", why="the same: overlap 0.82"),
    partial(cosine_accuracy, data="yelp"),
    partial(
        control_accuracy, data="yelp", control="cosine, no repulsion", why="smoothing alone does not give the gain"
    ),
    partial(control_accuracy, data="yelp", control="cosine, wrong partner"),
    partial(
        control_accuracy,
        data="yelp",
        control="ma, longer",
        why="half again as many epochs help plain attention as much",
    ),
    partial(best_heads, data="yelp"),
    partial(mistuned_accuracy, data="snli", method="svgd"),
    partial(
        accuracy_at_plain_settings, data="snli", method="svgd", why="weak repulsion, the ratio that was tried with them"
    ),
    partial(
        control_accuracy,
        data="snli",
        control="ma@svgd",
        method="svgd",
        why="repulsion helps at these settings; plain attention has better ones",
    ),
    partial(
        control_accuracy, data="snli", control="svgd, no repulsion", method="svgd", why="smoothing alone does not help"
    ),
    partial(
        control_accuracy,
        data="snli",
        control="svgd, wrong partner",
        method="svgd",
        why="here the partner matters: with wrong ones accuracy falls",
    ),
    partial(small_snli_accuracy, why="heads do differ: overlap 0.22, plain 0.36"),
    partial(accuracy, data="snli", method="spos", why="only a weak ratio was tried: overlap 0.42, plain 0.51"),
    partial(mistuned_accuracy, data="snli", method=COSINE),
    partial(repeated_accuracy, data="age", method="svgd"),
    partial(
        first_accuracy,
        data="age",
        method="svgd",
        why="no significant difference in a second round, nor from attraction and wrong partners",
    ),
    partial(searched_accuracy, data="age", method="spos"),
    partial(cosine_accuracy, data="age"),
    partial(control_accuracy, data="age", control="ma@svgd", why="settings do not explain the gain"),
    partial(control_accuracy, data="age", control="cosine, no repulsion", why="smoothing alone does not give the gain"),
    partial(control_accuracy, data="age", control="cosine, wrong partner"),
    partial(control_accuracy, data="age", control="ma, longer", why="more epochs do not help plain attention here"),
    partial(best_heads, data="age"),
    partial(diversity, data="yelp", why="4 % of the paper's amount; cosine kernel 45 %"),
    partial(diversity, data="snli", why="15 % of the paper's amount; 0.60 at the same settings"),
    partial(diversity, data="age", why="plain heads are almost equal: Dist 0.01"),
    partial(diversity_at_same_settings, data="age", why="settings do not explain it"),
    partial(calibration, data="yelp", why="all methods have errors of 1.5 to 1.6 points"),
    partial(calibration, data="yelp", why="scaling lowers all errors by more: to 1.1 or 1.2", scaled=True),
    partial(calibration, data="age"),
    partial(calibration, data="age", scaled=True),
    partial(main_calibration, data="snli"),
    partial(calibration_at_same_settings, data="snli", why="so the difference comes from the settings"),
    partial(calibration, data="snli", why="scaling lowers plain attention's from 4.3 to 1.4", scaled=True),
    partial(small_snli_calibration, why="NLL rises as well, by 0.021"),
)
