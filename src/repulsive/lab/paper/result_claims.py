"""The paper's claims, judged by the committed results of a checkout: rows of the replication page.

The paper's numbers are those of `published`, ours are read from the folder of results, and verdicts follow from both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from repulsive.lab.paper.mismatch import OTHER, SMALLER
from repulsive.lab.paper.published import Better, published
from repulsive.lab.paper.result_files import Gain, ResultFiles
from repulsive.lab.paper.verdicts import decide, decide_limit, on_data

ACCURACY, DIST, ECE, BLEU, HEADS, TIME = "accuracy", "dist", "ece", "bleu", "heads", "time"  # panels of the figure


@dataclass(frozen=True)
class ResultClaim:
    """A claim of the paper and our result on it.

    Args:
        claim: what the paper says.
        paper: its gain; None where it gives no number.
        ours: our gain.
        data: what was trained on.
        why: one line.
        panel: panel of the figure, which has one axis for each kind of number.
        name: short name in the figure.
        other_data: "smaller data", "other data", or "" where the data play no part.
        digits: decimals.
        lower: whether a smaller number is better; the verdict then takes the opposite signs.
        is_limit: the claim is that our number is at most the paper's.
        is_control: the difference is from a control, not from plain attention that was tuned on its own.
    """

    claim: str
    paper: float | None
    ours: Gain
    data: str
    why: str
    panel: str
    name: str
    other_data: str = ""
    digits: int = 2
    lower: bool = False
    is_limit: bool = False
    is_control: bool = False

    @property
    def outcome(self) -> str:
        """Whether the claim holds, fails, or cannot be decided."""
        if self.is_limit and self.paper is not None:
            return decide_limit(self.ours.low, self.ours.high, self.paper)
        better: Better = "lower" if self.lower else "higher"
        return decide(self.ours.low, self.ours.high, self.paper, better=better, p_value=self.ours.p_value)

    @property
    def verdict(self) -> str:
        """The outcome in words, such as "same claim, smaller data: holds"."""
        return on_data(self.outcome, self.other_data)


def claims(files: ResultFiles) -> list[ResultClaim]:
    """List all claims, in the order of the paper.

    Raises:
        DataError: a file of results is missing or lacks a row.
    """
    return [
        *_accuracy_claims(files),
        *_head_claims(files),
        *_translation_claims(files),
        *_redundancy_claims(files),
        *_other_claims(files),
    ]


def gain_of(table: str, data: str, metric: str, ours: str = "svgd", plain: str = "ma") -> float:
    """Return the paper's gain; plain attention is that of Table 1 if the table has none."""
    values = [published().value(table, data, name, metric) for name in (ours, plain)]
    if values[1] is None:
        values[1] = published().value("table1", data, plain, metric)
    assert values[0] is not None and values[1] is not None
    return values[0] - values[1]


DATA = {  # dataset -> name, our data, and whether they are smaller than the paper's or others
    "yelp": ("Yelp", "45K of 500K reviews", SMALLER),
    "age": ("Age", "PAN15 for PAN16", OTHER),
    "snli": ("SNLI", "100K of 550K pairs, smaller model, 6 seeds", SMALLER),
}
COSINE = "cosine-smoothing"
SAME_SETTINGS = "… at the same settings"
CONTROLS = (  # ending of a control's name -> the claim, and its short name
    ("no repulsion", "against itself without repulsion", "… against alpha = 0"),
    ("wrong partner", "against itself with wrong partners", "… against wrong partners"),
    ("longer", "against plain attention with more epochs", "… against more epochs"),
)
METHODS = {"svgd": "SVGD", "spos": "SPOS", COSINE: "cosine kernel"}


def _accuracy_claim(
    files: ResultFiles, data: str, arm: str, control: str, why: str, *, first_round: bool = False
) -> ResultClaim:
    """A row on the accuracy of a method at the paper's sizes, against plain attention or a control."""
    name, what, other = DATA[data]
    claim, title = f"{name}, {METHODS[arm]}: more accurate (points)", f"{name}, {METHODS[arm]}"
    paper: float | None = gain_of("cosine" if arm == COSINE else "table1", data, "accuracy", arm)
    if control:
        text, title = next((text, title) for ending, text, title in CONTROLS if control.endswith(ending))
        claim, paper = f"{name}, {METHODS[arm]}: {text}", None
    elif first_round and files.summary(data)["arms"][arm]["seeds"]:
        claim, title = f"{claim}, first round", "… in a first round"
    seeds = len(files.summary(data, first_round=first_round)["arms"][arm]["seeds"])
    ours = files.sizes(data, arm, "accuracy", control, first_round=first_round)
    return ResultClaim(
        claim, paper, ours, f"{what}, {seeds} seeds", why, ACCURACY, title, other, is_control=bool(control)
    )


