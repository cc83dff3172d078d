"""Write the table and the forest plot of docs/replication.md from the files in results/.

    python -m studies.replication            # write both
    python -m studies.replication --check    # report whether both agree with the results

Verdicts follow from the interval: "holds" if it lies above zero; "fails" if the paper's gain lies above it; else
"cannot say". A claim about cost holds if our interval lies below the paper's number. The paper's numbers are those of
`repulsive.lab.paper.published`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.forest_plot import Row, diamond, dot, draw_forest

from repulsive.lab.paper.published import published
from repulsive.metrics.student import interval, quantile
from repulsive.safety.markdown import format_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, FIGURE = (
    ROOT / "results",
    ROOT / "docs" / "replication.md",
    ROOT / "docs" / "pictures" / "replication.svg",
)
BEGIN, END = "<!-- replication: begin; written by studies/replication.py -->", "<!-- replication: end -->"
HOLDS, FAILS, UNDECIDED = "holds", "fails", "cannot say"
EDGES = (-5.0, 3.0)  # of the forest plot, in points


@dataclass(frozen=True)
class Gain:
    """A difference from plain attention with its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        return " ".join([f"{self.mean:+.{digits}f}", f"[{self.low:+.{digits}f}, {self.high:+.{digits}f}]"])


@dataclass(frozen=True)
class Claim:
    """A row of the table.

    Args:
        claim: what the paper says.
        paper: its gain; None where it gives no number.
        ours: our gain.
        data: what was trained on.
        why: one line.
        other_data: "smaller data", "other data", or "" where the data play no part.
        digits: decimals.
        name: in the forest plot; "" to leave it out.
        lower: whether a smaller number is better; the verdict then takes the opposite signs.
        is_limit: the claim is that our number is at most the paper's.
    """

    claim: str
    paper: float | None
    ours: Gain
    data: str
    why: str
    other_data: str = ""
    digits: int = 2
    name: str = ""
    lower: bool = False
    is_limit: bool = False

    @property
    def verdict(self) -> str:
        if self.is_limit and self.paper is not None:
            return HOLDS if self.ours.high <= self.paper else FAILS if self.ours.low > self.paper else UNDECIDED
        sign = -1 if self.lower else 1
        low, high = sorted((sign * self.ours.low, sign * self.ours.high))
        expected = 0.0 if self.paper is None else sign * self.paper
        word = HOLDS if low > 0 else FAILS if high < expected or high < 0 else UNDECIDED
        return word if word == UNDECIDED or not self.other_data else f"same claim, {self.other_data}: {word}"


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def row(name: str, label: str) -> dict[str, Any]:
    table = read(name)
    rows = table.get("rows") or table["test"]["rows"]
    return next(each for each in rows if each["label"] == label)


def paired(name: str, label: str, metric: str, scale: float = 1.0) -> Gain:
    """The difference from the first row that the study computed, paired by seed and item."""
    compared = row(name, label)["against"][metric]
    return Gain(*(scale * compared[key] for key in ("difference", "low", "high")))


def unpaired(name: str, label: str, metric: str, against: str = "MA", scale: float = 1.0) -> Gain:
    """The difference of two means over seeds with Welch's interval, where the study has no paired one."""
    first, second = row(name, label), row(name, against)
    counts = [len(each["seeds"]) for each in (first, second)]
    means = [each["cells"][metric]["mean"] for each in (first, second)]
    errors = [each["cells"][metric]["deviation"] ** 2 / n for each, n in zip((first, second), counts, strict=True)]
    degrees = sum(errors) ** 2 / sum(error**2 / (n - 1) for error, n in zip(errors, counts, strict=True))
    half = quantile(0.95, max(1, math.floor(degrees))) * math.sqrt(sum(errors))
    difference = means[0] - means[1]
    return Gain(*(scale * x for x in (difference, difference - half, difference + half)))