def _best_heads_claim(files: ResultFiles, data: str, arm: str) -> ResultClaim:
    """A row that compares a method with plain attention, both with their best numbers of heads."""
    name, what, other = DATA[data]
    ours, heads = files.best_heads(data, arm)
    number = f"{heads} head{'s' if heads > 1 else ''}"
    claim, why = f"{name}, {METHODS[arm]}: the best numbers of heads", f"plain attention is best with {number}"
    return ResultClaim(claim, None, ours, what, why, ACCURACY, "… best numbers of heads", other, is_control=True)


def _accuracy_claims(files: ResultFiles) -> list[ResultClaim]:
    """Rows on the accuracy of classifiers: at the paper's sizes, except on SNLI."""

    def claim(*words: str, first_round: bool = False) -> ResultClaim:
        return _accuracy_claim(files, *words, first_round=first_round)

    half = "the force of another head, with the same norm, gives about half of the gain"
    first = "did not repeat; attraction and wrong partners are as accurate in the second round"
    yelp = [
        claim("yelp", "svgd", "", "the chosen repulsion is weak: overlap of heads 0.82, plain 0.86"),
        claim("yelp", "spos", "", "the same"),
        claim("yelp", COSINE, "", "with 30 heads, like plain attention: see the next rows"),
        claim("yelp", COSINE, "cosine, no repulsion", "smoothing alone does not give the gain"),
        claim("yelp", COSINE, "cosine, wrong partner", half),
        claim("yelp", COSINE, "ma, longer", "half again as many epochs help plain attention as much"),
        _best_heads_claim(files, "yelp", COSINE),
    ]
    age = [
        claim("age", "svgd", "", "28 new runs with the seeds of the first round"),
        claim("age", "svgd", "", first, first_round=True),
        claim("age", "spos", "", "the interval contains zero and the paper's gain", first_round=True),
        claim("age", COSINE, "", "with 30 heads, like plain attention: see the next rows"),
        claim("age", COSINE, "cosine, wrong partner", half),
        claim("age", COSINE, "ma, longer", "more epochs do not help plain attention here"),
        _best_heads_claim(files, "age", COSINE),
    ]
    _, what, other = DATA["snli"]
    paper = gain_of("table1", "snli", "accuracy")
    ours = files.paired("classification/snli.json", "SVGD", "accuracy", 100)
    why = "two heads share 0.22 of their attention instead of 0.36; accuracy stays"
    text = "SNLI, SVGD: more accurate (points)"
    return [*yelp, ResultClaim(text, paper, ours, what, why, ACCURACY, "SNLI, SVGD", other), *age]


def _head_claims(files: ResultFiles) -> list[ResultClaim]:
    """Rows on diverse heads and on calibration."""
    gains = (
        ("yelp", files.sizes("yelp", "svgd", "dist"), "", "by 4 % of the paper's amount; the cosine kernel by 45 %"),
        ("snli", files.unpaired("classification/snli.json", "SVGD", "dist"), "", "controls show no such change"),
        ("age", files.sizes("age", "svgd", "dist"), "", "heads of tuned plain attention are almost equal: Dist 0.01"),
        (
            "age",
            files.sizes("age", "svgd", "dist", "ma@svgd", first_round=True),
            ", at the same settings",
            "settings do not explain it (first round)",
        ),
    )
    rows = []
    for data, ours, at, why in gains:
        # The claim is that heads are more diverse, not by how much.
        name, what, other = DATA[data]
        claim, paper = f"{name}, SVGD: heads are more diverse{at} (Dist)", gain_of("table1", data, "dist")
        title = SAME_SETTINGS if at else f"{name}, SVGD"
        rows.append(ResultClaim(claim, paper, ours, what, why, DIST, title, other, is_control=bool(at)))
    for data, metric, scaled, why in (
        ("yelp", "ece15", "", "all methods have errors of 1.5 to 1.6 points"),
        ("yelp", "scaled_ece15", " after temperature scaling", "scaling lowers all errors by more: to 1.1 or 1.2"),
        ("age", "ece15", "", "+1.02 [-0.09, +2.13] in a first round"),
        ("age", "scaled_ece15", " after temperature scaling", "+0.79 [+0.18, +1.40] in a first round"),
    ):
        name, what, other = DATA[data]
        claim = f"{name}, SVGD: better calibrated{scaled} (ECE, points)"
        title = "… after scaling" if scaled else f"{name}, SVGD"
        ours = files.sizes(data, "svgd", metric)
        rows.append(ResultClaim(claim, None, ours, what, why, ECE, title, other, lower=True))
    name, what, other = DATA["snli"]
    claim, why = f"{name}, SVGD: better calibrated (ECE, points)", "NLL rises as well, by 0.021"
    ours = files.unpaired("classification/snli.json", "SVGD", "ece15", scale=100)
    return [*rows, ResultClaim(claim, None, ours, what, why, ECE, "SNLI, SVGD", other, lower=True)]


def _translation_claims(files: ResultFiles) -> list[ResultClaim]:
    """Rows on BLEU and step time of translators."""
    rows, paper = [], gain_of("table2", "iwslt14", "bleu")
    for label, rule, title in (
        ("SVGD, as published", "the rule as published", "as published"),
        ("SVGD", "tuned: sphere, no smoothing", "on the sphere"),
    ):
        for data, what in (("multi30k", "29K pairs"), ("tatoeba", "164K pairs"), ("europarl", "320K pairs")):
            name = data.capitalize()
            ours = files.paired(f"translation/{data}.json", label, "bleu")
            if label != "SVGD":
                why = "heads move apart by growing: norm 26.9, plain 6.9" if data == "multi30k" else "the same"
            elif ours.high < paper:
                why = "neither a gain nor a loss can be shown"
            else:
                why = "the interval contains zero and the paper's gain"
            claim, trained = f"translation: BLEU rises ({name}, {rule})", f"{what}, not IWSLT14"
            rows.append(ResultClaim(claim, paper, ours, trained, why, BLEU, f"{name}, {title}", OTHER))
    time = ResultClaim(
        "a step takes little more time (percent, all layers)",
        100 * (published().value("table2", "iwslt14", "svgd", "time") or math.nan) - 100,
        files.step_time(),
        "random tokens, 4,096 a step",
        "one fused update for all projections instead of one after the other",
        TIME,
        "all layers",
        digits=1,
        is_limit=True,
    )
    return [*rows, time]


def _redundancy_claims(files: ResultFiles) -> list[ResultClaim]:
    """Rows on heads that can be removed."""
    return [
        ResultClaim(
            "fewer redundant heads (points)",
            None,
            files.removals("SVGD, as published", lambda change: abs(change) < 0.5),
            "Multi30k",
            "89 % of plain heads change accuracy by less than 0.5 points, 80 % with the rule",
            HEADS,
            "redundant",
            OTHER,
            digits=0,
            lower=True,
        ),
        ResultClaim(
            "fewer heads that the model is better without (points)",
            None,
            files.removals("SVGD, as published", lambda change: change > 0),
            "Multi30k",
            "12 % to 6 %, but by seed 6, 2, 5 of 36 heads against 7, 0, 0",
            HEADS,
            "model better without",
            OTHER,
            digits=0,
            lower=True,
        ),
    ]


def _other_claims(files: ResultFiles) -> list[ResultClaim]:
    """Rows on GLUE and on texts about graphs."""
    bleu = gain_of("table4", "agenda", "bleu", "rma", "gw")
    return [
        ResultClaim(
            "GLUE: the mean rises (points)",
            gain_of("table3", "glue", "mean"),
            files.glue("mean"),
            f"150M of 16B tokens, {files.pretrainings()}",
            "pre-trainings with one recipe differ by more than 0.3",
            BLEU,
            "GLUE, mean",
            SMALLER,
        ),
        ResultClaim(
            "AGENDA: better texts (BLEU-4)",
            bleu,
            files.paired("graphs/agenda.json", "GW + RMA", "bleu"),
            "800 of 38,720 graphs",
            "seeds differ by more than methods",
            BLEU,
            "AGENDA",
            SMALLER,
        ),
        ResultClaim(
            "the same on WebNLG (BLEU-4, tuned)",
            bleu,
            files.paired("graphs/webnlg.json", "GW + RMA", "bleu"),
            "18K texts, not AGENDA",
            "as published -0.58 [-2.17, +1.00]",
            BLEU,
            "WebNLG, tuned",
            OTHER,
        ),
    ]