def removals(label: str, counts: Callable[[float], bool]) -> Gain:
    """Difference from MA in the share of heads whose change in accuracy `counts`, in points; interval over seeds."""
    changes = read("translation/redundancy.json")
    shares = [
        [100 * statistics.fmean(counts(change) for change in changes[name][seed]) for seed in sorted(changes[name])]
        for name in ("MA", label)
    ]
    differences = [ours - plain for plain, ours in zip(*shares, strict=True)]
    limits = interval(differences)
    assert limits is not None
    return Gain(statistics.fmean(differences), *limits)


def glue(task: str) -> Gain:
    compared = read("pretraining/glue.json")["against"]["svgd"][task]
    return Gain(*(compared[key] for key in ("difference", "low", "high")))


def step_time() -> Gain:
    """Relative step time minus 1, in percent."""
    time = read("bench/bench-cuda-4096.json")["steps"]["4096"]["all layers"]
    return Gain(*(100 * (time[key] - 1) for key in ("ratio", "low", "high")))


def gain_of(table: str, data: str, metric: str, ours: str = "svgd", plain: str = "ma") -> float:
    """The paper's gain; plain attention is that of Table 1 if the table has none."""
    values = [published().value(table, data, name, metric) for name in (ours, plain)]
    if values[1] is None:
        values[1] = published().value("table1", data, plain, metric)
    assert values[0] is not None and values[1] is not None
    return values[0] - values[1]


def sizes(data: str, arm: str, metric: str, control: str = "") -> Gain:
    """A difference at the paper's sizes, from plain attention or a control; accuracy and ECE in points."""
    summary = read("classification/paper_sizes.json")[data]
    row = summary["controls"][control]["of"][arm] if control else summary["arms"][arm]["against_plain"]
    scale = 100 if metric in ("accuracy", "ece15", "scaled_ece15") else 1
    return Gain(*(scale * row[metric][key] for key in ("difference", "low", "high")))


DATA = {  # dataset -> name, our data, and whether they are smaller than the paper's or others
    "yelp": ("Yelp", "45K of 500K reviews", "smaller data"),
    "age": ("Age", "PAN15 for PAN16", "other data"),
    "snli": ("SNLI", "100K of 550K pairs, smaller model, 6 seeds", "smaller data"),
}
COSINE = "cosine-smoothing"
METHODS = {"svgd": "SVGD", "spos": "SPOS", COSINE: "cosine kernel"}


def accuracy_claim(data: str, arm: str, control: str, why: str) -> Claim:
    """A row on the accuracy of a method at the paper's sizes, against plain attention or a control."""
    name, what, other = DATA[data]
    method = METHODS[arm]
    claim, title = f"{name}, {method}: more accurate (points)", f"{name}, {method.removesuffix(' kernel')}"
    paper: float | None = gain_of("cosine" if arm == COSINE else "table1", data, "accuracy", arm)
    if control.startswith("ma@"):
        claim, title = f"{name}, {method}: against plain attention with the same settings", f"{title}, same settings"
    elif control:
        claim, title, paper = f"{name}, {method}: against itself without repulsion", "", None
    seeds = len(read("classification/paper_sizes.json")[data]["arms"][arm]["seeds"])
    ours = sizes(data, arm, "accuracy", control)
    return Claim(claim, paper, ours, f"{what}, {seeds} seeds", why, other, name=title)


def accuracy_claims() -> list[Claim]:
    """Rows on the accuracy of classifiers: at the paper's sizes, except on SNLI."""
    alone = "smoothing alone does not give the gain"
    rows = [
        accuracy_claim(*arguments)
        for arguments in (
            ("yelp", "svgd", "", "the chosen repulsion is weak: overlap of heads 0.82, plain 0.86"),
            ("yelp", "spos", "", "the same"),
            ("yelp", COSINE, "", "settings are those of plain attention; trained for two epochs only"),
            ("yelp", COSINE, "cosine, no repulsion", alone),
            ("age", "svgd", "", "not at equal settings: see the next row"),
            ("age", "svgd", "ma@svgd", "learning rate, dropout and weight decay that were chosen for SVGD"),
            ("age", "svgd", "svgd, no repulsion", alone),
            ("age", "spos", "", "the interval contains zero and the paper's gain"),
            ("age", COSINE, "", "not at equal settings: see the next row"),
            ("age", COSINE, "ma@svgd", "the settings chosen for the cosine kernel are those chosen for SVGD"),
            ("age", COSINE, "cosine, no repulsion", alone),
        )
    ]
    _, what, other = DATA["snli"]
    ours, paper = paired("classification/snli.json", "SVGD", "accuracy", 100), gain_of("table1", "snli", "accuracy")
    why = "two heads share 0.22 of their attention instead of 0.36; accuracy stays"
    snli = Claim("SNLI, SVGD: more accurate (points)", paper, ours, what, why, other, name="SNLI, SVGD")
    return [*rows[:4], snli, *rows[4:]]


def head_claims() -> list[Claim]:
    """Rows on diverse heads and on calibration."""
    gains = (
        ("yelp", sizes("yelp", "svgd", "dist"), "", "by 4 % of the paper's amount; the cosine kernel by 45 %"),
        ("snli", unpaired("classification/snli.json", "SVGD", "dist"), "", "controls show no such change"),
        ("age", sizes("age", "svgd", "dist"), "", "heads of tuned plain attention are almost equal: Dist 0.01"),
        ("age", sizes("age", "svgd", "dist", "ma@svgd"), ", at the same settings", "settings do not explain it"),
    )
    rows = []
    for data, ours, at, why in gains:
        # The claim is that heads are more diverse, not by how much.
        name, what, other = DATA[data]
        claim, paper = f"{name}, SVGD: heads are more diverse{at} (Dist)", gain_of("table1", data, "dist")
        rows.append(Claim(claim, paper, ours, what, why, other))
    for data, metric, scaled, why in (
        ("yelp", "ece15", "", "all methods have errors of 1.5 to 1.6 points"),
        ("yelp", "scaled_ece15", " after temperature scaling", "scaling lowers all errors by more: to 1.1 or 1.2"),
        ("age", "ece15", "", "at the same settings -0.06 [-1.12, +1.00]"),
        ("age", "scaled_ece15", " after temperature scaling", "at the same settings +0.22 [-0.36, +0.80]"),
    ):
        name, what, other = DATA[data]
        claim = f"{name}, SVGD: better calibrated{scaled} (ECE, points)"
        rows.append(Claim(claim, None, sizes(data, "svgd", metric), what, why, other, lower=True))
    name, what, other = DATA["snli"]
    claim, why = f"{name}, SVGD: better calibrated (ECE, points)", "NLL rises as well, by 0.021"
    ours = unpaired("classification/snli.json", "SVGD", "ece15", scale=100)
    return [*rows, Claim(claim, None, ours, what, why, other, lower=True)]


def claims() -> list[Claim]:
    """All rows, in the order of the paper."""
    found = [*accuracy_claims(), *head_claims()]
    paper = gain_of("table2", "iwslt14", "bleu")
    for data, what in (("multi30k", "29K pairs"), ("tatoeba", "164K pairs"), ("europarl", "320K pairs")):
        name = data.capitalize()
        ours = paired(f"translation/{data}.json", "SVGD, as published", "bleu")
        why = "heads move apart by growing: norm 26.9, plain 6.9" if data == "multi30k" else "the same"
        claim = f"translation: BLEU rises ({name}, the rule as published)"
        found.append(
            Claim(claim, paper, ours, f"{what}, not IWSLT14", why, "other data", name=f"{name}, BLEU, as published")
        )
    for data, what in (("multi30k", "29K pairs"), ("tatoeba", "164K pairs"), ("europarl", "320K pairs")):
        name = data.capitalize()
        ours = paired(f"translation/{data}.json", "SVGD", "bleu")
        claim = f"translation: BLEU rises ({name}, tuned: sphere, no smoothing)"
        why = (
            "neither a gain nor a loss can be shown"
            if ours.high < paper
            else "the interval contains zero and the paper's gain"
        )
        found.append(
            Claim(claim, paper, ours, f"{what}, not IWSLT14", why, "other data", name=f"{name}, BLEU, on the sphere")
        )
    found.append(
        Claim(
            "a step takes little more time (percent, all layers)",
            100 * (published().value("table2", "iwslt14", "svgd", "time") or math.nan) - 100,
            step_time(),
            "random tokens, 4,096 a step",
            "one fused update for all projections instead of one after the other",
            is_limit=True,
            digits=1,
        )
    )
    found += [
        Claim(
            "fewer redundant heads (points)",
            None,
            removals("SVGD, as published", lambda change: abs(change) < 0.5),
            "Multi30k",
            "89 % of plain heads change accuracy by less than 0.5 points, 80 % with the rule",
            "other data",
            digits=0,
            lower=True,
        ),
        Claim(
            "fewer heads that the model is better without (points)",
            None,
            removals("SVGD, as published", lambda change: change > 0),
            "Multi30k",
            "12 % to 6 %, but by seed 6, 2, 5 of 36 heads against 7, 0, 0",
            "other data",
            digits=0,
            lower=True,
        ),
        Claim(
            "GLUE: the mean rises (points)",
            gain_of("table3", "glue", "mean"),
            glue("mean"),
            "150M of 16B tokens, 2 pre-trainings",
            "pre-trainings with one recipe differ by more than 0.3",
            "smaller data",
            name="GLUE, mean",
        ),
        Claim(
            "AGENDA: better texts (BLEU-4)",
            gain_of("table4", "agenda", "bleu", "rma", "gw"),
            paired("graphs/agenda.json", "GW + RMA", "bleu"),
            "800 of 38,720 graphs",
            "seeds differ by more than methods",
            "smaller data",
            name="AGENDA, BLEU-4",
        ),
        Claim(
            "the same on WebNLG (BLEU-4, tuned)",
            gain_of("table4", "agenda", "bleu", "rma", "gw"),
            paired("graphs/webnlg.json", "GW + RMA", "bleu"),
            "18K texts, not AGENDA",
            "as published -0.58 [-2.17, +1.00]",
            "other data",
            name="WebNLG, BLEU-4",
        ),
    ]
    return found


def block(rows: Sequence[Claim]) -> str:
    """The table as Markdown."""
    cells = [
        [
            each.claim,
            "" if each.paper is None else f"{each.paper:+.{each.digits}f}",
            each.ours.text(each.digits),
            each.data,
            each.verdict,
            each.why,
        ]
        for each in rows
    ]
    return format_table(["claim", "paper", "ours [95 % CI]", "our data", "verdict", "why"], cells)


def replaced(page: str, text: str) -> str:
    """The page with the text between the two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


LEGEND = (
    f'{dot(216, 20)}<text x="226" y="24">ours, 95 % interval</text>',
    f'{diamond(390, 20)}<text x="402" y="24">the paper, its own data</text>',
)


def draw(rows: Sequence[Claim]) -> str:
    """The forest plot as SVG: our intervals, and the paper's gains as hollow diamonds."""
    shown = [Row(each.name, (each.ours.mean, each.ours.low, each.ours.high), each.paper) for each in rows if each.name]
    title = "Gains of repulsive attention: the paper's and ours"
    return draw_forest(title, shown, EDGES, "difference from plain attention, in points", LEGEND)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    options = parser.parse_args()
    rows, page = claims(), PAGE.read_text(encoding="utf-8")
    text, figure = replaced(page, block(rows)), draw(rows)
    if options.check:
        sys.exit(0 if text == page and FIGURE.read_text(encoding="utf-8") == figure else 1)
    PAGE.write_text(text, encoding="utf-8")
    FIGURE.write_text(figure, encoding="utf-8")


if __name__ == "__main__":
    main()
